"""The contract of an eviction policy: in which order resident blocks give way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["NO_PARENT", "EvictionPolicy", "PolicyFactory"]

NO_PARENT = -1


class EvictionPolicy(Protocol):
    """Orders slots; holds no bytes, pins or keys. Called under the index's lock, so must not block or call back.

    A block goes only after every resident block that continues it: an evicted prefix makes its tail unreachable.
    `kvtier.testing.policy_conformance` checks all that is promised here.
    """

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:
        """`slot` became resident; `parent` is the slot of the block before it in the chain, or NO_PARENT.

        fingerprint: 64 bits of the block's digest, the same whenever the block comes back, in whatever slot.
        """

    def touch(self, slots: Sequence[int]) -> None:
        """A prompt used these blocks, first block first."""

    def remove(self, slot: int) -> None:
        """`slot` is no longer resident: it was evicted or forgotten."""

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        """The slot to evict next, or None when `can_evict` holds for no slot that may go now. Changes no order: asked
        again at once it answers the same.

        A slot that `can_evict` refused is not asked about again until `released` names it.
        """

    def released(self, slots: Sequence[int]) -> None:
        """`can_evict` may hold for these by now; any other slot may be among them."""

    def check_integrity(self, slots: set[int]) -> None:
        """Raises IntegrityError unless exactly `slots` are ordered."""


PolicyFactory = Callable[[], EvictionPolicy]
"""Makes an empty order; called once for each size class, and each tenant with a quota in it."""
