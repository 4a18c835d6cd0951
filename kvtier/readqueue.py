"""Whose blocks are read next: the stages that run, the reads under way, and each tier's budget of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from kvtier.clock import Clock
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.located import Source
from kvtier.reasons import MissReason
from kvtier.stage import ReadBudget, Stage, StageRead, unasked_bytes

__all__ = ["ReadQueue"]

READ_BYTES = 8 << 20
"""One job: large enough to keep a device busy, small enough that a prompt's blocks spread over the tier's threads."""
READ_BLOCKS = 512
"""And no more blocks, however small: under one hold of the lock, about a millisecond."""
JOBS_OF_STAGE = 2
"""Where jobs may be larger: what a stage has left is for so many of the tier's threads at once."""

MIN_TURNS = 64
"""Clients that are remembered, with stages or without."""


class ReadQueue:
    """Stages take turns in the order in which they began, tier by tier: one that waits for a tier's budget holds up
    those behind it that want the same tier, and no others. Those of several clients take turns by client: whose blocks
    were not taken for the longest comes first, however many stages it has.

    Every call is made under the stager's lock, which guards this and the private state of every stage and read.
    """

    def __init__(self, sources: Iterable[Source], max_bytes: int, clock: Clock) -> None:
        """max_bytes: under way from each tier."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._budgets = {source: ReadBudget(max_bytes, clock) for source in sources}
        self._stages: deque[Stage] = deque()
        self._turns: dict[str, int] = {}  # by client, the turn in which its blocks were taken last
        self._num_turns = 0
        self.reads: dict[tuple[bytes, BlockDigest], StageRead] = {}
        self._replaced: set[StageRead] = set()

    def attach(self, source: Source) -> None:
        self._budgets[source] = ReadBudget(self._max_bytes, self._clock)

    def detach(self, source: Source) -> None:
        """Nothing of it is read any more, but for what its threads still read."""
        if not any(read.source is source for read in self.under_way()):
            self._budgets.pop(source, None)

    def inflight_bytes(self, source: Source | None = None) -> int:
        """Bytes that queued and running reads, abandoned ones included, write to slots or will; of one tier, or all."""
        budgets = [budget for each, budget in list(self._budgets.items()) if source in (None, each)]
        return sum(budget.live_bytes + budget.abandoned_bytes for budget in budgets)

    def queued_bytes(self, source: Source) -> int:
        """Bytes that a tier is to read before those of a stage that begins now. O(stages that run)."""
        return self.inflight_bytes(source) + unasked_bytes(self._stages, source)

    def is_lost(self, source: Source) -> bool:
        """Whether a tier gives nothing back of what it reads, so that nothing more is read from it."""
        budget = self._budgets.get(source)
        return budget is not None and budget.is_lost

    def add(self, stage: Stage) -> None:
        self._stages.append(stage)
        # Who is new comes right before whoever was served last, behind all others: nobody waits for ever.
        self._turns.setdefault(stage.client, self._num_turns - 1)

    def under_way(self) -> list[StageRead]:
        """Reads that have not ended, those included whose blocks are read otherwise since."""
        return [*self.reads.values(), *self._replaced]

    def stuck(self, namespace: bytes, sick: Collection[Source]) -> set[BlockDigest]:
        """Blocks that are being read from tiers that are sick, or give nothing back."""
        budgets = self._budgets.items()
        if not any(source in sick or (each.abandoned_bytes and each.is_still) for source, each in budgets):
            return set()
        reads = self.reads.values()
        return {read.digest for read in reads if read.namespace == namespace and self._is_stuck(read, sick)}

    def stages(self) -> set[Stage]:
        """Those that wait for a read, or to ask for one."""
        return {stage for read in self.reads.values() for stage, _ in read.waiters} | set(self._stages)

    def take(self, sick: Collection[Source] = ()) -> tuple[list[StageRead], list[StageRead], bool]:
        """The next blocks to read: one tier's, from one stage, a job's worth at most; empty when there are none now.
        Then the reads that these replace; and whether a stage ended because its tier gives nothing back.

        sick: tiers that may not be asked now."""
        busy: set[Source] = set()  # an earlier stage waits for its budget: it is nobody else's now
        replaced: list[StageRead] = []
        was_refused = False
        for stage in self._in_turn():
            reads = self._take_from(stage, busy, sick, replaced)
            if stage._next >= stage._end:
                self._stages.remove(stage)
                self.check_done(stage)
            elif not reads and (source := stage._sources[stage._next]) is not None:
                budget = self._budgets.get(source)
                if budget is None or budget.is_lost:  # None: detached since its blocks were located
                    self.cut(stage, MissReason.TIER_DOWN)
                    was_refused = True
                else:
                    busy.add(source)
            if reads:
                self._note_turn(stage)
                return reads, replaced, was_refused
            if len(busy) == len(self._budgets):
                break
        return [], replaced, was_refused

    def take_queued(self, source: Source | None, reason: MissReason) -> list[StageRead]:
        """Reads, of one tier or of all, that no thread has begun: none will."""
        queued = [read for read in self.under_way() if read.is_queued and source in (None, read.source)]
        for read in queued:
            read.is_queued = False
            read.failure = reason
        return queued

    def end(self, read: StageRead) -> StageRead | None:
        """The tier came back from it. The read of the block before it, if that is under way; not where this one is
        awaited by that one, as callers may have it that name blocks in any order."""
        self._budgets[read.source].end(read)
        parent = None if read.parent is None else self.reads.get((read.namespace, read.parent))
        first = parent
        while first is not None and first.awaits is not None:
            first = first.awaits
        if first is read:
            return None
        read.awaits = first
        return parent

    def tell(self, read: StageRead) -> bool:
        """Its block is in host memory, or failed: the stages' word of it; True if one ended by it."""
        if read.is_replaced:
            self._replaced.discard(read)
        else:
            del self.reads[read.namespace, read.digest]
        ended = False
        for stage, index in read.waiters:
            stage.note_end(read, index)
            ended |= self.check_done(stage)
        return ended

    def check_done(self, stage: Stage) -> bool:
        if not stage._done and stage._next >= stage._end <= stage.first_pending():
            self._finish(stage)
            return True
        return False

    def cut(self, stage: Stage, reason: MissReason | None) -> None:
        """End it before its blocks came; what came of the prefix stays."""
        if not stage._done:
            stage._end = min(stage.first_pending(), stage._end)
            stage._miss = reason or stage._miss
            self._finish(stage)

    def check_integrity(self) -> None:
        """Raises IntegrityError when reads, stages and the bytes under way disagree."""
        reads = self.under_way()
        for source, budget in self._budgets.items():
            budget.check_integrity([read for read in reads if read.source is source])
        waiting = {(stage, index) for read in reads for stage, index in read.waiters}
        for stage in self.stages():
            if not stage._done and any((stage, index) not in waiting for index in stage._pending):
                raise IntegrityError(f"staging: {stage.name} waits for a block that nobody reads")

    def _in_turn(self) -> list[Stage]:
        stages = list(self._stages)
        return sorted(stages, key=lambda stage: self._turns[stage.client]) if len(self._turns) > 1 else stages

    def _note_turn(self, stage: Stage) -> None:
        self._num_turns += 2
        self._turns[stage.client] = self._num_turns
        if len(self._turns) > 2 * len(self._stages) + MIN_TURNS:  # of clients that are long gone
            there = {each.client for each in (*self._stages, stage)}
            self._turns = {client: turn for client, turn in self._turns.items() if client in there}

    def _finish(self, stage: Stage) -> None:
        stage._done = True
        stage._ended_at = self._clock.now()
        if stage in self._stages:
            self._stages.remove(stage)
        for index in stage._pending:
            read = self.reads[stage._namespace, stage._digests[index]]
            self._budgets[read.source].leave(read)

    def _is_stuck(self, read: StageRead, sick: Collection[Source]) -> bool:
        """Whether nobody should wait for this read who can have the block otherwise."""
        budget = self._budgets[read.source]
        is_given_up = not (read.num_live or read.is_queued) and budget.is_still
        return not read.is_read and (read.source in sick or budget.is_lost or is_given_up)

    def _replace(self, read: StageRead) -> list[StageRead]:
        """Its block is read otherwise from now on; the reads that wait for that."""
        for stage, _ in read.waiters:
            self.cut(stage, MissReason.TIER_DOWN)
        read.is_replaced = True
        self._replaced.add(read)
        after, read.after = read.after, []
        return after

    def _take_from(
        self, stage: Stage, busy: AbstractSet[Source], sick: Collection[Source], replaced: list[StageRead]
    ) -> list[StageRead]:
        reads: list[StageRead] = []
        most = READ_BYTES
        while stage._next < stage._end:
            index, source = stage._next, stage._sources[stage._next]
            name = (stage._namespace, stage._digests[index])
            under_way = self.reads.get(name)
            if under_way is not None and (source is None or not self._is_stuck(under_way, {*sick} - {source})):
                stage.join(under_way)
            elif source is not None:
                if not reads:
                    most = source.tier.read_bytes(READ_BYTES, stage._left[source] * stage._nbytes // JOBS_OF_STAGE)
                if len(reads) * max(stage._nbytes, most // READ_BLOCKS) >= most or source in busy:
                    break
                budget = self._budgets.get(source)
                if (reads and reads[0].source is not source) or budget is None or not budget.can_begin(stage._nbytes):
                    break
                parent = stage._digests[index - 1] if index else stage._parent
                read = StageRead(*name, parent, stage._nbytes, source, [(stage, index)], num_live=1)
                if under_way is not None:
                    read.after = self._replace(under_way)
                    replaced.append(under_way)
                self.reads[name] = read
                budget.begin(read)
                stage._pending.add(index)
                reads.append(read)
            stage._next += 1
        return reads
