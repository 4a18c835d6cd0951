"""A copy down under way: what a job holds until it ends, and what becomes of blocks that were not copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.keys import BlockDigest
from kvtier.reasons import DropReason
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.contract import CopyFailure
from kvtier_connectors.published import PublishedBlock

__all__ = ["FAILURE_TO_REASON", "TRIED_AGAIN", "Copying", "StoreJob", "blocks_per_job"]

JOB_BYTES = 32 << 20  # a restore waits for one running job at most: a few milliseconds

FAILURE_TO_REASON = {
    CopyFailure.BACKLOG: DropReason.BACKLOG,
    CopyFailure.NO_FENCE: DropReason.COPY_FAILED,
    CopyFailure.RAISED: DropReason.COPY_FAILED,
    CopyFailure.CLOSED: DropReason.CLOSED,
}

# The block may still be stored at a later look at the queue, and must be before its descendants.
TRIED_AGAIN = frozenset(
    {
        DropReason.BACKLOG,
        DropReason.COPY_FAILED,
        DropReason.HOST_FULL,
        DropReason.ORPHAN,
        DropReason.QUOTA,
        DropReason.TIER_ERROR,
    }
)


def blocks_per_job(block_bytes: int) -> int:
    """How many blocks of this size one copy job takes."""
    return max(1, JOB_BYTES // block_bytes)


@dataclass(eq=False, slots=True)
class Copying:
    """A block whose copy has not ended, and the slot that it goes to."""

    block: PublishedBlock
    reservation: Reservation
    overtaken: bool = False
    """The engine reused the block although it is pinned: what was copied may be anything."""
    is_fenced: bool = False
    """The engine reuses the block, and waits for the copy before it writes it."""

    def why_not_stored(self, namespace: bytes, is_reachable: Callable[[BlockDigest | None], bool]) -> DropReason | None:
        """Now that it was copied. namespace: of today; is_reachable: whether the block before it can be restored."""
        if self.reservation.namespace != namespace:
            return DropReason.RESET
        if self.overtaken:
            return DropReason.OVERTAKEN
        return None if is_reachable(self.block.parent) else DropReason.ORPHAN


@dataclass(eq=False, slots=True)
class StoreJob:
    """Blocks that one job copies."""

    blocks: list[Copying]
    begun_at: float
