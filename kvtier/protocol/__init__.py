"""What a client and kvtier-server say to each other: `messages`, and `wire`, which has them as bytes.

Needs msgspec: `pip install 'kvtier[server]'`. docs/protocol.md is the whole of it, for clients in other languages.
"""
