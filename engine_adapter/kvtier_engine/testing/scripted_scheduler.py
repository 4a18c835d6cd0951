"""The scheduler half of a scripted connector: the product's decisions, over tiers that answer when told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.config import RestoreSettings
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.reasons import MissReason
from kvtier.restore import RestoreDecision, RestorePhase, RestoreQuery, TierPart
from kvtier_connectors.contract import (
    BlockPoolView,
    ConnectorScheduler,
    CopyResult,
    Match,
    RequestInfo,
    RestoreOutcome,
    RestorePoll,
    StepDemand,
    TransferPlan,
)
from kvtier_engine.testing.scripted_landings import Landing, ScriptedLandings
from kvtier_engine.testing.scripted_request import ACTIVE, ON_THE_WAY, ScriptedRequest, query
from kvtier_engine.testing.scripted_stores import ScriptedStores
from kvtier_engine.testing.scripted_worker import FarSide
from kvtier_engine.testing.tasks import IgnoredDelivery, Task, TaskKind
from kvtier_engine.testing.tiers import HOST

__all__ = ["ScriptedScheduler"]


class ScriptedScheduler(ConnectorScheduler):
    """Owns requests and their episodes; its flows own copies and pins. Engine's thread only.

    store_all: at each plan, store every published block that is not in host memory; False stores nothing.
    counts: "polls", "polled" restores and "refusals"; of first admissions "lookups", "asked" and "hit" blocks, and
    "miss ..." by reason.
    """

    def __init__(
        self,
        far: FarSide,
        pool: BlockPoolView,
        decision: RestoreDecision,
        settings: RestoreSettings,
        block_tokens: int,
    ) -> None:
        self.decision = decision
        self.store_all = False
        self.counts: Counter[str] = Counter()
        self.stores = ScriptedStores(far, pool)
        self.landings = ScriptedLandings(far, pool)
        self._far = far
        self._board = far.board
        self._tiers = far.tiers
        self._settings = settings
        self._block_tokens = block_tokens
        self._requests: dict[str, ScriptedRequest] = {}
        self._active: dict[str, ScriptedRequest] = {}
        self._refused: dict[str, ScriptedRequest] = {}
        self._ready: dict[str, None] = {}
        self._epoch = 0
        self._closed = False

    # ---- a request's life ----------------------------------------------------------------------------------------

    def start_request(self, request: RequestInfo) -> None:
        self.finish_request(request.request_id)
        episode = self.decision.begin(self._query(request, request.num_local_blocks, request.num_tokens))
        record = self._requests[request.request_id] = ScriptedRequest(request, episode, self._epoch, self._block_tokens)
        self._begin(record)

    def requeue_request(self, request_id: str, num_local_blocks: int, num_tokens: int) -> None:
        record = self._requests.get(request_id)
        if record is not None:
            self._give_up(record)
            query = self._query(record.info, num_local_blocks, num_tokens)
            record.episode = self.decision.again(record.episode, query)
            record.epoch = self._epoch
            self._begin(record)

    def poll_restores(self) -> RestorePoll:
        self.counts["polls"] += 1
        self._far.deliver_due((TaskKind.LOOKUP, TaskKind.STAGE))
        answers, self._far.answers = self._far.answers, []
        for answer in answers:
            self._take_answer(answer)
        outcomes: list[RestoreOutcome] = []
        for record in list(self._active.values()):
            self.counts["polled"] += 1
            before = record.phase
            if self.decision.poll(record.episode) is not before:
                outcomes += self._time_over(record, before)
        self.decision.tick()
        ended, self._ready = [self._requests[request_id] for request_id in self._ready], {}
        return RestorePoll(
            ready=tuple(record.request_id for record in ended if not record.episode.must_fail),
            failed=tuple(record.request_id for record in ended if record.episode.must_fail),
            outcomes=tuple(outcomes),
            num_active=len(self._active),
            next_deadline=self._next_deadline(),
        )

    def match(self, request_id: str, num_local_blocks: int, max_blocks: int) -> Match:
        record = self._requests.get(request_id)
        if record is None or not self._may_restore(record.info):
            return Match(0, MissReason.RESTORE_OFF)
        if record.epoch != self._epoch:
            return Match(0, MissReason.RESET)
        episode, digests = record.episode, record.info.digests
        if episode.phase in ON_THE_WAY:
            return Match(0, None, is_staging=True)
        if episode.phase is RestorePhase.READY and not self.decision.is_worth_landing(episode):
            return Match(0, MissReason.COST)
        found = self._tiers.host_run(record.reachable(num_local_blocks, max_blocks))
        if found >= max_blocks or num_local_blocks + found >= len(digests):
            return Match(found, None)
        return Match(found, episode.miss or MissReason.ABSENT)

    def refuse_restore(self, request_id: str, *, is_permanent: bool = False) -> bool:
        self.counts["refusals"] += 1
        record = self._requests.get(request_id)
        if record is None:
            return False
        goes_on = self.decision.refuse(record.episode, is_permanent=is_permanent)
        if not goes_on or record.phase is not RestorePhase.READY:
            self._end_wait(record)
            return goes_on
        self._refused[request_id] = record
        if self.decision.refresh_due(record.episode) and self._tiers.lower:
            self.decision.refreshing(record.episode)
            record.lookup = self._ask(record)
        return True

    def admit(self, request_id: str, num_local_blocks: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        record = self._requests.get(request_id)
        if record is None or record.landing is not None:
            return 0
        miss = self.match(request_id, num_local_blocks, max_blocks).miss
        num_landing = self._num_landing(record, num_local_blocks, block_ids)
        self._give_up(record)
        if num_landing:
            digests = record.info.digests[num_local_blocks : num_local_blocks + num_landing]
            record.landing = self.landings.begin(request_id, num_local_blocks, digests, block_ids[:num_landing])
            self.decision.landing(record.episode, num_landing)
            self._active[request_id] = record
        else:
            self.decision.end(record.episode)
        if not record.was_admitted and record.info.options.restore:
            self.counts.update({"lookups": 1, "asked": max_blocks, "hit": num_landing})
            if num_landing < max_blocks:
                self.counts[f"miss {(miss or MissReason.NO_ROOM).value}"] += 1
        record.was_admitted = True
        return num_landing

    def publish(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        record = self._requests.get(request_id)
        if record is not None and record.epoch == self._epoch and record.info.options.store:
            digests = record.info.digests[first_block : first_block + len(block_ids)]
            self.stores.publish(zip(block_ids, digests, strict=True))

    def finish_request(self, request_id: str) -> None:
        record = self._requests.pop(request_id, None)
        if record is not None:
            self._give_up(record)
            self.decision.end(record.episode)

    # ---- copies --------------------------------------------------------------------------------------------------

    def plan_step(self, reused: Sequence[int], demand: StepDemand, *, is_fenced: bool = False) -> TransferPlan:
        del is_fenced
        self.stores.forget(reused)
        self.decision.observe_prefill(demand.work.num_tokens, demand.work.num_pairs, demand.work.seconds)
        self.decision.set_backlog(demand.work.backlog_tokens)
        jobs = [task.job() for task in self.landings.plan()]
        if self.store_all:
            jobs += [task.job() for task in self.stores.begin()]
        return TransferPlan(tuple(jobs), self.num_copying - sum(task.num_blocks for task in self.landings.given_up()))

    def complete(self, results: Sequence[CopyResult]) -> list[RestoreOutcome]:
        outcomes: list[RestoreOutcome] = []
        for result in results:
            task = self._board.take(result)
            if task is not None and task.kind is TaskKind.STORE:
                self.stores.end(task)
            elif task is not None:
                outcomes += self._end_landing(self.landings.end(task), result.seconds)
        return outcomes

    def reset(self) -> bool:
        self._epoch += 1
        self._tiers.clear()
        self.stores.reset()
        self.landings.void()
        for record in self._requests.values():
            if record.landing is None:
                was_waiting = record.waits or record.request_id in self._ready
                self._give_up(record)
                self.decision.end(record.episode)
                if was_waiting:
                    self._ready[record.request_id] = None
        return True

    def close(self) -> None:
        self._closed = True
        for request_id in list(self._requests):
            self.finish_request(request_id)
        self.landings.cancel_planned()

    # ---- beside it -----------------------------------------------------------------------------------------------

    @property
    def num_copying(self) -> int:
        """Blocks of copies that have not ended."""
        return self._board.num_open_blocks(TaskKind.LAND, TaskKind.STORE)

    @property
    def num_live(self) -> int:
        """Requests started and not finished."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Raises IntegrityError when requests, tasks and episodes disagree."""
        live = self._requests.items()
        phases = {request_id: record.phase for request_id, record in live}
        landing = {request_id for request_id, record in live if record.landing is not None}
        checks = {
            "exactly the active episodes are polled": self._active.keys()
            == {request_id for request_id, phase in phases.items() if phase in ACTIVE},
            "exactly those in landing have one": landing
            == self.landings.wanted()
            == {request_id for request_id, phase in phases.items() if phase is RestorePhase.LANDING},
            "the engine waits for exactly those on the way": {i for i, record in live if record.waits}
            == {request_id for request_id, phase in phases.items() if phase in ON_THE_WAY},
            "only those in host memory wait for room": self._refused.keys()
            <= {request_id for request_id, phase in phases.items() if phase is RestorePhase.READY},
            "who is ready lives": self._ready.keys() <= self._requests.keys(),
        }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"scripted connector: not true that {claim}")

    # ---- the way up ----------------------------------------------------------------------------------------------

    def _may_restore(self, info: RequestInfo) -> bool:
        return self._settings.enabled and info.options.restore and not self._closed

    def _query(self, info: RequestInfo, num_local: int, num_tokens: int) -> RestoreQuery:
        return query(info, num_local, num_tokens, self._block_tokens, may_restore=self._may_restore(info))

    def _begin(self, record: ScriptedRequest) -> None:
        """The engine asks `match` next: what is over by then is not named in `ready`."""
        self._enter(record)
        self._ready.pop(record.request_id, None)

    def _enter(self, record: ScriptedRequest) -> None:
        """Its episode came to a phase: do what that needs."""
        request_id, phase = record.request_id, record.phase
        record.waits |= phase in ON_THE_WAY
        if phase in ACTIVE:
            self._active[request_id] = record
        if phase is RestorePhase.LOOKING:
            self._look(record)
        elif phase is RestorePhase.STAGING:
            self._stage(record)
        elif phase in (RestorePhase.READY, RestorePhase.OVER):
            self._active.pop(request_id, None)
            record.lookup = record.stage = None
            if record.waits:
                self._ready[request_id] = None
            record.waits = False

    def _look(self, record: ScriptedRequest) -> None:
        """What host memory holds is known at once; lower tiers are asked for the rest, where there are any."""
        wanted = record.wanted
        if self._tiers.lower and self._tiers.host_run(wanted) < len(wanted):
            record.lookup = self._ask(record)
        else:
            self.decision.answered(record.episode, self._parts(wanted))
            self._enter(record)

    def _ask(self, record: ScriptedRequest) -> Task:
        tiers = ", ".join(self._tiers.lower)
        return self._far.begin(TaskKind.LOOKUP, record.request_id, record.wanted, tier=tiers)

    def _parts(self, digests: Sequence[BlockDigest]) -> list[TierPart]:
        return [TierPart(tier, count) for tier, count in self._tiers.parts(digests)]

    def _stage(self, record: ScriptedRequest) -> None:
        host = self._tiers.held(HOST)
        missing = [digest for digest in record.goal if digest not in host]
        tier = (self._tiers.tier_of(missing[0]) if missing else None) or HOST
        record.stage = self._far.begin(TaskKind.STAGE, record.request_id, missing, tier=tier)

    def _take_answer(self, answer: CopyResult) -> None:
        task = self._board.take(answer)
        if task is None:
            return
        verdicts = task.verdicts()
        if task.kind is TaskKind.STAGE:
            for digest, ok in zip(task.digests, verdicts, strict=True):
                data = self._tiers.data(digest)
                if ok and data is not None:
                    self._tiers.put(HOST, digest, data)  # it was read, whether or not anybody waits for it
        record = self._requests.get(task.request_id)
        if record is not None and task is record.lookup:
            record.lookup = None
            self._answered(record, verdicts)
        elif record is not None and task is record.stage:
            record.stage = None
            self._staged(record, task, MissReason.TIER_ERROR)
        else:
            self._board.ignore(IgnoredDelivery.LATE, answer)

    def _answered(self, record: ScriptedRequest, verdicts: Sequence[bool]) -> None:
        """The end of a lookup, or of the refresh of one: an answer, a shorter one, or an error."""
        num_told = ([*verdicts, False]).index(False)
        was_ready = record.phase is RestorePhase.READY
        if num_told:
            self.decision.answered(record.episode, self._parts(record.wanted[:num_told]))
        else:
            self.decision.not_answered(record.episode)
        if not was_ready or record.phase is not RestorePhase.READY:
            self._end_wait(record)
            self._enter(record)

    def _staged(self, record: ScriptedRequest, task: Task, failure: MissReason) -> None:
        wanted = record.goal
        num_there = self._tiers.host_run(wanted)
        held = self._tiers.held(HOST)
        arrived = {task.tier: sum(digest in held for digest in task.digests)}
        seconds = self._far.clock.now() - task.began_at
        miss = None if num_there == len(wanted) else failure
        self.decision.staged(record.episode, num_there, miss, arrived, seconds, 0)
        self._enter(record)

    def _time_over(self, record: ScriptedRequest, before: RestorePhase) -> list[RestoreOutcome]:
        """A wait ended by itself: what it waited for, should it come, is of no use to this request."""
        task, record.stage = record.stage, None
        if before is RestorePhase.STAGING and task is not None:
            self._staged(record, task, MissReason.TIMEOUT)
            return []
        outcomes: list[RestoreOutcome] = []
        if before is RestorePhase.LANDING and record.landing is not None:
            landing, must_fail = record.landing, record.episode.must_fail
            landing.is_given_up = True
            name, first = record.request_id, landing.first_block
            outcomes.append(RestoreOutcome(name, first, 0, must_fail=must_fail, is_abandoned=True))
            self._give_up(record)
        self._enter(record)
        return outcomes

    def _num_landing(self, record: ScriptedRequest, num_local: int, block_ids: Sequence[int]) -> int:
        if not self._may_restore(record.info) or record.epoch != self._epoch or record.phase is RestorePhase.OVER:
            return 0
        return self._tiers.host_run(record.reachable(num_local, len(block_ids)))

    def _end_landing(self, landing: Landing, seconds: float) -> list[RestoreOutcome]:
        record = self._requests.get(landing.task.request_id)
        if record is None or record.landing is not landing:
            return []
        record.landing = None
        num_bytes = landing.task.num_blocks * self._far.block_bytes
        self.decision.observe_restore(HOST, num_bytes, 0, seconds)
        if landing.is_valid:
            self.decision.landed(record.episode, landing.num_landed)
        else:
            self.decision.end(record.episode)  # the tiers were reset: nothing to look for again
        outcome = RestoreOutcome(
            record.request_id,
            landing.first_block,
            landing.num_landed,
            will_retry=record.phase in ON_THE_WAY,
            must_fail=record.episode.must_fail,
        )
        self._enter(record)
        return [outcome]

    def _end_wait(self, record: ScriptedRequest) -> None:
        self._refused.pop(record.request_id, None)

    def _give_up(self, record: ScriptedRequest) -> None:
        """The request waits for nothing any more. A landing under way goes on, pins and all, and is told to nobody."""
        if record.landing is not None:
            record.landing.is_wanted = False
        record.landing = record.lookup = record.stage = None
        record.waits = False
        self._end_wait(record)
        self._active.pop(record.request_id, None)
        self._ready.pop(record.request_id, None)

    def _next_deadline(self) -> float | None:
        """When the first wait ends by itself: for a tier, a copy, or GPU blocks."""
        ends = [record.episode.deadline for record in self._active.values()]
        refused = [self.decision.refused_until(record.episode) for record in self._refused.values()]
        now = self._far.clock.now()  # a wait for GPU blocks that is over ends at the next refusal
        ends += [end for end in refused if end is not None and end > now]
        return min((end for end in ends if end is not None), default=None)
