"""A kvtier-server as a tier: blocks in the memory of a daemon, on this machine or another. Needs msgspec:
pip install 'kvtier[server]'."""

from kvtier.tiers.server.snapshot import ServerSnapshot
from kvtier.tiers.server.tier import ServerTier

__all__ = ["ServerSnapshot", "ServerTier"]
