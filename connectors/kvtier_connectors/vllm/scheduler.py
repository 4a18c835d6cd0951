"""The half beside vLLM's scheduler: store, tiers and decisions, told what vLLM does and asked what to load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvtier.config import Settings
from kvtier.events import StoreEvents
from kvtier.keys import BlockDigest, Namespace
from kvtier.store import Store
from kvtier_connectors.connector import sizing_warning
from kvtier_connectors.contract import (
    CopyFailure,
    CopyJob,
    CopyResult,
    RequestInfo,
    RestoreOutcome,
    StepDemand,
)
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.vllm.address import AddressTeller
from kvtier_connectors.vllm.asked import RequestOptions
from kvtier_connectors.vllm.blocks import VllmBlocks
from kvtier_connectors.vllm.events import HostEvents
from kvtier_connectors.vllm.live import ABORTED, Live, Load, LoadJobs, StepLimits
from kvtier_connectors.vllm.messages import Landed, StepPlan, StepReport
from kvtier_connectors.vllm.telemetry import KVTierStats, Telemetry
from kvtier_connectors.vllm.work import PromptWork

__all__ = ["SchedulerSide"]

logger = logging.getLogger("kvtier.vllm")

SETTLE_S = 5.0
"""How long an engine without requests steps on at most for what may never end."""
MAX_LOOKED_WAITING = 8
"""Requests at the head of vLLM's queue whose need counts as demand for free blocks."""


class SchedulerSide:
    """Owns the store and the scheduler half of the contract, and translates. Engine's thread only; nothing blocks.

    vLLM marks blocks as cached before the forward that fills them; so what was computed is known here: a step's blocks
    are published when its workers have told that it ended, or when vLLM ends the request by what the step put out.

    Mutable state: everything but store and space.
    """

    def __init__(
        self, settings: Settings, namespace: Namespace, options: RequestOptions, limits: StepLimits, *, has_events: bool
    ) -> None:
        """options: reads what requests ask for. has_events: vLLM publishes KV events."""
        self.store = Store(settings)
        self._options = options
        self._settings = settings
        self._block_tokens = namespace.layout.block_tokens
        self._step_budget, self._num_ranks = limits
        self.space = self.store.open_space(namespace)
        self._by_tier = StoreEvents.open(self.store, self.space)
        self._address = AddressTeller(self.store)
        self._manager: KVCacheManager | None = None
        self._blocks: VllmBlocks | None = None
        self._halves: KVTierScheduler | None = None
        self._live: dict[str, Live] = {}
        self._waiting: dict[str, None] = {}
        self._computing: dict[str, Live] = {}
        """Who has a forward under way."""
        self._promised: dict[str, None] = {}
        """Who was told in this step that blocks could be loaded, until vLLM allocates for them."""
        self._loads: dict[int, Load] = {}
        """By destination block, until the last copy of a load ended."""
        self._jobs = LoadJobs(self._num_ranks)
        self._landed: list[Landed] = []
        self._unsent: tuple[CopyJob, ...] = ()
        """Planned, and not yet part of what the workers are told."""
        self._allocated: list[int] = []
        self._serial = 0
        self._busy_until = 0.0
        self._work = PromptWork(self.store.clock)
        self._telemetry = Telemetry(self.store.clock)
        self._has_events = has_events
        self._events: HostEvents | None = None

    def bind(self, manager: KVCacheManager, pool: BlockPool) -> None:
        """vLLM's block tables and pool exist now."""
        blocks = VllmBlocks(pool)
        self._manager, self._blocks = manager, blocks
        if self._has_events:
            self._events = HostEvents(self.store.host, self.space, self._block_tokens, lambda: blocks.current_cache)
        if warning := sizing_warning(self.store, self.space.capacity_blocks, blocks.num_blocks):
            logger.warning(warning)
        self._halves = KVTierScheduler(self.store, self.space, self._blocks, self._settings, num_ranks=self._num_ranks)

    @property
    def kv(self) -> KVTierScheduler:
        assert self._halves is not None, "vLLM binds its block pool before the first request"
        return self._halves

    # ---- a request -----------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """A request arrived: what only lower tiers hold of it begins to come."""
        assert self._blocks is not None
        self._live[request.request_id] = live = Live(request)
        self._waiting[request.request_id] = None
        live.num_local = self._blocks.num_cached(request.block_hashes)
        digests: Sequence[BlockDigest] = request.block_hashes
        options = self._options.of(request)
        self.kv.start_request(RequestInfo(request.request_id, digests, options, live.num_local, request.num_tokens))

    def num_loadable(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind these may be loaded; None: ask again, for blocks are on their way to host memory."""
        live = self._live.get(request.request_id)
        if live is None:
            return 0, False
        self._check_preempted(live)
        live.num_local = num_computed_tokens // self._block_tokens
        if live.has_given_up:
            return 0, False
        match = self.kv.match(request.request_id, live.num_local, self._max_blocks(live))
        if match.is_staging:
            return None, False
        if match.num_blocks:
            self._promised[request.request_id] = None
        return match.num_blocks * self._block_tokens, match.num_blocks > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """vLLM allocated blocks for a request, `num_tokens` of which it expects to be loaded."""
        live = self._live.get(request.request_id)
        if live is None:
            return
        self._waiting.pop(request.request_id, None)
        self._promised.pop(request.request_id, None)
        ids = blocks.get_block_ids()[0]
        self._note_table(request, ids)
        if num_tokens:
            self._begin_load(live, tuple(ids[live.num_local : live.num_local + num_tokens // self._block_tokens]))
        elif not live.is_counted:
            live.is_counted = True
            live.num_published = 0
            self.kv.admit(request.request_id, live.num_local, self._max_blocks(live), ())

    def lost_track(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """An exception left it open what `allocated` did: nothing that is known of blocks is relied on, and what vLLM
        expects to be loaded is told as lost."""
        self.kv.forget_blocks()
        live = self._live.get(request.request_id)
        if live is not None:
            live.has_given_up, live.is_counted = True, False
        if num_tokens and (live is None or live.load is None):
            first = 0 if live is None else live.num_local
            self._landed.append(Landed(request.request_id, tuple(blocks.get_block_ids()[0][first:])))

    def finished(self, request: Request) -> None:
        """vLLM ended a request, in whatever state. What the last forward filled is published first, if it counts."""
        live = self._live.pop(request.request_id, None)
        self._waiting.pop(request.request_id, None)
        self._promised.pop(request.request_id, None)
        self._computing.pop(request.request_id, None)
        if live is None:
            return
        try:
            while live.steps and request.status not in ABORTED:
                self._publish_computed(live, live.steps.popleft()[1])
        finally:
            self.kv.finish_request(request.request_id)
            if live.load is not None:  # its copies go on, and vLLM keeps the blocks until it is told
                live.load.num_good = 0
                self._end_load(live.load)

    # ---- a step --------------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """vLLM has scheduled a step: what the workers copy meanwhile, and which loads are over."""
        self._serial += 1
        self._work.begin(self._serial)
        if self._live or self.kv.has_stores:
            self._busy_until = self.store.clock.now() + SETTLE_S
        for request_id in output.preempted_req_ids or ():
            if (live := self._live.get(request_id)) is not None:
                self._check_preempted(live)
        self._refuse()
        self._note_scheduled(output)
        self._take_outcomes(self.kv.poll_restores().outcomes)
        return self._plan_copies(output)

    def plan_nothing(self) -> StepPlan:
        """In place of a plan that failed: it is not known which blocks the step overwrites, so none is stored; and what
        had been planned is told as not copied."""
        self.kv.forget_blocks()
        self._allocated.clear()
        unsent, self._unsent = self._unsent, ()
        for job in unsent:
            self._jobs.note(job, self._loads)
            for rank in range(self._num_ranks):
                self._take_results([CopyResult(job.job_id, (), CopyFailure.RAISED, rank=rank)])
        return self.empty_plan()

    def empty_plan(self) -> StepPlan:
        """Nothing to do."""
        return StepPlan(self._serial, self._address.to_tell(self._serial), (), (), ())

    def _plan_copies(self, output: SchedulerOutput) -> StepPlan:
        assert self._blocks is not None
        reused, self._allocated = self._allocated, []
        if reused or output.finished_req_ids or output.preempted_req_ids:
            self._blocks.note_change()
        tokens = [self._live[name].request.num_tokens for name in islice(self._waiting, MAX_LOOKED_WAITING)]
        num_waiting = sum(count // self._block_tokens + 1 for count in tokens)
        demand = StepDemand(len(reused), self._step_budget, num_waiting, self._work.take(sum(tokens)))
        plan = self.kv.plan_step(reused, demand, is_fenced=True)
        self._unsent = plan.jobs
        for job in plan.jobs:
            self._jobs.note(job, self._loads)
        landed, self._landed, self._unsent = tuple(self._landed), [], ()
        is_idle = not output.total_num_scheduled_tokens
        return StepPlan(self._serial, self._address.to_tell(self._serial), plan.jobs, plan.fence, landed, is_idle)

    def take_report(self, report: StepReport) -> None:
        """A step ended in every worker: what its forward filled holds KV now, and copies came to their ends."""
        self._address.note_begun(report.serial)
        self._take_results(report.results)
        self._work.end(report.serial)
        for request_id, live in list(self._computing.items()):
            while live.steps and live.steps[0][0] <= report.serial:
                self._publish_computed(live, live.steps.popleft()[1])
            if not live.steps:
                del self._computing[request_id]

    @property
    def is_busy(self) -> bool:
        """Whether vLLM must go on stepping though it has no request: stores have not ended, or loads are not told. For
        a while also for loads of requests that are gone, which keep their blocks until then, and for a lower tier
        that writes, so that the metrics do not stand still at what was under way."""
        return self._has_work or (self._telemetry.owes_last and self.store.clock.now() < self._busy_until)

    @property
    def _has_work(self) -> bool:
        if self._landed or self.kv.has_stores:
            return True
        return (self.kv.has_landings or self.store.is_writing) and self.store.clock.now() < self._busy_until

    def hit_tokens(self, request_id: str) -> dict[str, int]:
        """Of those that it was promised when it was first admitted, how many had been in which tier."""
        return {tier: count * self._block_tokens for tier, count in self.kv.hit_sources(request_id).items()}

    def take_stats(self) -> KVTierStats | None:
        """What vLLM is to show now, if anything is due."""
        if not self._telemetry.is_due(is_idle=not (self._live or self._has_work)):
            return None
        return KVTierStats.of(self.store.stats(), self.kv.stats())

    def take_events(self) -> list[KVCacheEvent]:
        """What has changed of what host memory holds."""
        return [] if self._events is None else self._events.take()

    def reset(self) -> bool:
        """Forget all KV, in every tier."""
        return self.kv.reset()

    def close(self) -> None:
        """What is in host memory goes to the disk, within a bound; then everything is given back. Idempotent."""
        halves, self._halves = self._halves, None
        if halves is None:
            return
        halves.close()
        if self._events is not None:
            self._events.close()
        self.store.flush(4.0)
        self._by_tier.close()
        self.store.close()

    # ---- parts of it ---------------------------------------------------------------------------------------------

    def _take_results(self, results: Sequence[CopyResult]) -> None:
        ended = [load for result in results if (load := self._jobs.end(result)) is not None]
        try:
            self._take_outcomes(self.kv.complete(results))
        finally:
            for load in ended:
                if not load.num_copying and load.num_good is None:  # its outcome was lost
                    load.num_good = 0
                self._end_load(load)

    def _note_table(self, request: Request, ids: Sequence[int]) -> None:
        """Blocks that are known to hold anything but what they are to hold for this request were handed out anew."""
        hashes = request.block_hashes
        for index, block_id in enumerate(ids):
            known = self.kv.known_digest(block_id)
            if known is not None and (index >= len(hashes) or known != hashes[index]):
                self._allocated.append(block_id)

    def _max_blocks(self, live: Live) -> int:
        """Full blocks behind the local ones, one token left to compute."""
        num_full = (int(live.request.num_tokens) - 1) // self._block_tokens
        return max(0, num_full - live.num_local)

    def _begin_load(self, live: Live, blocks: tuple[int, ...]) -> None:
        request_id = live.request.request_id
        live.is_counted = True
        live.num_published = 0
        num_landing = self.kv.admit(request_id, live.num_local, self._max_blocks(live), blocks)
        live.load = load = Load(request_id, blocks, num_landing, None if num_landing else 0)
        self._loads.update(dict.fromkeys(blocks[:num_landing], load))
        self._end_load(load)

    def _end_load(self, load: Load) -> None:
        """Tell the workers once no copy writes its blocks any more and it is known which hold their bytes."""
        if load.num_copying or load.num_good is None or load.is_told:
            return
        load.is_told = True  # once: vLLM's engine ends at a load that is told twice
        self._landed.append(Landed(load.request_id, load.blocks[load.num_good :]))
        for block_id in load.blocks:
            if self._loads.get(block_id) is load:
                del self._loads[block_id]
        live = self._live.get(load.request_id)
        if live is None or live.load is not load:
            return
        live.load = None
        if load.num_good < len(load.blocks):
            # vLLM computes the rest. Where nothing came it asks at once for another load, and may never find room for
            # it beside what it reserves for the first one.
            live.has_given_up = True
            num_local = live.num_local + load.num_good
            self.kv.admit(load.request_id, num_local, self._max_blocks(live) - load.num_good, ())

    def _take_outcomes(self, outcomes: Sequence[RestoreOutcome]) -> None:
        for outcome in outcomes:
            live = self._live.get(outcome.request_id)
            if live is None or live.load is None:
                continue
            load = live.load
            load.num_good = 0 if outcome.is_abandoned else outcome.num_landed
            if outcome.is_abandoned and load.num_copying:
                logger.error(
                    "request %s: the copies of %d of its blocks have not ended within their time; it is computed when "
                    "they have, for until then they may write its blocks",
                    outcome.request_id,
                    load.num_copying,
                )
            if load.num_good:
                self.kv.publish(outcome.request_id, outcome.first_block, load.blocks[: load.num_good])
            self._end_load(load)

    def _check_preempted(self, live: Live) -> None:
        """It begins again, if it was preempted: vLLM may ask for it anew in the very step that it names it in."""
        if live.request.num_preemptions == live.num_preemptions:
            return
        assert self._blocks is not None
        request_id = live.request.request_id
        live.num_preemptions = live.request.num_preemptions
        self._waiting[request_id] = None
        live.num_local = self._blocks.num_cached(live.request.block_hashes)
        live.is_counted = live.has_given_up = False
        live.num_published = 0
        live.steps.clear()
        self._computing.pop(request_id, None)
        self.kv.requeue_request(request_id, live.num_local, live.request.num_tokens)

    def _refuse(self) -> None:
        """Those that vLLM asked about in this step, and found no blocks for."""
        promised, self._promised = self._promised, {}
        for request_id in promised:
            self._live[request_id].has_given_up = not self.kv.refuse_restore(request_id)

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        """What is computed in this step, and the blocks that were handed out for it."""
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is not None and request_id not in cached.resumed_req_ids:
                self._allocated += new_ids[0]
        for request_id, count in output.num_scheduled_tokens.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            start = live.request.num_computed_tokens
            live.steps.append((self._serial, start + count))
            self._computing[request_id] = live
            if start < live.request.num_prompt_tokens:
                self._work.add(self._serial, start, count)

    def _publish_computed(self, live: Live, num_tokens: int) -> None:
        """So many of its tokens are computed: the full blocks of these, but for tokens that were rejected since."""
        assert self._manager is not None
        num_tokens = min(num_tokens, live.request.num_computed_tokens)
        num_full = min(num_tokens // self._block_tokens, len(live.request.block_hashes))
        if num_full <= live.num_published:
            return
        ids = self._manager.get_block_ids(live.request.request_id)[0]
        self.kv.publish(live.request.request_id, live.num_published, ids[live.num_published : num_full])
        live.num_published = num_full
