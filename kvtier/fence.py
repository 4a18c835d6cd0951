"""A fence between what lower tiers held before a reset and host memory, which forgot its own blocks first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.leases import Lease, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.stage import StageRead
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation

__all__ = ["BLOCKS_AT_ONCE", "Fence"]

BLOCKS_AT_ONCE = 32
"""Reserved, or committed, under one hold of host memory's lock: a millisecond or two where each evicts another."""


class Fence:
    """Gives reads from lower tiers their slots, but none while a reset goes from tier to tier.

    A read that has its slot by then is void, as host memory's own reset makes it. One that gets its slot between that
    and the lower tier's would bring back a block of before.

    Any thread. Mutable state: `_number`, odd while a reset is under way, written by one reset at a time.
    """

    def __init__(self, host: HostTier, owner: Owner) -> None:
        """owner: of the slots."""
        self._host = host
        self._owner = owner
        self._number = 0

    @contextmanager
    def shut(self) -> Iterator[None]:
        """For a reset, around all that it does. One at a time."""
        self._number += 1
        try:
            yield
        finally:
            self._number += 1

    @property
    def number(self) -> int:
        """Of resets that began or ended."""
        return self._number

    def reserve(self, reads: Sequence[StageRead], leases: Sequence[Lease] = (), since: int | None = None) -> None:
        """Set a slot aside for each of these blocks of one stage, in prefix order. Why there is none is the read's
        failure; it has neither when its block came to host memory meanwhile. Behind a block without a slot none is set
        aside: it would serve nobody, and cost someone's block.

        leases: of slots that hold the blocks already, and the caller's; each is its reservation's, or ends. since: the
        `number` before that was found out.
        """
        number = self._number if since is None else since
        if number % 2 or number != self._number:
            self._refuse(reads, leases, MissReason.RESET)
            return
        for start in range(0, len(reads), BLOCKS_AT_ONCE):
            stop = start + BLOCKS_AT_ONCE
            failure = self._reserve(reads[start:stop], leases[start:stop], number)
            if failure is not None:
                self._refuse(reads[stop:], leases[stop:], failure)
                return

    def _reserve(self, reads: Sequence[StageRead], leases: Sequence[Lease], number: int) -> MissReason | None:
        """Why those behind these cannot have slots."""
        first = reads[0]
        tenant = first.waiters[0][0].tenant  # whose stage asked first
        blocks = [(read.digest, read.parent) for read in reads]
        outcomes = self._host.reserve_all(
            first.namespace, blocks, first.nbytes, self._owner, tenant=tenant, leases=leases, is_chain=True
        )
        if number != self._number:  # a reset began since, and may have passed here before the slots were taken
            for outcome in outcomes:
                if isinstance(outcome, Reservation):
                    self._host.abort(outcome)
            self._refuse(reads, (), MissReason.RESET)
            return MissReason.RESET
        for read, outcome in zip(reads, outcomes, strict=True):
            if isinstance(outcome, Reservation):
                read.reservation = outcome
                if read.is_replaced:  # since: who replaced it found nothing to withdraw
                    self._host.withdraw(outcome)
            elif outcome is not DropReason.ALREADY_STORED:
                read.failure = MissReason.HOST_FULL
        return reads[-1].failure

    @staticmethod
    def _refuse(reads: Sequence[StageRead], leases: Sequence[Lease], failure: MissReason) -> None:
        for lease in leases:
            lease.release()
        for read in reads:
            read.failure = failure
