"""Blocks of lower tiers on their way into slots of host memory, one batch at a time, until they are findable there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvtier.errors import ClosedError
from kvtier.fence import BLOCKS_AT_ONCE, Fence
from kvtier.keys import make_key
from kvtier.leases import Owner
from kvtier.reasons import MissReason
from kvtier.stage import StageRead
from kvtier.tiers.base import Adoption, ReadRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation

__all__ = ["Filler"]

logger = logging.getLogger("kvtier.staging")

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
        num_wanted = next((i for i, read in enumerate(reads) if read.is_replaced), len(reads))
        for read in reads[num_wanted:]:
            read.failure = MissReason.TIER_DOWN
        if num_wanted:
            self.fence.reserve(reads[:num_wanted])
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
            for (read, _), outcome in zip(wanted, outcomes, strict=True):
                read.note_outcome(outcome)
            adopted = [each for each in wanted if each[0].failure is None and each[1].lease is not None]
            leases = [adoption.lease for _, adoption in adopted if adoption.lease is not None]
            for _, adoption in adopted:
                adoption.lease = None
            if adopted:
                self.fence.reserve([read for read, _ in adopted], leases, number)
        finally:
            for _, adoption in wanted:  # a slot whose block is not well, or of which something failed since
                if adoption.lease is not None:
                    adoption.lease.release()

    def commit(self, reads: Sequence[StageRead], waiting: Callable[[StageRead], Iterable[Owner]]) -> int:
        """Make blocks findable, prefix first, each leased by those who wait for it; or give their slots back, and then
        the read has a failure. Returns for how many of the leading reads it did: no more than BLOCKS_AT_ONCE, and as
        far as the first that became void meanwhile. Their guards are the caller's to release.

        reads: from one tier; all failed or none, all with a slot or none. waiting: who waits for the block and was not
        told yet."""
        reads = reads[:BLOCKS_AT_ONCE]
        reservations = [read.reservation for read in reads if read.reservation is not None]
        if not reservations:
            return len(reads)
        number = len(reads)
        if reads[0].failure is None:
            try:
                number = self._commit(reads, reservations, waiting)
            except BaseException:  # else their stages would wait for them until their time is over
                logger.exception("%d staged blocks could not be committed", len(reads))
                for read in reads:
                    read.failure = MissReason.TIER_ERROR
        for read, reservation in zip(reads[:number], reservations, strict=False):
            if read.failure is not None:
                self._host.abort(reservation)
        return number

    def _commit(
        self,
        reads: Sequence[StageRead],
        reservations: Sequence[Reservation],
        waiting: Callable[[StageRead], Iterable[Owner]],
    ) -> int:
        guards = self._host.share(reservations, self._owner)
        number = next((i for i, guard in enumerate(guards) if guard is None), len(guards))
        for early in filter(None, guards[number:]):  # of blocks behind one that is void, which come next
            early.release()
        awaited: dict[Owner, list[Reservation]] = {}
        for read, reservation, guard in zip(reads[:number], reservations, guards, strict=False):
            read.guard = guard
            for owner in waiting(read):
                awaited.setdefault(owner, []).append(reservation)
        for owner, theirs in awaited.items():
            with suppress(ClosedError):  # the stage was closed since
                self._host.share(theirs, owner)
        outcomes = self._host.commit(reservations[:number], came_from=reads[0].source.tier.name)
        for read, is_stored in zip(reads, [*outcomes, False], strict=False):
            if not is_stored:
                read.failure = MissReason.RESET
        return min(number + 1, len(reads))

    def _count(self, number: int) -> None:
        with self._lock:
            self._num_reads += number
