"""The engine: requests in, tokens out, one step at a time, with kvtier beside the block pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.config import Settings
from kvtier.errors import ClosedError, LayoutError, TierError
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Extras, Namespace, digest_tokens
from kvtier.metrics import StatsSnapshot
from kvtier.store import Store
from kvtier_connectors.connector import Connector
from kvtier_connectors.contract import NO_OPTIONS, WRITTEN, CopyResult, KVOptions, RestoreOutcome
from kvtier_engine.beside import ConnectorOpener, EngineConnector
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.config import EngineConfig, resolve_max_model_len
from kvtier_engine.errors import RequestError
from kvtier_engine.intake import check_prompt, check_request
from kvtier_engine.outputs import Streams, describe_bad_token, make_output, why_finished
from kvtier_engine.progress import Heartbeat, PrefillProgress, StepCounts
from kvtier_engine.request import FinishReason, Request, RequestOutput, TextStream
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.sampling import Sampler, SamplingParams, resolve_max_tokens
from kvtier_engine.scheduler import Scheduled, Scheduler, StepPlan
from kvtier_engine.verdict import Stall, Verdict
from kvtier_kernels import BlockPlanes

__all__ = ["Engine", "StepResult", "TextStream"]

logger = logging.getLogger("kvtier.engine")

NO_EXTRAS = Extras(adapter=None, salt=None, media=())


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: what it put out and what it came to."""

    outputs: tuple[RequestOutput, ...]
    verdict: Verdict
    num_tokens: int
    """Tokens computed."""
    in_flight: int = 0
    """Copies, lookups and stages that have not ended."""
    next_deadline: float | None = None
    """On the engine's clock, when the first wait ends by itself; None without one."""
    stall: Stall | None = None
    """With the verdict STALL, the state that allows nothing."""


class Engine:
    """Owns scheduler, runner and connector, and is their one caller. Not thread-safe: one thread makes every call.

    Not safe across fork. After an exception that is not one of kvtier's (a KeyboardInterrupt, say) came out of a call,
    close it and open another: it may have hit anywhere.

    `step` never blocks on a copy or a tier; it runs the model. `wait` is for the loop around it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        namespace: Namespace,
        config: EngineConfig,
        settings: Settings | None,
        *,
        eos_token_ids: Iterable[int] = (),
        clock: Clock | None = None,
        store: Store | None = None,
        executor: Executor | None = None,
        make_sampler: Callable[[SamplingParams], Sampler] = Sampler,
        open_connector: ConnectorOpener | None = None,
    ) -> None:
        """settings: kvtier's, or None to run without it.

        store: shared with others, else opened here. open_connector: another connector than kvtier's own, for tests and
        simulations; `settings` is None then. Raises ConfigError or LayoutError.
        """
        layout = runner.layout
        if namespace.layout != layout:
            raise LayoutError(f"the namespace's layout is {namespace.layout}, the model's {layout}")
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, runner.max_positions, runner.num_blocks, layout.block_tokens, layout.block_bytes
        )
        self._runner = runner
        self._clock = clock or MonotonicClock()
        self._make_sampler = make_sampler
        self._eos = frozenset(eos_token_ids)
        self._block_tokens = layout.block_tokens
        self.pool = BlockPool(runner.num_blocks)
        self._default_max_tokens = config.default_max_tokens
        planes = BlockPlanes.from_arrays(runner.planes())
        self.connector: Connector | None = None
        """kvtier's own; None without it."""
        if settings is not None:
            self.connector = Connector(
                settings, namespace, self.pool, planes, store=store, executor=executor, clock=self._clock
            )
        self._kv: EngineConnector | None = (
            self.connector if open_connector is None else open_connector(self.pool, planes)
        )
        self.scheduler = Scheduler(
            self.pool, None if self._kv is None else self._kv.scheduler, config, layout.block_tokens
        )
        self.progress = PrefillProgress(self._clock, self.scheduler.__contains__)
        self.heartbeat = Heartbeat(self._clock)
        self._next_deadline: float | None = None
        self._streams = Streams()
        self._results: list[CopyResult] = []
        self._outcomes: list[RestoreOutcome] = []
        self._copies_in_flight = 0
        self._just_published = False
        self._closed = False

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        extras: Extras = NO_EXTRAS,
        stream: TextStream | None = None,
        options: KVOptions = NO_OPTIONS,
    ) -> None:
        """Queue a prompt of token ids. Raises a RequestError, before anything is scheduled, if it can never run, and
        ClosedError after `close`.

        extras: adapter, salt and media, which separate its KV from others'. options: what it asks of kvtier: whether it
        is stored and restored, and how long it waits for that.
        """
        if self._closed:
            raise ClosedError("the engine is closed; open another")
        check_request(request_id, params, options)
        if request_id in self.scheduler:
            raise RequestError(f"request id {request_id!r} is in use; choose another or abort it first")
        check_prompt(request_id, prompt, self.max_model_len, self._runner.vocab_size)
        request = Request(
            request_id,
            [int(token) for token in prompt],
            params,
            self._make_sampler(params),
            extras,
            self._block_tokens,
            self._clock.now(),
            max_tokens=resolve_max_tokens(
                params.max_tokens, self._default_max_tokens, self.max_model_len - len(prompt)
            ),
            options=options,
        )
        self._streams.open(request_id, stream)
        self.progress.forget(request_id)  # the id may have been another's
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its last output, or None when it is not live. The id is free at once."""
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        if request is None:
            return None
        self.progress.forget(request_id)
        return make_output(request, (), self._streams.end(request_id))

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        """Keep stepping while this holds: for requests, copies that touch the pool, and what was published just now."""
        return self.num_unfinished > 0 or self._copies_in_flight > 0 or self._just_published

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Consume copies that ended, schedule, start copies, run the model once, publish.

        Raises nothing that a request caused: a failing forward ends its requests with FinishReason.ERROR; a token that
        cannot be, a failing sampler or a failing stream ends the one request.
        """
        self._check_between_steps("step")
        outcomes = self._collect_copies()
        plan = self.scheduler.schedule(outcomes, copies_in_flight=self._copies_in_flight)
        for request_id in plan.preempted:
            self.progress.forget(request_id)
        self._start_copies()
        outputs = self._forward(plan.scheduled) if plan.scheduled else []
        self._just_published = bool(plan.scheduled) and self._kv is not None
        for request, why in plan.failed:
            if request.finish_reason is not None:
                continue  # a stream aborted it meanwhile
            logger.error("request %s failed: %s", request.request_id, why)
            outputs.append(self._fail(request, why))
        num_tokens = sum(share.num_tokens for share in plan.scheduled)
        self._next_deadline = plan.next_deadline
        self._beat(plan, num_tokens)
        return StepResult(tuple(outputs), plan.verdict, num_tokens, plan.in_flight, plan.next_deadline, plan.stall)

    def wait(self, timeout: float) -> None:
        """When a step computed nothing: block until a copy or a stage under way ended, or the next deadline has come,
        at most `timeout` seconds."""
        if self._kv is None or self._results or self._outcomes:
            return  # there is something to look at already
        if self._next_deadline is not None:
            timeout = max(0.0, min(timeout, self._next_deadline - self._clock.now()))
        elif not (self._copies_in_flight or self.scheduler.waiting.num_staging):
            return
        self._results += self._kv.worker.poll(timeout)

    def digests(self, tokens: Sequence[int], extras: Extras = NO_EXTRAS) -> Sequence[BlockDigest]:
        """The digests of the full blocks of a prompt."""
        return digest_tokens(tokens, self._block_tokens, extras)

    def cached_blocks(self, tokens: Sequence[int], extras: Extras = NO_EXTRAS) -> list[tuple[BlockDigest, int]]:
        """Digest and block of each leading block of a prompt that the pool's prefix cache holds. Pure."""
        digests, size = self.digests(tokens, extras), self._block_tokens
        root = extras.root(size)
        blocks = self.pool.match(root, digests, lambda index: tuple(tokens[index * size : (index + 1) * size]))
        return list(zip(digests, blocks, strict=False))

    def block_bytes(self, block_id: int) -> list[bytes]:
        """A copy of what a block holds, plane by plane, by a way of its own: for checking transfers."""
        return [plane[block_id].tobytes() for plane in BlockPlanes.from_arrays(self._runner.planes()).planes]

    def reset_cache(self, *, preempt_running: bool = False) -> None:
        """Forget all KV in the pool and in every tier, as after new weights.

        preempt_running: requests that live go on, and are recomputed. Raises RequestError, with nothing changed, from
        within a step, and while requests live that may not be preempted; and TierError when a tier could not make sure
        of it: then kvtier is off in this engine until a reset succeeds, and a later process might find KV of before.
        """
        self._check_between_steps("reset_cache")
        if self.num_unfinished and not preempt_running:
            raise RequestError(f"{self.num_unfinished} requests are unfinished; abort or finish them before a reset")
        self.scheduler.preempt_all()
        self.pool.reset_cache()
        if self._kv is not None and not self._kv.scheduler.reset():
            raise TierError(
                "the reset did not reach every tier (the log says why): kvtier is off in this engine until a reset "
                "succeeds, and a process started later might find KV of before; reset again before that"
            )

    def flush(self, timeout: float) -> int:
        """Store every full block that the pool caches, down to the lowest tier; how many blocks are not. Between steps;
        blocks, at most `timeout` seconds."""
        self._check_between_steps("flush")
        if self._kv is None:
            return 0
        self._outcomes = self._collect_copies()
        result = self._kv.flush(timeout, self.pool.take_reused())
        self._outcomes += result.outcomes
        self._copies_in_flight = self._kv.num_in_flight()
        return result.num_unstored

    def stats(self) -> StatsSnapshot | None:
        """What kvtier's store counts; None without kvtier."""
        return None if self._kv is None else self._kv.stats()

    def check_integrity(self) -> None:
        """Raises IntegrityError when any structure disagrees with another. O(blocks): for tests."""
        self.scheduler.check_integrity()
        if self._kv is not None:
            self._kv.check_integrity()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what is left and close the connector, which stores what the pool still caches. Idempotent."""
        if self._closed:
            return
        self._check_between_steps("close")
        self._closed = True
        for request in list(self.scheduler.requests()):
            self.abort(request.request_id)
        if self._kv is not None:
            self._collect_copies()  # what `wait` has taken from the worker has ended
            self._kv.close(timeout, self.pool.take_reused())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self, plan: StepPlan, num_tokens: int) -> None:
        self.heartbeat.beat(
            StepCounts(
                num_unfinished=self.num_unfinished,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_staging=self.scheduler.waiting.num_staging,
                num_tokens=num_tokens,
                is_event_due=plan.verdict is Verdict.WAIT,
            )
        )

    def _check_between_steps(self, what: str) -> None:
        if self.scheduler.is_computing:
            raise RequestError(
                f"{what} was called from within a step (by a stream, or by the runner); call it when step has returned"
            )

    # ---- inside a step -------------------------------------------------------------------------------------------

    def _collect_copies(self) -> list[RestoreOutcome]:
        if self._kv is None:
            return []
        results, self._results = self._results + self._kv.worker.poll(), []
        outcomes, self._outcomes = self._outcomes, []
        return outcomes + self._kv.scheduler.complete(results)

    def _start_copies(self) -> None:
        reused, demand = self.pool.take_reused(), self.scheduler.demand()
        if self._kv is None:
            return
        plan = self._kv.scheduler.plan_step(reused, demand)
        self._copies_in_flight = plan.in_flight
        if plan.jobs:
            # The forward that wrote these blocks returned before this step began, so there is no event to wait for.
            self._kv.worker.submit(plan, WRITTEN)

    def _forward(self, scheduled: Sequence[Scheduled]) -> list[RequestOutput]:
        batch = [self._batch_item(share) for share in scheduled]
        self._begin_progress(scheduled)
        self.scheduler.begin_compute()
        seconds, begun_at = 0.0, self._clock.now()
        try:
            try:
                tokens = self._execute(batch)
                seconds = self._clock.now() - begun_at
            except Exception as error:  # the model's failure is the batch's, not the engine's
                logger.exception("the forward of %d requests failed", len(scheduled))
                why = f"the forward failed: {error!r}"
                live = [share.request for share in scheduled if share.request.finish_reason is None]
                return [self._fail(request, why) for request in live]
            return self._take_tokens(scheduled, batch, tokens)
        finally:  # whatever interrupts a step holds blocks back no longer than it
            self.scheduler.end_compute(seconds)

    def _take_tokens(
        self, scheduled: Sequence[Scheduled], batch: Sequence[BatchItem], tokens: Sequence[int | None]
    ) -> list[RequestOutput]:
        now = self._clock.now()
        outputs: list[RequestOutput] = []
        for share, item, token in zip(scheduled, batch, tokens, strict=True):
            request = share.request
            if request.finish_reason is not None:
                continue  # the stream of another request aborted it
            problem = describe_bad_token(request, item, token, self._runner.vocab_size)
            if problem is not None:
                logger.error("request %s: %s", request.request_id, problem, exc_info=request.sampler.error)
                outputs.append(self._fail(request, problem))
                continue
            self.scheduler.confirm(share, token, now)
            if share.is_prefill:
                self.progress.computed(request.request_id, request.num_computed)
            if token is not None:
                output = self._put_out(request, token)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _begin_progress(self, scheduled: Sequence[Scheduled]) -> None:
        for share in scheduled:
            if share.is_prefill:
                request = share.request
                is_chunked = share.start + share.num_tokens < len(request.tokens)
                self.progress.begin(request.request_id, len(request.tokens), share.start, share.num_tokens, is_chunked)

    def _execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        tokens = list(self._runner.execute(batch))
        if len(tokens) != len(batch):
            raise ValueError(f"the model returned {len(tokens)} tokens for {len(batch)} requests")
        return tokens

    def _batch_item(self, share: Scheduled) -> BatchItem:
        request = share.request
        start, end = request.num_computed, request.num_computed + share.num_tokens
        sampler = request.sampler if end == len(request.tokens) else None
        return BatchItem(request.request_id, request.tokens[start:end], start, request.block_table, sampler)

    def _put_out(self, request: Request, token: int) -> RequestOutput | None:
        """None when its own stream aborted it: that was its last output."""
        text, reason, error = self._streams.push(
            request, token, why_finished(request, token, self._eos, self.max_model_len)
        )
        if request.finish_reason is not None:
            return None
        if reason is not None:
            self.scheduler.finish(request.request_id, reason, error or None)
        return make_output(request, (token,), text)

    def _fail(self, request: Request, error: str) -> RequestOutput:
        self.scheduler.finish(request.request_id, FinishReason.ERROR, error)
        self.progress.forget(request.request_id)
        return make_output(request, (), self._streams.end(request.request_id))
