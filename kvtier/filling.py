"""Blocks of lower tiers on their way into slots of host memory, one batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.fence import Fence
from kvtier.keys import make_key
from kvtier.leases import Owner
from kvtier.reasons import MissReason
from kvtier.stage import StageRead
from kvtier.tiers.base import Adoption, ReadRequest
from kvtier.tiers.host import HostTier

__all__ = ["Filler"]

NO_BYTES = memoryview(b"")


class Filler:
    """Has a tier read blocks, on a thread of the tier's: may block for as long as that does.

    Mutable state: `_num_reads`, guarded by `_lock`, a leaf.
    """

    def __init__(self, host: HostTier, owner: Owner) -> None:
        """owner: of the slots."""
        self._host = host
        self._owner = owner
        self._lock = threading.Lock()
        self._num_reads = 0
        self.fence = Fence(host, owner)

    @property
    def num_reads(self) -> int:
        """Blocks read so far, well or not."""
        return self._num_reads

    def fill(self, reads: Sequence[StageRead]) -> None:
        """What becomes of each is its `failure`; with none it has a reservation, unless it came meanwhile."""
        if reads[0].source.tier.adopts:
            self._adopt(reads)
        else:
            self._copy(reads)

    def _copy(self, reads: Sequence[StageRead]) -> None:
        failure: MissReason | None = None
        for read in reads:
            # Behind a block without a slot, a slot would serve nobody and cost someone's block.
            failure = read.failure = failure or (MissReason.TIER_DOWN if read.is_replaced else self.fence.reserve(read))
        filled = [(read, read.reservation) for read in reads if read.reservation is not None]
        if not filled:
            return
        self._count(len(filled))
        outcomes = reads[0].source.tier.read(
            [
                ReadRequest(make_key(read.namespace, read.digest), reservation.lease.view[: read.nbytes])
                for read, reservation in filled
            ]
        )
        for (read, _), outcome in zip(filled, outcomes, strict=True):
            read.note_outcome(outcome)

    def _adopt(self, reads: Sequence[StageRead]) -> None:
        """From a tier whose memory host memory is: it says which slots the blocks are in."""
        number = self.fence.number
        wanted: list[tuple[StageRead, Adoption]] = []
        for read in reads:
            if read.is_replaced:
                read.failure = MissReason.TIER_DOWN
            elif self._host.state(read.namespace, read.digest) is None:  # else it came meanwhile
                wanted.append((read, Adoption(read.nbytes, self._owner)))
        if not wanted:
            return
        self._count(len(wanted))
        try:
            outcomes = reads[0].source.tier.read(
                [ReadRequest(make_key(read.namespace, read.digest), NO_BYTES, adoption) for read, adoption in wanted]
            )
            for (read, adoption), outcome in zip(wanted, outcomes, strict=True):
                read.note_outcome(outcome)
                if read.failure is None and adoption.lease is not None:
                    lease, adoption.lease = adoption.lease, None
                    read.failure = self.fence.reserve(read, lease, number)
        finally:
            for _, adoption in wanted:  # a slot whose block is not well, or of which something failed since
                if adoption.lease is not None:
                    adoption.lease.release()

    def _count(self, number: int) -> None:
        with self._lock:
            self._num_reads += number
