"""Which slot of host memory is which block's: had by evicting others, named before it is filled, or once it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from kvtier.errors import LayoutError, LeaseError
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, make_key
from kvtier.leases import Lease, Owner
from kvtier.policy import NO_PARENT
from kvtier.reasons import DropReason
from kvtier.slots import SlotPool
from kvtier.tiers.eviction import EvictionOrder
from kvtier.tiers.looking import Looked
from kvtier.tiers.reservation import Eviction, Phase, PublishedAs, Reservation

__all__ = ["Named"]

COMMITTED, VOID = Phase.COMMITTED, Phase.VOID  # names of this module: an enumeration finds its members slowly
MAX_GHOSTS = 1 << 17  # about 12 MiB of remembered keys


class Named(Looked):
    """Base of the host tier: which block is in which slot, from the slot's allocation until the block is forgotten.

    Mutable state: as `Looked`, counters, and whether it is closed, guarded by `_lock`.
    """

    def __init__(self, pool: SlotPool, order: EvictionOrder, *, keeps_checksums: bool) -> None:
        super().__init__(pool, order, keeps_checksums=keeps_checksums)
        self._num_evicted = 0
        self._copier = pool.owner("host tier copies")
        self._closed = False

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    # ---- filled first, then named --------------------------------------------------------------------------------

    def grant(self, nbytes: int, number: int, owner: Owner, *, tenant: str = "") -> list[Lease]:
        """Up to `number` slots for blocks of `nbytes` that have no name yet, evicting others to make room: as many as
        can be had for this tenant. Raises LayoutError for blocks that fit no slab, ClosedError for an owner that has
        ended."""
        self.check_process()
        self._pool.slot_bytes(nbytes)
        leases: list[Lease] = []
        evicted: list[Eviction] = []
        try:
            with self._lock:
                while not self._closed and len(leases) < number:
                    lease = self._pool.allocate(nbytes, owner)
                    if lease is not None:
                        leases.append(lease)
                    elif self._evict(nbytes, tenant, evicted) is not None:
                        break
        finally:
            self._tell_evicted(evicted)
        return leases

    def give_way(self, nbytes: int, number: int) -> None:
        """Forget up to `number` blocks of this size class, those that go next, without need of a slot. The lock is
        given up between one and the next."""
        evicted: list[Eviction] = []
        try:
            for _ in range(number):
                with self._lock:
                    if self._closed or self._evict(nbytes, "", evicted) is not None:
                        break
        finally:
            self._tell_evicted(evicted)

    def publish(
        self,
        namespace: bytes,
        blocks: Sequence[tuple[BlockDigest, BlockDigest | None]],
        leases: Sequence[Lease],
        nbytes: int,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[PublishedAs]:
        """Make slots of `grant` findable as these blocks of this tenant's, each given with its parent, in their order.

        The slots are filled, and their leases go on: whoever has them keeps them until this returns. What is not stored
        has no name afterwards, as before. checksums: as of `commit`. At its quota the tenant gives up its own blocks,
        as for `reserve`. Raises, before anything is stored: LayoutError for slots of another size class than `nbytes`,
        LeaseError for a lease that has ended and a slot that has a name already, ConfigError for a digest of another
        length than the scheme's.
        """
        self.check_process()
        slot_bytes = self._pool.slot_bytes(nbytes)
        made: list[Reservation] = []
        for (digest, parent), lease in zip(blocks, leases, strict=True):
            make_key(namespace, digest)
            if lease.nbytes != slot_bytes:
                raise LayoutError(f"a slot of {lease.nbytes} bytes for a block of {nbytes}, which takes {slot_bytes}")
            made.append(Reservation(namespace, digest, parent, nbytes))
            made[-1].lease = lease
        if self._keeps_checksums and checksums is None:
            checksums = [each.sum_up() for each in made]
        sums = checksums if self._keeps_checksums and checksums is not None else repeat(None, len(made))
        outcomes: list[PublishedAs] = []
        evicted: list[Eviction] = []
        try:
            with self._lock:
                self._check_nameless(leases)
                for each, checksum in list(zip(made, sums, strict=True)):
                    outcomes.append(self._publish_one(each, tenant, ttl_s, checksum, evicted))
        finally:
            self._tell_evicted(evicted)
        if self._on_commit:
            stored = [each for each, outcome in zip(made, outcomes, strict=True) if outcome is PublishedAs.STORED]
            self._tell_committed(stored, None)
        return outcomes

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _check_nameless(self, leases: Sequence[Lease]) -> None:
        slots = {lease.slot for lease in leases if lease.live}
        if len(slots) != len(leases) or not slots.isdisjoint(self._names):
            raise LeaseError("a slot to be published is leased no more, has a name already, or is there twice")

    def _publish_one(
        self, made: Reservation, tenant: str, ttl_s: float | None, checksum: int | None, evicted: list[Eviction]
    ) -> PublishedAs:
        lease = made.lease
        found = self._index.find(made.namespace, made.digest)
        if found is not None:
            is_filled = found[1] is BlockState.COMMITTED
            return PublishedAs.ALREADY_STORED if is_filled else PublishedAs.BEING_STORED
        if self._closed or (self._order.has_quotas and not self._is_within_quota(made, tenant, evicted)):
            return PublishedAs.FULL
        self._pool.set_resident(lease.slot)
        if self._order.has_quotas:
            self._order.claim(lease.slot, lease.nbytes, tenant)
        self._name(made, ttl_s)
        if checksum is not None:
            self._checksums[lease.slot] = checksum
        self._commit_one(made)
        return PublishedAs.STORED

    def _is_within_quota(self, made: Reservation, tenant: str, evicted: list[Eviction]) -> bool:
        """Whether the tenant may have this block too, once it gave up others, but never the one before it."""
        above = None if made.parent is None else self._index.slot_of(made.namespace, made.parent)
        kept = [] if above is None else self._pool.lease_all([above], self._copier)
        try:
            while self._order.is_over(made.nbytes, tenant):
                if self._evict(made.nbytes, tenant, evicted) is not None:
                    return False
        finally:
            self._pool.release_all(kept)
        return True

    def _allocate(
        self, nbytes: int, tenant: str, owner: Owner, on_end: Callable[[], None], evicted: list[Eviction]
    ) -> Lease | DropReason:
        lease = None
        while self._order.is_over(nbytes, tenant) or (
            (lease := self._pool.allocate(nbytes, owner, on_end, resident=True)) is None
        ):
            reason = self._evict(nbytes, tenant, evicted)
            if reason is not None:
                return reason
        return lease

    def _evict(self, nbytes: int, tenant: str, evicted: list[Eviction]) -> DropReason | None:
        """Forget what goes next to make room for a block of this tenant's; or why nothing can go."""
        victims = self._order.victims(nbytes, tenant)
        if isinstance(victims, DropReason):
            return victims
        for slot in victims:
            space, digest, *_ = self._names[slot]
            self._forget(space, digest)
            self._ghosts[space + digest] = None
            evicted.append(Eviction(space, digest))
        self._num_evicted += len(victims)
        while len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)
        return None

    def _name(self, reservation: Reservation, ttl_s: float | None) -> None:
        """It has its slot: from here on the index says so."""
        space, digest, slot = reservation.namespace, reservation.digest, reservation.lease.slot
        self._index.reserve(space, digest, slot)
        self._names[slot] = (space, digest, reservation.nbytes, ttl_s)
        self._filling[slot] = reservation

    def _commit_one(self, reservation: Reservation) -> None:
        space, digest, slot = reservation.namespace, reservation.digest, reservation.lease.slot
        run = self._index.committed_run(space, [reservation.parent]) if reservation.parent is not None else ()
        self._index.commit(space, digest)
        del self._filling[slot]
        self._order.insert(slot, run[0] if run else NO_PARENT, int.from_bytes(digest[:8]))
        if self._ghosts:
            self._ghosts.pop(space + digest, None)
        reservation._phase = COMMITTED

    def _forget(self, namespace: bytes, digest: BlockDigest) -> None:
        found = self._index.find(namespace, digest)
        assert found is not None
        slot, state = found
        self._index.remove(namespace, digest)
        if state is BlockState.COMMITTED:
            self._order.remove(slot)
        else:
            self._filling.pop(slot)._phase = VOID
        del self._names[slot]
        if self._checksums:
            self._checksums.pop(slot, None)
        if self._order.has_quotas:
            self._order.disclaim(slot)
        self._pool.clear_resident(slot)
