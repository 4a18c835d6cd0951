"""Blocks that were not written to a lower tier: why not, and which of them may be tried again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvtier.keys import Key
from kvtier.reasons import DropReason
from kvtier.tiers.base import WriteOutcome

__all__ = ["NOT_AGAIN", "NO_ROOM", "OUTCOME_TO_REASON", "DroppedBlocks", "keep_newest"]

NO_ROOM = frozenset({DropReason.BACKLOG, DropReason.ORPHAN})
NOT_AGAIN = frozenset({DropReason.ALREADY_STORED, DropReason.EVICTED, DropReason.CLOSED, DropReason.RESET})

OUTCOME_TO_REASON = {
    WriteOutcome.ALREADY_STORED: DropReason.ALREADY_STORED,
    WriteOutcome.FULL: DropReason.TIER_FULL,
    WriteOutcome.ERROR: DropReason.TIER_ERROR,
    WriteOutcome.WITHDRAWN: DropReason.RESET,
    WriteOutcome.REFUSED: DropReason.TIER_DOWN,
}


_REASONS = list(DropReason)


class DroppedBlocks(OrderedDict[Key, bytes]):
    """Blocks that were dropped and may be tried again, in the order in which that happened; the oldest are forgotten.

    Each is remembered as bytes, its reason's place in a list and its parent's key: the collector would walk 65,000
    objects on the engine's thread.
    """

    def note(self, key: Key, reason: DropReason, parent: Key | None, most: int) -> None:
        """most: blocks that are remembered."""
        self[key] = bytes([_REASONS.index(reason)]) + (parent or b"")
        keep_newest(self, most)

    def reason(self, key: Key) -> DropReason | None:
        """Why it was dropped; None where it is not known to be."""
        packed = self.get(key)
        return None if packed is None else _REASONS[packed[0]]

    def reasons_of(self, held: Callable[[Sequence[Key]], list[bool]]) -> Counter[DropReason | None]:
        """How many of them are still held, by why each was dropped."""
        here = zip(list(self), held(list(self)), strict=True)
        return Counter(self.reason(key) for key, is_here in here if is_here)

    def to_try_again(self, tried: Collection[Key]) -> list[tuple[Key, Key | None]]:
        """In their order and with their parents: what found no room, and of the rest what was not tried yet. Nothing
        behind a block that stays dropped, nor an orphan before what it continues was written."""
        again: dict[Key, tuple[Key | None, bool]] = {}
        for key, packed in self.items():
            reason, parent = _REASONS[packed[0]], Key(packed[1:]) if len(packed) > 1 else None
            had_no_room = reason in NO_ROOM
            if parent in self and (parent not in again or (reason is DropReason.ORPHAN and not again[parent][1])):
                continue
            if had_no_room or key not in tried:
                again[key] = parent, had_no_room
        return [(key, parent) for key, (parent, _) in again.items()]


def keep_newest(noted: OrderedDict[Key, Any], most: int) -> None:
    """Forget what was noted first, beyond so many."""
    while len(noted) > most:
        noted.popitem(last=False)
