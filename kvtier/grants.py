"""What is known of a slot that a kvtier-server granted, and which pages such slots lie on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvtier.memory import PAGE_BYTES
from kvtier.slots import SlotGroup

__all__ = ["GrantedClass", "Handle", "SlotKind", "PageMap", "Stock"]


class SlotKind(IntEnum):
    """Whose a slot is, as far as the server has told."""

    PRIVATE = 1
    """Granted: ours, without a name at the server. Free again once it is given up."""
    SPARE = 2
    """Granted, and its block is the server's in another slot: the copy is needed only while somebody leases it. Free
    and PRIVATE again once it is given up."""
    SHARED = 3
    """The server's block, leased to us. Gone once it is given up, of which the server is to be told."""
    LOST = 4
    """Of a connection that is no more: good for whoever uses it still, and gone once it is given up."""


class Handle(NamedTuple):
    """What the server knows a slot by. era: the connection that granted it."""

    number: int
    era: int


class Stock(NamedTuple):
    """Slots of a size class."""

    num_free: int
    num_slots: int
    """Free ones and used ones, those too that are lost."""


@dataclass(slots=True)
class GrantedClass(SlotGroup):
    """The slots of a size class, as they are counted."""

    num_slots: int = 0
    num_wanted: int = 1
    """Fewer free ones are work for the keeper."""


class PageMap:
    """Which pages of a mapping are taken. All offsets and lengths are of whole pages.

    Mutable state: `_taken`, a byte for each page up to the last that ever was.
    """

    def __init__(self) -> None:
        self._taken = bytearray()

    @property
    def num_taken(self) -> int:
        return self._taken.count(1)

    def are_free(self, offset: int, nbytes: int) -> bool:
        """Whether all of these are."""
        return self._taken.find(1, offset // PAGE_BYTES, (offset + nbytes) // PAGE_BYTES) < 0

    def are_taken(self, offset: int, nbytes: int) -> bool:
        """Whether all of these are."""
        start, stop = offset // PAGE_BYTES, (offset + nbytes) // PAGE_BYTES
        return self._taken.count(1, start, stop) == stop - start

    def take(self, offset: int, nbytes: int) -> None:
        start, stop = offset // PAGE_BYTES, (offset + nbytes) // PAGE_BYTES
        if stop > len(self._taken):
            self._taken.extend(bytes(stop - len(self._taken)))
        self._taken[start:stop] = b"\1" * (stop - start)

    def free(self, offset: int, nbytes: int) -> None:
        start, stop = offset // PAGE_BYTES, (offset + nbytes) // PAGE_BYTES
        self._taken[start:stop] = bytes(stop - start)
