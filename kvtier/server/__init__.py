"""The daemon: one cache for all engines of a node, and for the nodes beside it. See docs/server.md."""
