"""The host tier: blocks in pinned memory's slots, found by the index, given up tails first when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress

from kvtier.errors import ClosedError
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, make_key, split_key
from kvtier.leases import Lease, Owner
from kvtier.policy import PolicyFactory, TailsFirstLRU
from kvtier.reasons import DropReason
from kvtier.slots import SlotPool
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.eviction import EvictionOrder
from kvtier.tiers.listeners import OnCommit, OnEvict
from kvtier.tiers.naming import Named
from kvtier.tiers.reservation import Eviction, HeldBlock, Phase, Reservation

__all__ = ["HostTier", "OnCommit", "OnEvict"]

RESET_STRETCH = 1024  # blocks forgotten under one hold of the lock: a few milliseconds
FILLING = Phase.FILLING  # a name of this module: an enumeration finds its members slowly


class HostTier(Named, Tier):
    """Owns index and eviction order, and shares the pool with whoever holds leases.

    Two ways in: the batch contract of `Tier`, which copies, and reserve / commit / lease, by which a copy fills or
    reads slots in place, or grant / publish, where it fills them before it is known which blocks they are. The second
    never blocks on I/O and serves the engine's thread.

    Mutable state: index, order, names of slots, ghosts, counters: guarded by `_lock`. Lock order: `_lock`, then the
    pool's. No caller's code runs and no block is copied under either.
    """

    name = "host"

    def __init__(
        self,
        pool: SlotPool,
        *,
        policy: PolicyFactory = TailsFirstLRU,
        quotas: Mapping[str, int] | None = None,
        keeps_checksums: bool = False,
    ) -> None:
        """quotas: the most bytes of slots that a tenant's blocks may take, by its name; "*": any other's, each.
        keeps_checksums: from its commit on each block has one, where others than us may write to the slots."""
        super().__init__(pool, EvictionOrder(pool, policy, quotas or {}), keeps_checksums=keeps_checksums)

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of slots by tenant with blocks here, those being filled included. Empty without quotas."""
        with self._lock:
            return self._order.tenant_bytes

    # ---- in place ------------------------------------------------------------------------------------------------

    def lease_run(self, namespace: bytes, digests: Sequence[BlockDigest], owner: Owner) -> list[Lease]:
        """Leases on the leading blocks that are here, which count as used now."""
        self.check_process()
        with self._lock:
            return self._lease(self._index.committed_run(namespace, digests), owner)

    def lease_blocks(
        self, blocks: Sequence[tuple[bytes, BlockDigest]], owner: Owner, *, is_use: bool = False
    ) -> list[HeldBlock | None]:
        """A lease on each block, given by namespace and digest, that is here. is_use: it counts as a use of each, which
        is named once then."""
        with self._lock:
            slots = [self._index.committed_slot(*block) for block in blocks]
            here = [slot for slot in slots if slot is not None]
            if not here:
                return [None] * len(slots)
            leases = self._lease(here, owner) if is_use else self._pool.lease_all(here, owner)
            names, sums = self._names, self._checksums
            held = iter([HeldBlock(lease, *names[lease.slot][2:], sums.get(lease.slot)) for lease in leases])
        return [None if slot is None else next(held) for slot in slots]

    def reserve(
        self,
        namespace: bytes,
        digest: BlockDigest,
        parent: BlockDigest | None,
        nbytes: int,
        owner: Owner,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> Reservation | DropReason:
        """Set a slot aside for a block of this tenant's, worth keeping for `ttl_s`, evicting others to make room.

        Whose blocks go: see `EvictionOrder`. The block's parent, stored or still being filled, is kept from eviction
        until the reservation ends, so that a long chain never eats its own prefix. On a DropReason nothing changed for
        this block, though others may have been evicted. Raises LayoutError for a block that fits no slab, ClosedError
        for an owner that has ended, ConfigError for a digest of another length than the scheme's.
        """
        self.check_process()
        make_key(namespace, digest)
        self._pool.slot_bytes(nbytes)
        evicted: list[Eviction] = []
        try:
            with self._lock:
                made = Reservation(namespace, digest, parent, nbytes)
                return self._reserve_one(made, owner, tenant, ttl_s, evicted)
        finally:
            self._tell_evicted(evicted)

    def reserve_all(
        self,
        namespace: bytes,
        blocks: Sequence[tuple[BlockDigest, BlockDigest | None]],
        nbytes: int,
        owner: Owner,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        leases: Sequence[Lease] = (),
        is_chain: bool = False,
    ) -> list[Reservation | DropReason]:
        """As `reserve`, of each of these blocks and its parent, in their order. What it raises, before any is.

        leases: of slots that hold the blocks already, in place of free ones: each is its reservation's, or ends.
        is_chain: behind a block that finds no slot none is looked for, and nothing evicted.
        """
        outcomes: list[Reservation | DropReason] = []
        evicted: list[Eviction] = []
        try:
            self.check_process()
            for digest, _ in blocks:
                make_key(namespace, digest)
            self._pool.slot_bytes(nbytes)
            with self._lock:
                if not (self._closed or self._order.has_quotas or leases):
                    self._reserve_free(namespace, blocks, nbytes, owner, ttl_s, outcomes)
                given = iter(leases)
                for digest, parent in blocks[len(outcomes) :]:
                    made = Reservation(namespace, digest, parent, nbytes)
                    outcome = self._reserve_one(made, owner, tenant, ttl_s, evicted, next(given, None))
                    outcomes.append(outcome)
                    if is_chain and isinstance(outcome, DropReason) and outcome is not DropReason.ALREADY_STORED:
                        outcomes.extend([outcome] * (len(blocks) - len(outcomes)))
                        break
        finally:
            kept = {outcome.lease for outcome in outcomes if isinstance(outcome, Reservation)} if leases else ()
            self._pool.release_all([lease for lease in leases if lease not in kept])
            self._tell_evicted(evicted)
        return outcomes

    def commit(
        self,
        reservations: Sequence[Reservation],
        came_from: str | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        """Make filled blocks findable, prefix first, and end their leases.

        came_from: the lower tier that filled them. checksums: XXH3-64 of each, of a tier that keeps them; it sums them
        up itself where they are not given. False where the reservation was void by then.
        """
        outcomes: list[bool] = []
        if not self._keeps_checksums:
            checksums = None
        elif checksums is None:
            checksums = [reservation.sum_up() for reservation in reservations]
        with self._lock:
            for place, reservation in enumerate(reservations):
                filled = reservation._phase is FILLING
                outcomes.append(filled)
                if filled:
                    if checksums is not None:
                        self._checksums[reservation.lease.slot] = checksums[place]
                    self._commit_one(reservation)
        try:
            if self._on_commit:
                self._tell_committed(list(compress(reservations, outcomes)), came_from)
        finally:  # an interrupt of the process too comes here
            self._pool.release_all([reservation.lease for reservation in reservations])
        return outcomes

    def forget_slots(self, slots: Sequence[int], is_idle: Callable[[int], bool]) -> None:
        """Name no block any more in those of these slots that are idle: told as evictions. is_idle: asked under the
        lock; no slot with a lease is."""
        gone: list[Eviction] = []
        for start in range(0, len(slots), RESET_STRETCH):  # all that the pool has, where a connection was lost
            with self._lock:
                for slot in slots[start : start + RESET_STRETCH]:
                    if slot in self._names and is_idle(slot):
                        space, digest, *_ = self._names[slot]
                        self._forget(space, digest)
                        gone.append(Eviction(space, digest))
        self._tell_evicted(gone)

    def share(self, reservations: Sequence[Reservation], owner: Owner) -> list[Lease | None]:
        """One more lease on each slot that is being filled, for whoever waits for the block; None where it is void."""
        with self._lock:
            filling = [each._phase is FILLING for each in reservations]
            slots = [each.lease.slot for each in compress(reservations, filling)]
            leases = iter(self._pool.lease_all(slots, owner) if slots else ())
        return [next(leases) if each else None for each in filling]

    def abort(self, reservation: Reservation) -> None:
        """Give the slot back; the block was never findable. Idempotent, and harmless after a commit."""
        try:
            self.withdraw(reservation)
        finally:
            reservation.lease.release()

    def withdraw(self, reservation: Reservation) -> None:
        """Let another reserve the block: this one is void, and keeps its slot until `abort`. As harmless. Told as an
        eviction: whoever saw the block on its way relies on it."""
        with self._lock:
            was_filling = reservation._phase is FILLING
            if was_filling:
                self._forget(reservation.namespace, reservation.digest)
        if was_filling:
            self._tell_evicted([Eviction(reservation.namespace, reservation.digest)])

    def reset(self, namespace: bytes) -> int:
        """Forget every block of a namespace; returns how many. Reservations in it become void, leases keep their bytes.
        The lock is given up between stretches of blocks, so that a large namespace holds up nobody else; what is stored
        meanwhile may stay or go."""
        digests = self.digests(namespace)
        forgotten = 0
        for start in range(0, len(digests), RESET_STRETCH):
            forgotten += len(self._forget_all((namespace, d) for d in digests[start : start + RESET_STRETCH]))
        return forgotten

    # ---- Tier ----------------------------------------------------------------------------------------------------

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        return [self._read_one(request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        return [self._write_one(request) for request in requests]

    def remove(self, keys: Sequence[Key]) -> int:
        return sum(state is BlockState.COMMITTED for state in self._forget_all(map(split_key, keys)))

    def usage(self) -> TierUsage:
        usage = self._pool.usage()
        return TierUsage(self.num_blocks, usage.used_bytes, usage.reserved_bytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._copier.close()

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _lease(self, slots: Sequence[int], owner: Owner) -> list[Lease]:
        leases = self._pool.lease_all(slots, owner)
        self._order.touch(leases)
        return leases

    def _reserve_free(
        self,
        namespace: bytes,
        blocks: Sequence[tuple[BlockDigest, BlockDigest | None]],
        nbytes: int,
        owner: Owner,
        ttl_s: float | None,
        outcomes: list[Reservation | DropReason],
    ) -> None:
        """Of the leading blocks, as far as there are slots without evicting: what becomes of each."""
        slot_of, new = self._index.slot_of, dict[bytes, Reservation]()
        for digest, parent in blocks:
            if digest not in new and slot_of(namespace, digest) is None:
                new[digest] = Reservation(namespace, digest, parent, nbytes)
        leases = self._pool.allocate_all(nbytes, owner, [partial(self._lease_ended, each) for each in new.values()])
        given = iter(leases)
        parents: list[int] = []
        children: list[Reservation] = []
        for digest, parent in blocks:
            above = None if parent is None else slot_of(namespace, parent)
            made = new.pop(digest, None)
            if made is None:
                outcomes.append(DropReason.ALREADY_STORED)
                continue
            lease = next(given, None)
            if lease is None:
                break
            made.lease = lease
            self._name(made, ttl_s)
            if above is not None:
                parents.append(above)
                children.append(made)
            outcomes.append(made)
        for made, lease in zip(children, self._pool.lease_all(parents, owner) if parents else (), strict=True):
            made._parent_lease = lease

    def _reserve_one(
        self,
        reservation: Reservation,
        owner: Owner,
        tenant: str,
        ttl_s: float | None,
        evicted: list[Eviction],
        given: Lease | None = None,
    ) -> Reservation | DropReason:
        space, parent, nbytes = reservation.namespace, reservation.parent, reservation.nbytes
        if self._closed:
            return DropReason.CLOSED
        if self._index.slot_of(space, reservation.digest) is not None:
            return DropReason.ALREADY_STORED
        above = self._index.slot_of(space, parent) if parent is not None else None
        if above is not None:
            reservation._parent_lease = self._pool.lease(above, owner)
        on_end = partial(self._lease_ended, reservation)
        lease = given or self._allocate(nbytes, tenant, owner, on_end, evicted)
        if isinstance(lease, DropReason):
            self._end_parent_lease(reservation)
            return lease
        if given is not None:
            if not self._pool.on_end(given, on_end):  # its owner has ended
                self._end_parent_lease(reservation)
                return DropReason.CLOSED
            self._pool.set_resident(given.slot)
        reservation.lease = lease
        if self._order.has_quotas:
            self._order.claim(lease.slot, lease.nbytes, tenant)
        self._name(reservation, ttl_s)
        return reservation

    # ---- outside the lock ----------------------------------------------------------------------------------------

    def _forget_all(self, blocks: Iterable[tuple[bytes, bytes]]) -> list[BlockState]:
        """Of these blocks those that are named; what they were. Whoever relies on them is told, as of an eviction."""
        states, gone = [], []
        with self._lock:
            for space, digest in blocks:
                found = self._index.find(space, digest)
                if found is not None:
                    self._forget(space, BlockDigest(digest))
                    states.append(found[1])
                    gone.append(Eviction(space, BlockDigest(digest)))
        self._tell_evicted(gone)
        return states

    def _lease_ended(self, reservation: Reservation) -> None:
        """Whoever ended it: by commit, by abort, or as its owner went."""
        try:
            if reservation._phase is FILLING:  # it never comes back to that
                self.withdraw(reservation)
        finally:
            self._end_parent_lease(reservation)

    @staticmethod
    def _end_parent_lease(reservation: Reservation) -> None:
        if reservation._parent_lease is not None:
            reservation._parent_lease.release()

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        space, digest = split_key(request.key)
        self._check_open()
        with self._lock:
            slots = self._index.committed_run(space, [digest])
            if not slots or self._names[slots[0]][2] != len(request.buffer):
                return ReadOutcome.MISS
            leases = self._lease(slots, self._copier)
        with leases[0] as lease:
            request.buffer[:] = lease.view[: len(request.buffer)]
        return ReadOutcome.OK

    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        space, digest = split_key(request.key)
        self._check_open()
        parent = split_key(request.parent)[1] if request.parent is not None else None
        reservation = self.reserve(space, digest, parent, len(request.buffer), self._copier)
        if isinstance(reservation, DropReason):
            return WriteOutcome.ALREADY_STORED if reservation is DropReason.ALREADY_STORED else WriteOutcome.FULL
        reservation.lease.view[: len(request.buffer)] = request.buffer
        return WriteOutcome.STORED if self.commit([reservation])[0] else WriteOutcome.ERROR

    def _check_open(self) -> None:
        self.check_process()
        if self._closed:
            raise ClosedError("the host tier is closed")
