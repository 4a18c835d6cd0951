"""Slots that one connection holds of its tenant's pool: those it fills, those it reads, those it may still touch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.index import BlockState
from kvtier.keys import BlockDigest
from kvtier.pool import Lease
from kvtier.protocol.messages import CommitOutcome, PublishOutcome, ReserveOutcome
from kvtier.reasons import DropReason
from kvtier.server.peers import Process
from kvtier.server.quarantine import Quarantine
from kvtier.server.tenants import Tenant
from kvtier.tiers.reservation import HeldBlock, PublishedAs, Reservation

__all__ = ["LeasedRun", "Slots", "SlotsGiven", "SlotsGranted"]


RESERVED = int(ReserveOutcome.RESERVED)
PUBLISHED = {
    PublishedAs.STORED: PublishOutcome.STORED,
    PublishedAs.ALREADY_STORED: PublishOutcome.ALREADY_STORED,
    PublishedAs.BEING_STORED: PublishOutcome.BEING_STORED,
    PublishedAs.FULL: PublishOutcome.FULL,
}


class _Filled(NamedTuple):
    """A slot that the client fills. guard: keeps the slot once the reservation is void, else the reservation does."""

    reservation: Reservation
    made_at: float
    guard: Lease | None = None


class SlotsGiven(NamedTuple):
    """A ReserveOutcome a block; handle and offset of each that is RESERVED."""

    outcomes: bytes
    handles: list[int]
    offsets: list[int]


class SlotsGranted(NamedTuple):
    """Handle and offset of each slot."""

    handles: list[int]
    offsets: list[int]


class LeasedRun(NamedTuple):
    """Blocks that were leased, or None for one that is not here with this length; and how many of the last ones were
    not looked for, since the client holds too much already."""

    blocks: list[HeldBlock | None]
    num_refused: int


class Slots:
    """Owns the leases of one connection. Handles are never used again. Loop's thread; never blocks.

    A slot whose reservation is void stays the client's, as far as it knows, until it says that it is done with it; the
    key is free for others from then on. Without a mapping nobody but the server writes to slots: they are freed at
    once.

    A granted slot is the client's for as long as it likes: no key waits for it. Only with a mapping.

    Mutable state: everything but the constructor's arguments.
    """

    def __init__(self, tenant: Tenant, holder: str, name: str, *, is_mapped: bool) -> None:
        self._tenant = tenant
        self._host = tenant.store.host
        self._pool = tenant.store.pool
        self.holder = holder
        """Who is charged for what is held, and takes turns with others."""
        self._is_mapped = is_mapped
        self._owner = self._pool.owner(name)
        self._filling: dict[int, _Filled] = {}  # oldest first
        self._void: dict[int, _Filled] = {}
        self._granted: dict[int, Lease] = {}
        self._found: set[Lease] = set()  # leased, and neither given nor sent yet
        self._leases: dict[int, Lease] = {}
        self._outgoing: deque[list[Lease]] = deque()
        self._next = 1
        self._held_bytes = 0
        self._expected_bytes = 0  # of those held
        self.receiving: Sequence[int] = ()
        """Handles whose slots a payload is being written to."""

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    @property
    def num_granted(self) -> int:
        """Slots that it has been granted, and that are no block's."""
        return len(self._granted)

    @property
    def held_bytes(self) -> int:
        """Of slots, whole, that are filled, granted, read, sent, waited for or void."""
        return self._held_bytes

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    # ---- filling -------------------------------------------------------------------------------------------------

    def reserve(
        self,
        namespace: bytes,
        blocks: Sequence[tuple[BlockDigest, BlockDigest | None]],
        nbytes: int,
        ttl_s: float | None,
        now: float,
    ) -> SlotsGiven:
        """Slots for blocks, each with the one before it in its chain. Raises LayoutError for blocks that fit no slab;
        then there are none."""
        slot_bytes = self._pool.slot_bytes(nbytes)
        room = self._tenant.room(self.holder, slot_bytes)
        outcomes, handles, offsets = bytearray(), list[int](), list[int]()
        try:
            while len(outcomes) < len(blocks) and len(handles) < room:  # once, unless blocks are here already
                asked = blocks[len(outcomes) :][: room - len(handles)]
                given = self._host.reserve_all(namespace, asked, nbytes, self._owner, ttl_s=ttl_s)
                for (digest, _), reserved in zip(asked, given, strict=True):
                    if isinstance(reserved, Reservation):
                        outcomes.append(RESERVED)
                        handles.append(self._next)
                        offsets.append(reserved.lease.offset)
                        self._filling[self._next] = _Filled(reserved, now)
                        self._next += 1
                    else:
                        outcomes.append(self._why_not(reserved, namespace, digest))
        finally:
            self._hold(len(handles) * slot_bytes)
        outcomes += bytes([ReserveOutcome.FULL]) * (len(blocks) - len(outcomes))
        return SlotsGiven(bytes(outcomes), handles, offsets)

    def _why_not(self, reason: DropReason, namespace: bytes, digest: BlockDigest) -> int:
        if reason is not DropReason.ALREADY_STORED:
            return ReserveOutcome.FULL
        is_filled = self._host.state(namespace, digest) is not BlockState.RESERVED
        return ReserveOutcome.ALREADY_STORED if is_filled else ReserveOutcome.BEING_STORED

    def was_given(self, handles: Sequence[int]) -> bool:
        """Whether each is a handle that this connection has been given at some time."""
        return all(0 < handle < self._next for handle in handles)

    def targets(self, handles: Sequence[int]) -> list[memoryview] | None:
        """Where the blocks of reservations belong; None where one of them has no slot any more."""
        filled = [self._filling.get(handle) for handle in handles]
        live = [each.reservation for each in filled if each is not None and each.reservation.lease.live]
        if len(live) != len(handles):
            return None
        return [reservation.lease.view[: reservation.nbytes] for reservation in live]

    def commit(self, handles: Sequence[int], checksums: Sequence[int] | None) -> tuple[bytes, int]:
        """A CommitOutcome for each, and the bytes of the blocks that are findable now."""
        filled = [self._filling.pop(handle, None) for handle in handles]
        live = [each.reservation for each in filled if each is not None]
        is_void = len(live) < len(handles)
        if is_void and checksums is not None:
            checksums = [each for each, one in zip(checksums, filled, strict=True) if one is not None]
        try:
            stored = self._host.commit(live, checksums=checksums)
        finally:
            self._hold(-sum([reservation.lease.nbytes for reservation in live]))
        nbytes = sum([reservation.nbytes for reservation in compress(live, stored)])
        if all(stored) and not is_void:
            return bytes([CommitOutcome.STORED]) * len(handles), nbytes
        self._abort(handles)  # those that were void
        outcome = iter(stored)
        are_stored = [each is not None and next(outcome) for each in filled]
        return bytes([CommitOutcome.STORED if each else CommitOutcome.VOID for each in are_stored]), nbytes

    def abort(self, handles: Sequence[int]) -> None:
        """The client writes to these slots no more, reserved or granted."""
        self._abort(handles)
        self.drop([lease for handle in handles if (lease := self._granted.pop(handle, None)) is not None])

    def _abort(self, handles: Sequence[int]) -> None:
        for handle in handles:
            filled = self._filling.pop(handle, None) or self._void.pop(handle, None)
            if filled is not None:
                self._host.abort(filled.reservation)
                if filled.guard is not None:
                    filled.guard.release()
                self._hold(-filled.reservation.lease.nbytes)

    def void(self, made_before: float) -> int:
        """Free the keys of reservations that are older; how many were."""
        num_void = 0
        while self._filling and not self.receiving:
            handle = next(iter(self._filling))
            filled = self._filling[handle]
            if filled.made_at >= made_before:
                break
            num_void += 1
            if not self._is_mapped:
                self.abort([handle])
                continue
            self._void[handle] = self._without_key(self._filling.pop(handle))
        return num_void

    def _without_key(self, filled: _Filled) -> _Filled:
        (guard,) = self._host.share([filled.reservation], self._owner)
        if guard is not None:  # else a reset was first: the reservation keeps the slot itself
            self._host.abort(filled.reservation)
        return filled._replace(guard=guard)

    # ---- filled first, then named --------------------------------------------------------------------------------

    def grant(self, nbytes: int, number: int) -> SlotsGranted:
        """Slots without a name for blocks of `nbytes`, as many of `number` as there is room for, until they are
        published or aborted. Raises LayoutError for blocks that fit no slab."""
        room = self._tenant.room(self.holder, self._pool.slot_bytes(nbytes))
        leases = self._host.grant(nbytes, min(number, room), self._owner)
        self._hold(sum([lease.nbytes for lease in leases]))
        handles = self._handles(leases)
        self._granted.update(zip(handles, leases, strict=True))
        return SlotsGranted(handles, [lease.offset for lease in leases])

    def publish(
        self,
        namespace: bytes,
        blocks: Sequence[tuple[BlockDigest, BlockDigest | None]],
        nbytes: int,
        handles: Sequence[int],
        checksums: Sequence[int] | None,
        ttl_s: float | None,
    ) -> tuple[bytes, int]:
        """Name granted slots, all different, as blocks, each with the one before it in its chain. A PublishOutcome for
        each, and the bytes of those that are findable now: the client leases them from here on."""
        slot_bytes = self._pool.slot_bytes(nbytes)
        granted = [self._granted.get(handle) for handle in handles]
        is_there = [lease is not None and lease.nbytes == slot_bytes for lease in granted]
        published = self._host.publish(
            namespace,
            list(compress(blocks, is_there)),
            [lease for lease in compress(granted, is_there) if lease is not None],
            nbytes,
            ttl_s=ttl_s,
            checksums=None if checksums is None else list(compress(checksums, is_there)),
        )
        outcomes = bytearray([PublishOutcome.VOID]) * len(handles)
        for place, outcome in zip(compress(range(len(handles)), is_there), published, strict=True):
            outcomes[place] = PUBLISHED[outcome]
            if outcome is PublishedAs.STORED:
                self._leases[handles[place]] = self._granted.pop(handles[place])
        return bytes(outcomes), nbytes * outcomes.count(PublishOutcome.STORED)

    # ---- reading -------------------------------------------------------------------------------------------------

    def lease(self, namespace: bytes, digests: Sequence[BlockDigest], nbytes: int) -> LeasedRun:
        """Lease those of these blocks, all different, that are here. They count against what the client may hold from
        now on; `give` or `drop` them."""
        slot_bytes = self._pool.slot_bytes(nbytes)
        room = self._tenant.room(self.holder, slot_bytes)
        asked = digests[:room]
        found = self._host.lease_blocks([(namespace, digest) for digest in asked], self._owner, is_use=True)
        for place, block in enumerate(found):
            if block is not None and block.nbytes != nbytes:
                block.lease.release()
                found[place] = None
        leases = [block.lease for block in found if block is not None]
        self._found.update(leases)
        self._hold(sum([lease.nbytes for lease in leases]))
        return LeasedRun(found, len(digests) - len(asked))

    def expect(self, nbytes: int, most: int) -> int:
        """How many of `most` blocks the client may wait for: they count as held until `expect_no_more`."""
        slot_bytes = self._pool.slot_bytes(nbytes)
        number = min(most, self._tenant.room(self.holder, slot_bytes))
        self._expected_bytes += number * slot_bytes
        self._hold(number * slot_bytes)
        return number

    def expect_no_more(self, nbytes: int, number: int) -> None:
        """They came, or will not: `lease` has those that are here."""
        expected = number * self._pool.slot_bytes(nbytes)
        self._expected_bytes -= expected
        self._hold(-expected)

    def give(self, leases: Sequence[Lease]) -> list[int]:
        """Handles for leased blocks, which the client holds until it releases them."""
        handles = self._handles(leases)
        self._found.difference_update(leases)
        self._leases.update(zip(handles, leases, strict=True))
        return handles

    def send(self, leases: list[Lease]) -> list[memoryview]:
        """The slots of leased blocks, whole, to be sent: they are held until `sent`."""
        self._outgoing.append(leases)
        self._found.difference_update(leases)
        return [lease.view for lease in leases]

    def sent(self) -> None:
        """The blocks that `send` gave first, and that were not sent before, are out."""
        if self._outgoing:
            self.drop(self._outgoing.popleft())

    def drop(self, leases: Sequence[Lease]) -> None:
        """Let go of leased blocks."""
        self._found.difference_update(leases)
        self._pool.release_all(leases)
        self._hold(-sum([lease.nbytes for lease in leases]))

    def release(self, handles: Sequence[int]) -> None:
        """The client reads these slots no more."""
        self.drop([lease for handle in handles if (lease := self._leases.pop(handle, None)) is not None])

    # ---- the end -------------------------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """Whether the server still reads slots, to send them."""
        return bool(self._outgoing)

    def let_go(self) -> None:
        """The client uses no slot any more: what it filled and read is free, and what is still sent stays."""
        self.abort([*self._filling, *self._void, *self._granted])
        self.release(list(self._leases))

    def end(self, *, clean: bool, quarantine: Quarantine, process: Process | None) -> bool:
        """The connection is over. clean, or without a mapping: all is free. Otherwise keys are free, and the slots go
        to the quarantine with the process; True then. Once."""
        while self._outgoing:
            self.sent()
        self.receiving = ()
        if clean or not self._is_mapped or process is None:
            self._close()
            return False
        for handle in list(self._filling):
            self._void[handle] = self._without_key(self._filling.pop(handle))
        if not (self._void or self._leases or self._granted):
            self._close()
            return False
        tenant, holder, held_bytes = self._tenant, self.holder, self._held_bytes
        give_back = partial(tenant.hold, holder, -held_bytes)  # after this object's end
        kept = (*self._leases.values(), *self._granted.values(), *map(_slot_of, self._void.values()))
        num_slots = len({lease.slot for lease in kept})
        quarantine.keep(tenant.name, self._owner, num_slots, held_bytes, process, give_back)
        for table in (self._void, self._granted, self._leases):
            table.clear()
        self._held_bytes = 0
        return True

    def _close(self) -> None:
        self._owner.close()
        for table in (self._filling, self._void):
            for filled in table.values():
                self._host.abort(filled.reservation)
            table.clear()
        self._granted.clear()
        self._leases.clear()
        self._hold(-self._held_bytes)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless bytes and leases add up."""
        filled = [*self._filling.values(), *self._void.values()]
        outgoing = [lease for leases in self._outgoing for lease in leases]
        held = [*map(_slot_of, filled), *self._granted.values(), *self._leases.values(), *outgoing, *self._found]
        if sum(lease.nbytes for lease in held) + self._expected_bytes != self._held_bytes:
            raise IntegrityError(f"{self._owner.name}: {self._held_bytes} bytes counted, other slots held")
        if not all(lease.live for lease in held):
            raise IntegrityError(f"{self._owner.name}: a slot that the client was told of is not held any more")
        tables = (self._filling, self._void, self._granted, self._leases)
        if len(set[int]().union(*tables)) < sum(len(table) for table in tables):
            raise IntegrityError(f"{self._owner.name}: a handle stands for two slots")

    # ---- inside --------------------------------------------------------------------------------------------------

    def _handles(self, leases: Sequence[Lease]) -> list[int]:
        """New ones, as many."""
        first = self._next
        self._next += len(leases)
        return list(range(first, self._next))

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._tenant.hold(self.holder, nbytes)


def _slot_of(filled: _Filled) -> Lease:
    return filled.guard or filled.reservation.lease
