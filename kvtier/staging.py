"""Staging: blocks on their way from lower tiers to host memory, for requests that wait a bounded time for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby

from kvtier.clock import Clock
from kvtier.errors import ClosedError
from kvtier.fence import Fence
from kvtier.filling import Filler
from kvtier.keys import BlockDigest
from kvtier.leases import Owner
from kvtier.located import Located, Source, is_known, lease_held, locate
from kvtier.membership import Question
from kvtier.readqueue import ReadQueue
from kvtier.reasons import MissReason
from kvtier.slots import SlotPool
from kvtier.stage import Stage, StageRead
from kvtier.tiers.host import HostTier

__all__ = ["Stager"]

logger = logging.getLogger("kvtier.staging")

JOBS_AT_ONCE = 2
"""Jobs that a call of the engine's thread begins: enough for the device; their threads begin the rest."""


class Stager:
    """Owns the reads under way from lower tiers, one per block however many stages want it.

    A stage's blocks are read in prefix order, as far as its tier's budget of bytes under way allows; stages take turns
    in the order in which they began. Slots are set aside by the thread that reads, when it does. A read that nobody
    waits for any more still ends in a commit: its bytes are right, and its slot is leased until the device let go of
    it. It leaves the budget to others, and counts against a second one of the same size: where even that is used up,
    the device gives nothing back, and stages end at once.

    Progress never waits for the engine's thread: while a stage has blocks to ask for, a read is under way, whose end
    begins the next ones.

    No call blocks or does I/O except `_read`, which runs on the tiers' threads.

    Mutable state: `_queue` and every stage's, guarded by `_lock`, a leaf: nothing is called under it but
    `Tier.read_bytes`, which is pure; `_sources`, replaced as a whole.
    """

    def __init__(
        self, host: HostTier, pool: SlotPool, sources: Sequence[Source], max_inflight_bytes: int, clock: Clock
    ) -> None:
        """max_inflight_bytes: read at once from each tier."""
        self._host = host
        self._pool = pool
        self._sources = tuple(sources)
        self._clock = clock
        self._owner = pool.owner("staging")
        self._filler = Filler(host, self._owner)
        self._lock = threading.Lock()
        self._queue = ReadQueue(self._sources, max_inflight_bytes, clock)
        # How many blocks one stage may read: half the pool, so that one prompt never takes all of host memory.
        self._max_blocks_of: Callable[[int], int] = cache(lambda nbytes: pool.capacity_slots(nbytes) // 2)
        self._listeners: list[Callable[[], None]] = []
        self._closed = False

    @property
    def inflight_bytes(self) -> int:
        """Bytes that queued and running reads, abandoned ones included, write to slots or will: at most twice each
        tier's budget."""
        return self._queue.inflight_bytes()

    def inflight_bytes_of(self, source: Source) -> int:
        """Those of one tier."""
        return self._queue.inflight_bytes(source)

    @property
    def fence(self) -> Fence:
        """For resets."""
        return self._filler.fence

    @property
    def num_reads(self) -> int:
        """Blocks read so far, well or not."""
        return self._filler.num_reads

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when a stage ended by a read, by a refusal to begin one, or by `close`; on that thread, so be quick
        and do not raise. What `poll` ends it tells by its answer. Returns a call that ends the subscription."""
        self._listeners = [*self._listeners, callback]

        def unsubscribe() -> None:
            self._listeners = [listener for listener in self._listeners if listener is not callback]

        return unsubscribe

    def attach(self, source: Source, place: int) -> None:
        """Read from one more tier, which is asked before those that were in its place and behind it."""
        with self._lock:
            self._queue.attach(source)
            self._sources = (*self._sources[:place], source, *self._sources[place:])

    def detach(self, source: Source) -> None:
        """Read from it no more. Its executor was closed before: what no thread has begun is given up, and
        stages that wait for it end, now or when they are polled."""
        self._sources = tuple(each for each in self._sources if each is not source)
        with self._lock:
            queued = self._queue.take_queued(source, MissReason.TIER_DOWN)
        self._complete(queued)
        with self._lock:
            self._queue.detach(source)
        self._pump()
        self._tell_listeners()

    # ---- the engine's side ---------------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[Source]:
        """The lower tiers, in the order in which they are asked."""
        return self._sources

    def locate(
        self,
        namespace: bytes,
        digests: Sequence[BlockDigest],
        nbytes: int,
        max_leased: int | None = None,
        last: Collection[str] = (),
    ) -> Located:
        """Where the leading blocks are that some tier holds, as far as one stage could bring them. Pure.

        max_leased: no block behind so many is to be read. last: tiers that serve only what no other holds; so does one
        that gives nothing back.
        """
        last, stuck = self._distrust(namespace, last)
        sources = sorted(self._sources, key=lambda source: source.name in last)
        return locate(self._host, sources, namespace, digests, self._max_blocks_of(nbytes), max_leased, stuck)

    def ask(
        self,
        namespace: bytes,
        digests: Sequence[BlockDigest],
        nbytes: int,
        found: Located,
        last: Collection[str] = (),
    ) -> list[Question]:
        """Ask the remote tiers for what `locate` did not find of these, or found only in the `last` of them, if there
        is anything to ask. Never blocks; listeners are told when one has answered."""
        last, stuck = self._distrust(namespace, last)
        questions: list[Question] = []
        for source in self._sources:
            known = [each for each in self._sources if each is source or each.name not in last]
            start = next((i for i, each in enumerate(found.sources) if each not in (None, *known)), len(found.digests))
            is_over = start == len(digests) or (found.is_cut and start == len(found.digests))
            if is_over or not (source.is_remote and source.is_available):
                continue
            wanted = digests[start : start + self._max_blocks_of(nbytes)]
            is_elsewhere = partial(is_known, self._host, known, namespace, stuck)
            questions.append(Question(source, namespace, wanted, is_elsewhere, self._tell_listeners))
        for question in questions:
            question.begin()
        return questions

    def _distrust(self, namespace: bytes, names: Collection[str]) -> tuple[Collection[str], Collection[BlockDigest]]:
        """These tiers and those that give nothing back; and blocks that are being read from such, or from sick ones."""
        sick = self._sick()
        with self._lock:
            lost = {source.name for source in self._sources if self._queue.is_lost(source)}
            return {*names, *lost}, self._queue.stuck(namespace, sick)

    def _sick(self) -> Collection[Source]:
        return {source for source in self._sources if not source.is_available}

    def queued_bytes(self, source: Source) -> int:
        """Bytes that a tier is to read before those of a stage that begins now. O(stages that run)."""
        with self._lock:
            return self._queue.queued_bytes(source)

    def begin(
        self,
        name: str,
        namespace: bytes,
        digests: Sequence[BlockDigest],
        parent: BlockDigest | None,
        nbytes: int,
        max_wait_s: float,
        found: Located | None = None,
        tenant: str = "",
        client: str = "",
    ) -> Stage | None:
        """Begin to bring the leading blocks that some tier holds to host memory; None if a lower tier has none of them.

        parent: the block before the first, None when that begins its chain. nbytes: a block's length. found: what
        `locate` found of these digests, so that nothing is looked up again. The leading blocks that host memory holds
        are leased too, and count as used. tenant: who is charged for those that come. client: who takes turns
        with others; the engine of a store of its own is the only one.
        """
        if self._closed or max_wait_s <= 0:
            return None
        sources = (found or self.locate(namespace, digests, nbytes)).sources
        if not any(sources):
            return None
        owner = self._pool.owner(f"stage of {name}")
        num_held, num_blocks = lease_held(self._host, namespace, digests, sources, owner)
        if not any(sources[:num_blocks]):  # the block before was evicted since
            owner.close()
            return None
        digests, sources = digests[:num_blocks], list(sources[:num_blocks])
        now = self._clock.now()
        deadline = now + max_wait_s
        stage = Stage(
            self, name, namespace, digests, parent, nbytes, sources, now, deadline, owner, num_held, tenant, client
        )
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.add(stage)
        if closed:
            owner.close()
            return None
        self._pump(JOBS_AT_ONCE)
        return stage

    def poll(self, stage: Stage) -> bool:
        """See `Stage.poll`."""
        if (reason := stage.why_over(self._clock.now())) is not None:
            with self._lock:
                self._queue.cut(stage, reason)
            self._pump(JOBS_AT_ONCE)
        return stage._done

    def close_stage(self, stage: Stage) -> None:
        """See `Stage.close`."""
        with self._lock:
            self._queue.cut(stage, None)
        stage._owner.close()
        self._pump(JOBS_AT_ONCE)

    def close(self) -> None:
        """Begin nothing more and end every stage. The tiers' executors were closed first: what no thread has begun is
        given up, and what their threads still read stays leased until they let go."""
        with self._lock:
            self._closed = True
            queued = self._queue.take_queued(None, MissReason.TIMEOUT)
            running = [stage for stage in self._queue.stages() if not stage._done]
            for stage in running:
                self._queue.cut(stage, MissReason.TIMEOUT)
        self._complete(queued)
        with self._lock:
            idle = not self._queue.under_way()
        if idle:
            self._owner.close()
        if running:
            self._tell_listeners()

    def check_integrity(self) -> None:
        """Raises IntegrityError when reads, stages and the bytes under way disagree."""
        with self._lock:
            self._queue.check_integrity()

    # ---- reads ---------------------------------------------------------------------------------------------------

    def _pump(self, max_jobs: int | None = None) -> None:
        """Begin as many reads as the budget allows, in `max_jobs` jobs at most: the end of each pumps on."""
        num_begun = 0
        while (max_jobs is None or num_begun < max_jobs) and (reads := self._take()):
            num_begun += self._submit(reads)  # one refused ends its stage, and pumps nothing on

    def _take(self) -> list[StageRead]:
        sick = self._sick()
        with self._lock:
            reads, replaced, was_refused = self._queue.take(sick)
        for read in replaced:
            if read.reservation is not None:  # its slot stays leased until the device lets go of it
                self._host.withdraw(read.reservation)
        if was_refused or replaced:
            self._tell_listeners()
        return reads

    def _submit(self, reads: list[StageRead]) -> bool:
        if reads[0].source.executor.try_submit(lambda: self._read(reads), urgent=True):
            return True
        if self._claim(reads):
            for read in reads:
                read.failure = MissReason.BACKLOG
            self._complete(reads)
        return False

    def _claim(self, reads: Sequence[StageRead]) -> bool:
        """True for the one that is to end these reads of one job: its thread, or who learns that none will run it."""
        with self._lock:
            is_first = reads[0].is_queued
            for read in reads:
                read.is_queued = False
            return is_first

    def _read(self, reads: Sequence[StageRead]) -> None:
        """On a thread of the tier: may block for as long as the device does."""
        if not self._claim(reads):
            return
        try:
            self._pump(JOBS_AT_ONCE)  # before it reads, so that the tier's other threads have work at once
            self._filler.fill(reads)
        except BaseException as error:
            if not isinstance(error, ClosedError):  # closed, or detached, in the middle of it
                logger.exception("reading %d blocks from the %s tier failed", len(reads), reads[0].source.tier.name)
            for read in reads:
                read.failure = MissReason.TIER_ERROR
        self._complete(reads)
        self._pump()

    def _complete(self, reads: Sequence[StageRead]) -> None:
        """Reads ended: commit what came, prefix first, and tell the stages. A block whose parent is still being read
        waits for it, so that host memory knows the chain."""
        ready: list[StageRead] = []
        with self._lock:
            for read in reads:
                parent = self._queue.end(read)
                (parent.after if parent is not None else ready).append(read)
        ended = False
        while ready:
            with self._lock:
                for read in ready:  # which grows
                    ready.extend(read.after)
                    read.after = []
            for _, group in groupby(ready, _ends_like):
                alike = list(group)
                while alike:
                    number = self._filler.commit(alike, self._unleased)
                    ended |= self._end_reads(alike[:number])
                    del alike[:number]
            ready = [late for read in ready for late in read.after]  # they ended since
        if ended:
            self._tell_listeners()

    def _unleased(self, read: StageRead) -> list[Owner]:
        """The owners of the stages that have come to wait for the block since it was last asked."""
        with self._lock:
            new = read.waiters[read.num_leased :]
            read.num_leased = len(read.waiters)
            return [stage._owner for stage, index in new if not stage._done and index < stage._end]

    def _end_reads(self, reads: Sequence[StageRead]) -> bool:
        """True if a stage ended by it."""
        ended = False
        try:
            for read in reads:
                ended |= self._end_read(read)
        finally:
            self._pool.release_all([read.guard for read in reads if read.guard is not None])
        return ended

    def _end_read(self, read: StageRead) -> bool:
        """The block is in host memory, or failed: lease it for stages that came last, and tell all. True if one ended
        by it."""
        while (ended := self._try_end(read)) is None:
            for owner in self._unleased(read):
                with suppress(ClosedError):
                    leases = self._host.lease_run(read.namespace, [read.digest], owner)
                    if not leases and self._host.state(read.namespace, read.digest) is None:
                        read.failure = MissReason.EVICTED
        return ended

    def _try_end(self, read: StageRead) -> bool | None:
        with self._lock:
            if read.failure is None and read.num_leased < len(read.waiters):
                return None
            return self._queue.tell(read)

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()


def _ends_like(read: StageRead) -> tuple[object, ...]:
    """What ends otherwise ends before what is behind it is committed: a stage leases nothing behind a gap."""
    return read.source, read.failure is None, read.reservation is None
