"""KV events by tier: which blocks each tier holds, told to routers in vLLM's encoding over ZeroMQ.

Importing this package needs neither msgspec nor pyzmq; `StoreEvents` imports them once an endpoint is set.
"""

from kvtier.events.pump import StoreEvents
from kvtier.events.sources import EventSpace, EventStore, ListsBlocks, WatchedLower, follow_host, held_by_host
from kvtier.events.tracker import Changes, TierEvents, chains

__all__ = [
    "Changes",
    "EventSpace",
    "EventStore",
    "ListsBlocks",
    "StoreEvents",
    "TierEvents",
    "WatchedLower",
    "chains",
    "follow_host",
    "held_by_host",
]
