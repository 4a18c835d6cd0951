"""What the host tier hands out besides leases: a slot being filled, and word of a block that went."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtier.errors import LeaseError
from kvtier.keys import BlockDigest
from kvtier.pool import Lease

__all__ = ["Eviction", "HeldBlock", "Phase", "PublishedAs", "Reservation"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A block that is no longer, or never came to be, in host memory: it gave its slot to another, or its filling came
    to nothing. Told after the fact."""

    namespace: bytes
    digest: BlockDigest


class HeldBlock(NamedTuple):
    """A lease on a block's slot, and the block's own length in bytes: the slot may be longer. ttl_s: of `reserve`.
    checksum: XXH3-64 of what was committed, where the tier keeps them."""

    lease: Lease
    nbytes: int
    ttl_s: float | None = None
    checksum: int | None = None


class Phase(Enum):
    """Where a reservation stands."""

    FILLING = "filling"
    COMMITTED = "committed"
    VOID = "void"


class PublishedAs(Enum):
    """What became of a block whose slot was filled before it had a name."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"
    BEING_STORED = "being_stored"
    """Another fills a slot for it."""
    FULL = "full"
    """Its tenant's quota is used up by what cannot be evicted, or the tier is closed."""


FILLING = Phase.FILLING


class Reservation:
    """A slot set aside for one block of `nbytes`, to be filled and then committed or aborted. Dies with its owner.

    lease: the slot to fill; it lives until the reservation ends.
    Mutable state: `_phase`, guarded by the tier's lock.
    """

    __slots__ = ("_parent_lease", "_phase", "digest", "lease", "namespace", "nbytes", "parent")

    def __init__(self, namespace: bytes, digest: BlockDigest, parent: BlockDigest | None, nbytes: int) -> None:
        self.namespace = namespace
        self.digest = digest
        self.parent = parent
        self.nbytes = nbytes
        self.lease: Lease
        self._parent_lease: Lease | None = None
        self._phase = FILLING

    def sum_up(self) -> int:
        """XXH3-64 of what is in the slot now; 0 where that is this block's no more, which will not be committed."""
        from kvtier.frame import payload_checksum  # and with it xxhash, which most stores without a disk need not

        try:
            return payload_checksum(self.lease.view[: self.nbytes])
        except LeaseError:
            return 0
