"""One client's blocks on their way to it: leased where host memory has them, staged from lower tiers where those do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.clock import Clock
from kvtier.keys import BlockDigest
from kvtier.membership import Question
from kvtier.pool import Lease
from kvtier.protocol import messages
from kvtier.protocol.messages import Staged, StageOutcome
from kvtier.reasons import MissReason
from kvtier.server.requests import Answer, Request, held_tiers
from kvtier.server.slots import Slots
from kvtier.server.tenants import Tenant
from kvtier.stage import Stage

__all__ = ["StageRequest"]

MAX_RUNS = 16
"""Stages of one request at once. A prompt's blocks are one, but for those that a tier loses meanwhile."""
UNDECIDED = 255
OK = int(StageOutcome.OK)

REASON_TO_OUTCOME = {
    MissReason.DAMAGED: StageOutcome.DAMAGED,
    MissReason.TIER_ERROR: StageOutcome.ERROR,
    MissReason.TIER_DOWN: StageOutcome.REFUSED,
    MissReason.BACKLOG: StageOutcome.REFUSED,
    MissReason.TIMEOUT: StageOutcome.TIMEOUT,
    MissReason.HOST_FULL: StageOutcome.FULL,
}
OF_ONE_BLOCK = frozenset({MissReason.DAMAGED, MissReason.TIER_ERROR, MissReason.EVICTED})
"""Those behind it may be had all the same."""
OUTCOME_NAMES = {
    StageOutcome.OK: "ok",
    StageOutcome.MISS: "miss",
    StageOutcome.DAMAGED: "damaged",
    StageOutcome.ERROR: "error",
    StageOutcome.REFUSED: "refused",
    StageOutcome.TIMEOUT: "timeout",
    StageOutcome.FULL: "full",
}
OUTCOME_TO_MISS = {
    StageOutcome.DAMAGED: MissReason.DAMAGED,
    StageOutcome.ERROR: MissReason.TIER_ERROR,
    StageOutcome.REFUSED: MissReason.TIER_DOWN,
    StageOutcome.TIMEOUT: MissReason.TIMEOUT,
    StageOutcome.FULL: MissReason.HOST_FULL,
}


class _Run(NamedTuple):
    """A stage of the blocks from `start` on; those behind it, up to `end`, are looked at when it has ended.
    num_expected: blocks that count as the client's meanwhile."""

    stage: Stage
    start: int
    end: int
    num_expected: int


class StageRequest(Request):
    """Answered once, when every block is here, or will not be, or its time is over.

    Blocks of host memory are leased first, wherever they stand among the others. What remains is staged in runs of
    blocks that follow each other: one that fails keeps none behind it from coming.

    Mutable state: what became of each block, the runs under way, and what is still to be looked at.
    """

    def __init__(
        self,
        message: messages.Stage,
        digests: Sequence[BlockDigest],
        tenant: Tenant,
        slots: Slots,
        clock: Clock,
    ) -> None:
        """Raises LayoutError for blocks that fit no slab."""
        super().__init__(message.id)
        self._message = message
        self._digests = digests
        self._tenant = tenant
        self._slots = slots
        self._clock = clock
        self._begun_at = clock.now()
        self._has_waited = False
        self._max_wait_s = message.max_wait_ms / 1000
        self._outcomes = bytearray([UNDECIDED]) * len(digests)
        self._leases: dict[int, Lease] = {}
        self._checksums: dict[int, int] = {}
        self._arrived: Counter[str] = Counter()
        self._runs: list[_Run] = []
        self._todo: deque[range] = deque()
        self._questions: Sequence[Question] = []
        self._lease(range(len(digests)))
        self._begin()

    @property
    def waits_since(self) -> float | None:
        return self._begun_at if self._has_waited else None

    def poll(self) -> Answer | None:
        if not self._advance():
            return None
        is_sent = self._message.inline
        order = sorted(self._leases)
        leases = [self._leases[index] for index in order]
        checksums = [self._checksums[index] for index in order]
        self._leases = {}
        self._count(leases)
        outcomes = bytes(self._outcomes)
        if is_sent:
            nbytes = self._message.block_bytes
            payload = [view[:nbytes] for view in self._slots.send(leases)] if leases else []
            return Answer(Staged(self.id, outcomes, [], [], checksums), payload)
        handles = self._slots.give(leases)
        return Answer(Staged(self.id, outcomes, handles, [lease.offset for lease in leases], checksums))

    def cancel(self) -> bool:
        self._end_runs()
        self._questions = []
        self._todo.clear()
        self._slots.drop(list(self._leases.values()))
        self._leases = {}
        return True

    # ---- inside --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Of what host memory has not: decide what nobody has, ask those who may, and see to the rest."""
        missing = [index for index, outcome in enumerate(self._outcomes) if outcome == UNDECIDED]
        if not missing:
            return
        if self._max_wait_s and any(lower.is_remote and lower.is_available for lower in self._tenant.store.lower):
            stager, rest = self._tenant.store.stager, self._digests[missing[0] :]
            found = stager.locate(self._message.namespace, rest, self._message.block_bytes)
            self._questions = stager.ask(self._message.namespace, rest, self._message.block_bytes, found)
        if not self._questions:
            self._plan()

    def _plan(self) -> None:
        """What is to be staged, as far as is known now."""
        missing = [index for index, outcome in enumerate(self._outcomes) if outcome == UNDECIDED]
        tiers = held_tiers(self._tenant, self._message.namespace, [self._digests[index] for index in missing])
        start = end = -1
        for index, tier in zip(missing, tiers, strict=True):
            if not tier:
                self._outcomes[index] = self._why_nowhere(index)
            elif not self._max_wait_s:
                self._outcomes[index] = StageOutcome.TIMEOUT
            elif end == index:
                end = index + 1
            else:
                if start >= 0:
                    self._todo.append(range(start, end))
                start, end = index, index + 1
        if start >= 0:
            self._todo.append(range(start, end))

    def _why_nowhere(self, index: int) -> int:
        for lower in self._tenant.store.lower:
            if not lower.is_available and lower.holds(self._message.namespace, self._digests[index]):
                return StageOutcome.REFUSED
        return StageOutcome.MISS

    def _advance(self) -> bool:
        """True once nothing is left to be waited for."""
        is_over = not 0 <= self._clock.now() - self._begun_at < self._max_wait_s
        if self._questions and (is_over or all(question.done for question in self._questions)):
            self._questions = []
            self._lease_undecided()
            self._plan()
        for run in [each for each in self._runs if each.stage.poll()]:
            self._runs.remove(run)
            self._end_run(run)
        while self._todo and len(self._runs) < MAX_RUNS:
            self._begin_run(self._todo.popleft())
        if is_over and self._runs:  # their own time is the same: only a clock that went back gets here
            self._end_runs()
        return not (self._runs or self._todo or self._questions)

    def _begin_run(self, blocks: range) -> None:
        left_s = self._max_wait_s - (self._clock.now() - self._begun_at)
        message, stager = self._message, self._tenant.store.stager
        num_expected = self._slots.expect(message.block_bytes, len(blocks))
        start, end = blocks.start, blocks.start + num_expected
        self._decide(range(end, blocks.stop), StageOutcome.REFUSED)  # it would hold too much
        wanted = self._digests[start:end]
        parent = self._digests[start - 1] if start else BlockDigest(message.parent) if message.parent else None
        found = stager.locate(message.namespace, wanted, message.block_bytes)
        stage = stager.begin(
            message.request or self._slots.holder,
            message.namespace,
            wanted,
            parent,
            message.block_bytes,
            min(left_s, self._max_wait_s),
            found,
            client=self._slots.holder,
        )
        if stage is not None:
            self._has_waited = True
            if found.is_cut:
                self._decide(range(start + len(found.digests), end), StageOutcome.REFUSED)
                end = start + len(found.digests)
            self._runs.append(_Run(stage, start, end, num_expected))
            return
        self._slots.expect_no_more(message.block_bytes, num_expected)
        # It came to host memory since, or went from where it was, or its time is over.
        self._lease(blocks)
        self._decide(blocks, StageOutcome.TIMEOUT if left_s <= 0 else StageOutcome.MISS)

    def _end_run(self, run: _Run) -> None:
        stage, start, end, num_expected = run
        self._slots.expect_no_more(self._message.block_bytes, num_expected)
        self._arrived.update(stage.arrived)
        try:
            self._lease(range(start, end))  # what came behind a block that failed is here too
        finally:
            stage.close()
        failed = start + stage.num_end
        self._decide(range(start, failed), StageOutcome.MISS)  # gone since
        if stage.miss is None:
            if failed < end:  # those behind a block that was located no more
                self._decide(range(failed, failed + 1), StageOutcome.MISS)
                self._go_on(range(failed + 1, end))
            return
        outcome = REASON_TO_OUTCOME.get(stage.miss, StageOutcome.MISS)
        if stage.miss in OF_ONE_BLOCK:
            self._decide(range(failed, min(failed + 1, end)), outcome)
            self._go_on(range(failed + 1, end))
        else:
            self._decide(range(failed, end), outcome)

    def _go_on(self, blocks: range) -> None:
        """With those of these blocks that are not decided; they follow each other or the first is left out."""
        start = next((index for index in blocks if self._outcomes[index] == UNDECIDED), blocks.stop)
        if start < blocks.stop:
            self._todo.append(range(start, blocks.stop))

    def _end_runs(self) -> None:
        runs, self._runs = self._runs, []
        for run in runs:
            run.stage.stop()
            self._end_run(run)

    def _decide(self, blocks: range, outcome: int) -> None:
        for index in blocks:
            if self._outcomes[index] == UNDECIDED:
                self._outcomes[index] = outcome

    def _lease_undecided(self) -> None:
        self._lease(range(len(self._digests)))

    def _lease(self, blocks: range) -> None:
        """Lease what host memory has of the undecided ones among these."""
        outcomes, leases, checksums = self._outcomes, self._leases, self._checksums
        wanted = [index for index in blocks if outcomes[index] == UNDECIDED]
        if not wanted:
            return
        is_all = len(wanted) == len(self._digests)
        digests = self._digests if is_all else [self._digests[index] for index in wanted]
        found, num_refused = self._slots.lease(self._message.namespace, digests, self._message.block_bytes)
        for index, block in zip(wanted, found, strict=False):
            if block is not None:
                outcomes[index] = OK
                leases[index] = block.lease
                checksums[index] = block.checksum or 0
        for index in wanted[len(wanted) - num_refused :]:
            self._outcomes[index] = StageOutcome.REFUSED

    def _count(self, leases: Sequence[Lease]) -> None:
        tenant, outcomes = self._tenant, Counter(self._outcomes)
        tenant.served_bytes += len(leases) * self._message.block_bytes
        tenant.outcomes.update({OUTCOME_NAMES[outcome]: number for outcome, number in outcomes.items()})
        if self._has_waited:
            tenant.num_waits += 1
            tenant.wait_seconds += max(0.0, self._clock.now() - self._begun_at)
        misses = [OUTCOME_TO_MISS.get(outcome, MissReason.ABSENT) for outcome in outcomes if outcome != StageOutcome.OK]
        hit = len(leases)
        staged = dict(self._arrived)
        tenant.store.counters.add_lookup(
            len(self._outcomes), hit, misses[0] if misses else MissReason.ABSENT, {**staged, "host": hit}
        )
