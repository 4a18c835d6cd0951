"""Places below the GPU: one contract, one module each."""

from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction, Reservation

__all__ = [
    "Eviction",
    "HostTier",
    "ReadOutcome",
    "ReadRequest",
    "Reservation",
    "Tier",
    "TierUsage",
    "WriteOutcome",
    "WriteRequest",
]
