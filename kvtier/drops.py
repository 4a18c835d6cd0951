"""Blocks that were not written to a lower tier: why not, and which of them may be tried again."""

from __future__ import annotations

from kvtier.keys import Key
from kvtier.reasons import DropReason
from kvtier.tiers.base import WriteOutcome

__all__ = ["NOT_AGAIN", "NO_ROOM", "OUTCOME_TO_REASON", "pack_dropped", "unpack_dropped"]

NO_ROOM = frozenset({DropReason.BACKLOG, DropReason.ORPHAN})
NOT_AGAIN = frozenset({DropReason.ALREADY_STORED, DropReason.EVICTED, DropReason.CLOSED, DropReason.RESET})

OUTCOME_TO_REASON = {
    WriteOutcome.ALREADY_STORED: DropReason.ALREADY_STORED,
    WriteOutcome.FULL: DropReason.TIER_FULL,
    WriteOutcome.ERROR: DropReason.TIER_ERROR,
    WriteOutcome.WITHDRAWN: DropReason.RESET,
    WriteOutcome.REFUSED: DropReason.TIER_DOWN,
}


# A block that was dropped is remembered as bytes, its reason's place in this list and its parent's key: the collector
# would walk 65,000 objects on the engine's thread.
_REASONS = list(DropReason)


def pack_dropped(reason: DropReason, parent: Key | None) -> bytes:
    return bytes([_REASONS.index(reason)]) + (parent or b"")


def unpack_dropped(packed: bytes) -> tuple[DropReason, Key | None]:
    return _REASONS[packed[0]], Key(packed[1:]) if len(packed) > 1 else None
