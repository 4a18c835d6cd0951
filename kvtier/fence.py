"""A fence between what lower tiers held before a reset and host memory, which forgot its own blocks first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.leases import Lease, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.stage import StageRead
from kvtier.tiers.host import HostTier

__all__ = ["Fence"]


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

    def reserve(self, read: StageRead, lease: Lease | None = None, since: int | None = None) -> MissReason | None:
        """Set a slot aside. Without one, why; None too when the block came to host memory meanwhile.

        lease: of a slot that holds the block already, and the caller's; it is the reservation's, or ends. since: the
        `number` before that was found out.
        """
        number = self._number if since is None else since
        if number % 2 or number != self._number:
            if lease is not None:
                lease.release()
            return MissReason.RESET
        tenant = read.waiters[0][0].tenant  # whose stage asked first
        reserved = self._host.reserve(
            read.namespace, read.digest, read.parent, read.nbytes, self._owner, tenant=tenant, lease=lease
        )
        if isinstance(reserved, DropReason):
            return None if reserved is DropReason.ALREADY_STORED else MissReason.HOST_FULL
        if number != self._number:  # a reset began since, and may have passed here before the slot was taken
            self._host.abort(reserved)
            return MissReason.RESET
        read.reservation = reserved
        return None
