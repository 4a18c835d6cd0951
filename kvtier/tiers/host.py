"""The host tier: blocks in pinned memory's slots, found by the index, given up tails first when room is needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.errors import ClosedError, IntegrityError
from kvtier.index import BlockIndex, BlockState
from kvtier.keys import BlockDigest, Key, make_key, split_key
from kvtier.policy import NO_PARENT, PolicyFactory, TailsFirstLRU
from kvtier.pool import HostPool, Lease, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.eviction import EvictionOrder
from kvtier.tiers.forked import OwnProcess
from kvtier.tiers.listeners import Listened, OnCommit, OnEvict
from kvtier.tiers.reservation import Eviction, HeldBlock, Phase, Reservation

__all__ = ["HostTier", "OnCommit", "OnEvict"]

RESET_STRETCH = 1024  # blocks forgotten under one hold of the lock: a few milliseconds
MAX_GHOSTS = 1 << 17  # about 12 MiB of remembered keys


class HostTier(OwnProcess, Listened, Tier):
    """Owns index and eviction order, and shares the pool with whoever holds leases.

    Two ways in: the batch contract of `Tier`, which copies, and reserve / commit / lease, by which a copy fills or
    reads slots in place. The second never blocks on I/O and serves the engine's thread.

    Mutable state: index, order, names of slots, ghosts, counters: guarded by `_lock`. Lock order: `_lock`, then the
    pool's. No caller's code runs and no block is copied under either.
    """

    name = "host"

    def __init__(
        self,
        pool: HostPool,
        *,
        policy: PolicyFactory = TailsFirstLRU,
        quotas: Mapping[str, int] | None = None,
        keeps_checksums: bool = False,
    ) -> None:
        """quotas: the most bytes of slots that a tenant's blocks may take, by its name; "*": any other's, each.
        keeps_checksums: from its commit on each block has one, where others than us may write to the slots."""
        super().__init__()
        self._pool = pool
        self._keeps_checksums = keeps_checksums
        self._order = EvictionOrder(pool, policy, quotas or {})
        self._lock = threading.Lock()
        self._index = BlockIndex()
        self._names: dict[int, tuple[bytes, BlockDigest, int, float | None]] = {}  # by slot; its length and lifetime
        self._checksums: dict[int, int] = {}  # by slot
        self._filling: dict[int, Reservation] = {}  # by slot
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._num_evicted = 0
        self._copier = pool.owner("host tier copies")
        self._closed = False

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def num_blocks(self) -> int:
        """Blocks that may be read now."""
        return self._index.num_committed

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of slots by tenant with blocks here, those being filled included. Empty without quotas."""
        with self._lock:
            return self._order.tenant_bytes

    # ---- looking -------------------------------------------------------------------------------------------------

    def committed_run(self, namespace: bytes, digests: Sequence[BlockDigest]) -> int:
        """How many leading blocks are here. Pure: no lease, no recency, no statistics."""
        with self._lock:
            return self._index.committed_length(namespace, digests)

    def committed(self, namespace: bytes, digests: Sequence[bytes]) -> bytes:
        """A byte for each block: 1 where it is here, else 0. Pure, as `committed_run`; thousands in a millisecond."""
        with self._lock:
            return self._index.committed(namespace, digests)

    def state(self, namespace: bytes, digest: BlockDigest) -> BlockState | None:
        """What the index says of one block; None when it is not named."""
        return self.states(namespace, [digest])[0]

    def states(self, namespace: bytes, digests: Sequence[BlockDigest]) -> list[BlockState | None]:
        """What the index says of each block."""
        with self._lock:
            found = [self._index.find(namespace, digest) for digest in digests]
        return [block[1] if block else None for block in found]

    def why_missing(self, namespace: bytes, digest: BlockDigest) -> MissReason:
        """Why a block that a lookup did not find was not found."""
        with self._lock:
            if self._index.find(namespace, digest) is not None:
                return MissReason.BEING_STORED
            return MissReason.EVICTED if namespace + digest in self._ghosts else MissReason.ABSENT

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
            found = [self._index.find(*block) for block in blocks]
            slots = [block[0] if block and block[1] is BlockState.COMMITTED else None for block in found]
            here = [slot for slot in slots if slot is not None]
            if not here:
                return [None] * len(slots)
            leases = iter(self._lease(here, owner) if is_use else self._pool.lease_all(here, owner))
            return [None if slot is None else self._held(slot, next(leases)) for slot in slots]

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
                if self._closed:
                    return DropReason.CLOSED
                if self._index.find(namespace, digest) is not None:
                    return DropReason.ALREADY_STORED
                reservation = Reservation(namespace, digest, parent, nbytes)
                held = self._index.find(namespace, parent) if parent is not None else None
                if held is not None:
                    reservation._parent_lease = self._pool.lease(held[0], owner)
                lease = self._allocate(nbytes, tenant, owner, lambda: self.abort(reservation), evicted)
                if not isinstance(lease, DropReason):
                    reservation.lease = lease
                    if self._order.has_quotas:
                        self._order.claim(lease.slot, lease.nbytes, tenant)
                    self._index.reserve(namespace, digest, lease.slot)
                    self._names[lease.slot] = (namespace, digest, nbytes, ttl_s)
                    self._filling[lease.slot] = reservation
        finally:
            self._tell_evicted(evicted)
        if isinstance(lease, DropReason):
            self._end_parent_lease(reservation)
            return lease
        return reservation

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
        keys: list[tuple[Key, Key | None]] = []
        outcomes: list[bool] = []
        if self._keeps_checksums and checksums is None:
            checksums = [reservation.sum_up() for reservation in reservations]
        with self._lock:
            for place, reservation in enumerate(reservations):
                filled = reservation._phase is Phase.FILLING
                outcomes.append(filled)
                if filled:
                    if self._keeps_checksums and checksums is not None:
                        self._checksums[reservation.lease.slot] = checksums[place]
                    self._commit_one(reservation)
                    space, parent = reservation.namespace, reservation.parent
                    above = None if parent is None else make_key(space, parent)
                    keys.append((make_key(space, reservation.digest), above))
        try:
            if keys:
                for callback in self._on_commit:
                    callback(keys, came_from)
        finally:
            for reservation in reservations:
                reservation.lease.release()
                self._end_parent_lease(reservation)
        return outcomes

    def share(self, reservation: Reservation, owner: Owner) -> Lease | None:
        """One more lease on a slot that is being filled, for whoever waits for the block; None when it is void."""
        with self._lock:
            if reservation._phase is not Phase.FILLING:
                return None
            return self._pool.lease(reservation.lease.slot, owner)

    def abort(self, reservation: Reservation) -> None:
        """Give the slot back; the block was never findable. Idempotent, and harmless after a commit."""
        try:
            self.withdraw(reservation)
        finally:
            reservation.lease.release()
            self._end_parent_lease(reservation)

    def withdraw(self, reservation: Reservation) -> None:
        """Let another reserve the block: this one is void, and keeps its slot until `abort`. As harmless. Told as an
        eviction: whoever saw the block on its way relies on it."""
        with self._lock:
            was_filling = reservation._phase is Phase.FILLING
            if was_filling:
                self._forget(reservation.namespace, reservation.digest)
        if was_filling:
            self._tell_evicted([Eviction(reservation.namespace, reservation.digest)])

    def namespaces(self) -> list[bytes]:
        """The namespace digests of every block that the index names."""
        with self._lock:
            return self._index.namespaces()

    def digests(self, namespace: bytes) -> list[bytes]:
        """Every block of a namespace that the index names."""
        with self._lock:
            return self._index.digests(namespace)

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

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [bool(self._index.committed_run(space, [digest])) for space, digest in map(split_key, keys)]

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

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        with self._lock:
            self._index.check_integrity()
            rows = list(self._index.items())
            if {slot: (space, digest) for space, digest, slot, _ in rows} != {s: n[:2] for s, n in self._names.items()}:
                raise IntegrityError("host tier: index and slot names disagree")
            committed = {slot for *_, slot, state in rows if state is BlockState.COMMITTED}
            filling = {slot for slot, filled in self._filling.items() if filled._phase is Phase.FILLING}
            if self._filling.keys() != filling or filling != self._names.keys() - committed:
                raise IntegrityError("host tier: reserved slots and open reservations disagree")
            if self._checksums.keys() != (committed if self._keeps_checksums else set()):
                raise IntegrityError("host tier: committed slots and checksums disagree")
            self._order.check_integrity(self._names, committed)
            unleased = [slot for *_, slot, state in rows if state is BlockState.RESERVED and self._pool.can_evict(slot)]
        if unleased:
            raise IntegrityError(f"host tier: {len(unleased)} reserved slots have no lease")

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _lease(self, slots: Sequence[int], owner: Owner) -> list[Lease]:
        leases = self._pool.lease_all(slots, owner)
        self._order.touch(leases)
        return leases

    def _held(self, slot: int, lease: Lease) -> HeldBlock:
        return HeldBlock(lease, *self._names[slot][2:], self._checksums.get(slot))

    def _allocate(
        self, nbytes: int, tenant: str, owner: Owner, on_end: Callable[[], None], evicted: list[Eviction]
    ) -> Lease | DropReason:
        lease = None
        while self._order.is_over(nbytes, tenant) or (
            (lease := self._pool.allocate(nbytes, owner, on_end, resident=True)) is None
        ):
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
        return lease

    def _commit_one(self, reservation: Reservation) -> None:
        space, slot = reservation.namespace, reservation.lease.slot
        run = self._index.committed_run(space, [reservation.parent]) if reservation.parent is not None else []
        self._index.commit(space, reservation.digest)
        del self._filling[slot]
        self._order.insert(slot, run[0] if run else NO_PARENT, int.from_bytes(reservation.digest[:8]))
        self._ghosts.pop(space + reservation.digest, None)
        reservation._phase = Phase.COMMITTED

    def _forget(self, namespace: bytes, digest: BlockDigest) -> None:
        found = self._index.find(namespace, digest)
        assert found is not None
        slot, state = found
        self._index.remove(namespace, digest)
        if state is BlockState.COMMITTED:
            self._order.remove(slot)
        else:
            self._filling.pop(slot)._phase = Phase.VOID
        del self._names[slot]
        if self._checksums:
            self._checksums.pop(slot, None)
        if self._order.has_quotas:
            self._order.disclaim(slot)
        self._pool.clear_resident(slot)

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
