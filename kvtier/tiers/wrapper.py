"""A tier around a tier: the base of those that add one thing and leave the rest to the tier within."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.decisions import Decision
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest

__all__ = ["TierWrapper"]


class TierWrapper(Tier):
    """Forwards every call of the contract to `inner`, and blocks and raises as that does.

    Wrappers go around each other in any order. Closing one closes what is within.
    """

    def __init__(self, tier: Tier) -> None:
        self._inner = tier
        self.name = tier.name
        self.is_remote = tier.is_remote
        self.keeps_history = tier.keeps_history
        self.adopts = tier.adopts
        self.job_scale = tier.job_scale

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def inner(self) -> Tier:
        """The tier within, which may be a wrapper too."""
        return self._inner

    def read_bytes(self, least: int, share: int) -> int:
        return self._inner.read_bytes(least, share)

    def probe(self) -> None:
        self._inner.probe()

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    def start_epoch(self, epoch: int) -> None:
        self._inner.start_epoch(epoch)

    def touch(self, keys: Sequence[Key]) -> None:
        self._inner.touch(keys)

    def tell(self, decisions: Sequence[Decision]) -> None:
        self._inner.tell(decisions)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self._inner.contains(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        return self._inner.read(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        return self._inner.write(requests)

    def remove(self, keys: Sequence[Key]) -> int:
        return self._inner.remove(keys)

    def usage(self) -> TierUsage:
        return self._inner.usage()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()
