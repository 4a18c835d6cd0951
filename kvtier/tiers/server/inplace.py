"""Blocks that are written and read where they lie in the server's memory: published, and adopted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.granted import SlotKind
from kvtier.keys import Key
from kvtier.leases import Lease
from kvtier.memory import PAGE_BYTES
from kvtier.protocol.messages import (
    FailureCode,
    Publish,
    Published,
    PublishOutcome,
    Release,
    Stage,
    Staged,
    StageOutcome,
)
from kvtier.tiers.base import Adoption, ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.server.answers import check_staged
from kvtier.tiers.server.batches import BATCH_BYTES, Batch, batches, digests_of, parents_of, ttl_ms
from kvtier.tiers.server.calls import Caller
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.copies import checksum
from kvtier.tiers.server.failures import RefusedError, ServerError
from kvtier.tiers.server.fetching import READ_OUTCOMES, wait_ms
from kvtier.tiers.server.keeper import Keeper

__all__ = ["InPlace"]

_PUBLISHED = {
    PublishOutcome.STORED: WriteOutcome.STORED,
    PublishOutcome.ALREADY_STORED: WriteOutcome.ALREADY_STORED,
    PublishOutcome.BEING_STORED: WriteOutcome.FULL,
    PublishOutcome.FULL: WriteOutcome.FULL,
}


MAX_READ_SCALE = 4
"""So many times as much as others' a job may read while all that is asked for is found in the server's memory: to adopt
it moves no byte, and each job is a question. Not more: what it finds in a slow tier below all of a sudden has to come
within one timeout."""
READ_SHARE = 16
"""And of the pool no more than this part."""


class InPlace:
    """The calls on blocks of a host pool whose slots are the server's. Any thread.

    Mutable state: a count, and how large jobs may be, which is a guess: whichever thread writes it last is right.
    """

    def __init__(
        self, keeper: Keeper, caller: Caller, clock: Clock, forget: Callable[[Sequence[Key], float], int]
    ) -> None:
        """forget: has the server forget blocks, by a deadline; raises TierError."""
        self._forget = forget
        self._keeper = keeper
        self._pool = keeper.pool
        self._caller = caller
        self._clock = clock
        self.num_damaged = 0
        """Blocks whose bytes were not those of their checksum."""
        self._read_scale = 1

    # ---- down ----------------------------------------------------------------------------------------------------

    def write(self, requests: Sequence[WriteRequest], deadline: float) -> list[WriteOutcome]:
        """Publish blocks of granted slots, which the caller keeps leased meanwhile. What the server holds by now, this
        or another slot of it, is not kept here any longer than it is leased."""
        outcomes = [WriteOutcome.ERROR] * len(requests)
        first: dict[Key, int] = {}
        for position, request in enumerate(requests):
            if first.setdefault(request.key, position) != position:
                outcomes[position] = WriteOutcome.ALREADY_STORED
        blocks = [(i, requests[i].key, requests[i].nbytes, ttl_ms(requests[i])) for i in first.values()]
        try:
            for batch in batches(blocks, BATCH_BYTES):
                self._publish(batch, requests, outcomes, deadline)
        except ServerError:
            pass  # it was noted, and the outcomes say it
        return outcomes

    def _publish(
        self, batch: Batch, requests: Sequence[WriteRequest], outcomes: list[WriteOutcome], deadline: float
    ) -> None:
        some = [requests[position] for position in batch.positions]
        is_summed = self._keeper.has_checksums
        sums = _sums(some) if is_summed else [0] * len(some)
        with self._keeper.connection(deadline) as (connection, era):
            if connection.welcome.checksums and not is_summed:  # of another run, since
                sums = _sums(some)
            slots: list[int] = []
            handles: list[int] = []
            placed: list[int] = []
            for place, each in enumerate(some):
                assert each.slot is not None
                handle = self._pool.handle_of(each.slot)
                if handle is None or handle.era != era:  # of a connection that was lost: there is nothing to publish
                    outcomes[batch.positions[place]] = WriteOutcome.WITHDRAWN
                elif not self._pool.is_private(each.slot):  # it is the server's block, or the copy of one, by now
                    outcomes[batch.positions[place]] = WriteOutcome.ALREADY_STORED
                else:
                    placed.append(place)
                    slots.append(each.slot)
                    handles.append(handle.number)
            if not placed:
                return
            named = [some[place] for place in placed]
            try:
                answer = connection.call(
                    lambda number: Publish(
                        number,
                        batch.namespace,
                        batch.block_bytes,
                        handles,
                        digests_of(each.key for each in named),
                        parents_of(named),
                        [sums[place] for place in placed],
                        batch.ttl_ms,
                    ),
                    Published,
                )
            except RefusedError as error:
                if error.is_final:
                    raise
                return
            if len(answer.outcomes) != len(placed) or PublishOutcome.VOID in answer.outcomes:
                raise connection.garbled(
                    f"{len(answer.outcomes)} outcomes for {len(placed)} slots that it granted, "
                    f"{answer.outcomes.count(PublishOutcome.VOID)} of them for none"
                )
            for place, outcome in zip(placed, answer.outcomes, strict=True):
                outcomes[batch.positions[place]] = _PUBLISHED[outcome]
            told = list(zip(slots, answer.outcomes, strict=True))
            self._pool.mark([slot for slot, each in told if each == PublishOutcome.STORED], SlotKind.SHARED)
            self._pool.mark([slot for slot, each in told if each == PublishOutcome.ALREADY_STORED], SlotKind.SPARE)

    # ---- up ------------------------------------------------------------------------------------------------------

    def read_bytes(self, least: int, share: int) -> int:
        """See `Tier.read_bytes`."""
        return max(least, min(share, self._read_scale * least, self._pool.nbytes // READ_SHARE))

    def read(self, requests: Sequence[ReadRequest], deadline: float) -> list[ReadOutcome]:
        """Adopt blocks: those of host memory at once, others once the server has brought them there."""
        outcomes = [ReadOutcome.ERROR] * len(requests)
        first: dict[Key, int] = {}
        for position, request in enumerate(requests):
            if first.setdefault(request.key, position) != position:
                outcomes[position] = ReadOutcome.REFUSED
        blocks = [(i, requests[i].key, requests[i].nbytes, 0) for i in first.values()]
        damaged: list[Key] = []
        try:
            try:
                for batch in batches(blocks, BATCH_BYTES):
                    below = self._adopt(batch, requests, outcomes, damaged, deadline)
                    is_all_there = all(outcomes[position] is ReadOutcome.OK for position in batch.positions)
                    self._read_scale = min(2 * self._read_scale, MAX_READ_SCALE) if is_all_there else 1
                    if below:
                        self._bring(batch._replace(positions=below), requests, outcomes, damaged, deadline)
            except ServerError:
                pass  # it was noted, and the outcomes say it
            self.num_damaged += len(damaged)
            if damaged:
                with suppress(TierError):
                    self._forget(damaged, deadline)
        except BaseException:
            outcomes = [ReadOutcome.ERROR] * len(requests)  # nobody hears of any
            raise
        finally:
            for request, outcome in zip(requests, outcomes, strict=True):
                if outcome is not ReadOutcome.OK:
                    _drop(_adoption(request))
        return outcomes

    def _adopt(
        self,
        batch: Batch,
        requests: Sequence[ReadRequest],
        outcomes: list[ReadOutcome],
        damaged: list[Key],
        deadline: float,
    ) -> list[int]:
        """Of what is in the server's host memory; the positions of those that it has in a lower tier. What was adopted
        is OK once it was found to be what was stored."""
        slot_bytes = -(-batch.block_bytes // PAGE_BYTES) * PAGE_BYTES
        adopted: list[int] = []
        with self._keeper.connection(deadline) as (connection, era):
            room = self._keeper.make_room(connection, slot_bytes, len(batch.positions))
            positions, beyond = batch.positions[:room], batch.positions[room:]
            for position in beyond:  # it is there, and cannot be had now
                outcomes[position] = ReadOutcome.REFUSED
            if not positions:
                return []
            answer = self._ask(connection, batch._replace(positions=positions), requests, 0, outcomes)
            if answer is None:
                return []
            self._keeper.check_slots(connection, answer.offsets, slot_bytes)
            sums = answer.checksums if connection.welcome.checksums else repeat(None)
            below: list[int] = []
            there: list[int] = []
            for position, outcome in zip(positions, answer.outcomes, strict=True):
                if outcome == StageOutcome.OK:
                    there.append(position)
                elif outcome == StageOutcome.TIMEOUT:
                    below.append(position)
                else:
                    outcomes[position] = READ_OUTCOMES[outcome]
            refused: list[int] = []
            if there:
                owners = [_adoption(requests[position]).owner for position in there]
                grants = list(zip(answer.leases, answer.offsets, owners, strict=True))
                leases = self._pool.adopt_all(slot_bytes, grants, era)
                for position, handle, known, lease in zip(there, answer.leases, sums, leases, strict=False):
                    adoption = _adoption(requests[position])
                    adoption.checksum, adoption.lease = known, lease
                    if lease is not None:
                        adopted.append(position)
                    else:  # its slot may be used here for the block of before, which was removed since
                        refused.append(handle)
                        outcomes[position] = ReadOutcome.REFUSED
            if refused:
                connection.say(Release(0, refused))
        self._verify(batch._replace(positions=adopted), requests, outcomes, damaged)
        return below

    def _bring(
        self,
        batch: Batch,
        requests: Sequence[ReadRequest],
        outcomes: list[ReadOutcome],
        damaged: list[Key],
        deadline: float,
    ) -> None:
        """Have the server read from its lower tiers, on a connection of its own, since it is waited for; what has come
        stays in its memory until it is adopted."""
        with self._caller.connection(deadline) as connection:
            answer = self._ask(connection, batch, requests, wait_ms(deadline - self._clock.now()), outcomes)
            if answer is None:
                return
            check_staged(connection, answer, len(batch.positions), batch.block_bytes)
            come: list[int] = []
            for position, outcome in zip(batch.positions, answer.outcomes, strict=True):
                outcomes[position] = READ_OUTCOMES.get(outcome, ReadOutcome.REFUSED)
                if outcome == StageOutcome.OK:
                    come.append(position)
            if come:
                self._adopt(batch._replace(positions=come), requests, outcomes, damaged, deadline)
                connection.say(Release(0, answer.leases))
                for lease in answer.leases:
                    del connection.held[lease]

    def _ask(
        self,
        connection: Connection,
        batch: Batch,
        requests: Sequence[ReadRequest],
        max_wait_ms: int,
        outcomes: list[ReadOutcome],
    ) -> Staged | None:
        """The answer, in which there is an outcome for each and a lease for what is OK; None where there is none, and
        the outcomes say so."""
        digests = digests_of(requests[position].key for position in batch.positions)
        try:
            answer = connection.call(
                lambda number: Stage(
                    number, batch.namespace, batch.block_bytes, digests, b"", max_wait_ms, inline=False
                ),
                Staged,
            )
        except RefusedError as error:
            if error.is_final:
                raise
            refused = ReadOutcome.MISS if error.code == FailureCode.INVALID else ReadOutcome.ERROR
            for position in batch.positions:
                outcomes[position] = refused
            return None
        num_ok = answer.outcomes.count(StageOutcome.OK)
        num_leases = len(set(answer.leases))
        if len(answer.outcomes) != len(batch.positions) or num_leases != num_ok or len(answer.leases) != num_ok:
            raise connection.garbled(
                f"{len(answer.outcomes)} outcomes and {num_leases} leases for {len(batch.positions)} blocks"
            )
        return answer

    def _verify(
        self, batch: Batch, requests: Sequence[ReadRequest], outcomes: list[ReadOutcome], damaged: list[Key]
    ) -> None:
        """What was adopted is what was stored, or it is DAMAGED."""
        for position in batch.positions:
            adoption = _adoption(requests[position])
            assert adoption.lease is not None
            is_well = adoption.checksum is None or (
                adoption.checksum == checksum(adoption.lease.view[: batch.block_bytes])
            )
            outcomes[position] = ReadOutcome.OK if is_well else ReadOutcome.DAMAGED
            if not is_well:
                damaged.append(requests[position].key)


def _sums(requests: Sequence[WriteRequest]) -> list[int]:
    return [checksum(each.buffer) if each.checksum is None else each.checksum for each in requests]


def _adoption(request: ReadRequest) -> Adoption:
    assert request.adoption is not None
    return request.adoption


def _drop(adoption: Adoption) -> None:
    lease: Lease | None
    lease, adoption.lease = adoption.lease, None
    if lease is not None:
        lease.release()
