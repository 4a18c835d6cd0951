"""The engine: requests in, tokens out, one step at a time, with kvtier beside the block pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvtier.clock import Clock, MonotonicClock
from kvtier.config import Settings
from kvtier.errors import ClosedError, LayoutError, TierError, TokenError
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Extras, Namespace, digest_tokens
from kvtier.metrics import StatsSnapshot
from kvtier.store import Store
from kvtier_connectors.connector import Connector
from kvtier_connectors.contract import NO_OPTIONS, WRITTEN, CopyResult, KVOptions, RestoreOutcome
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.config import EngineConfig, resolve_max_model_len
from kvtier_engine.errors import EmptyPromptError, PromptTooLongError, RequestError
from kvtier_engine.request import FinishReason, Request, RequestOutput, TextStream
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.sampling import Sampler, SamplingParams
from kvtier_engine.scheduler import Scheduled, Scheduler, Verdict
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


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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
    ) -> None:
        """settings: kvtier's, or None to run without it.

        store: shared with others, else opened here. Raises ConfigError or LayoutError.
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
        self.connector: Connector | None = None
        if settings is not None:
            planes = BlockPlanes.from_arrays(runner.planes())
            self.connector = Connector(settings, namespace, self.pool, planes, store=store, executor=executor)
        self.scheduler = Scheduler(
            self.pool, self.connector.scheduler if self.connector else None, config, layout.block_tokens
        )
        self._streams: dict[str, TextStream] = {}
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
        """Queue a prompt of token ids.

        Raises a RequestError or TokenError, before anything is scheduled, if it can never run, and ClosedError after
        `close`.

        extras: adapter, salt and media, which separate its KV from others'. options: what it asks of kvtier: whether it
        is stored and restored, and how long it waits for that.
        """
        if self._closed:
            raise ClosedError("the engine is closed; open another")
        self._check_prompt(request_id, prompt)
        if not isinstance(options, KVOptions):
            raise RequestError(f"options must be a KVOptions, not {options!r}")
        request = Request(
            request_id,
            [int(token) for token in prompt],
            params,
            self._make_sampler(params),
            extras,
            self._block_tokens,
            self._clock.now(),
            options=options,
        )
        self._streams[request_id] = stream or TextStream()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state.

        Its last output, or None when it is not live. Its id may be used again at once.
        """
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        return self._last_output(request) if request is not None else None

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        """Keep stepping while this holds: requests are unfinished, copies still touch the pool, or what the last step
        published has yet to be looked at by the connector."""
        return self.num_unfinished > 0 or self._copies_in_flight > 0 or self._just_published

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Consume copies that ended, schedule, start copies, run the model once, publish.

        Raises nothing that a request caused: a failing forward ends its requests with FinishReason.ERROR; a token that
        cannot be, a failing sampler or a failing stream ends the one request.
        """
        outcomes = self._collect_copies()
        scheduled, verdict = self.scheduler.schedule(outcomes, copies_in_flight=self._copies_in_flight)
        self._start_copies()
        outputs = self._forward(scheduled) if scheduled else []
        self._just_published = bool(scheduled) and self.connector is not None
        stalled = self.scheduler.stalled
        if stalled is not None:
            outputs.append(self._fail(stalled, self._describe_stall(stalled)))
        return StepResult(tuple(outputs), verdict, sum(share.num_tokens for share in scheduled))

    def wait(self, timeout: float) -> None:
        """When a step computed nothing: block until a copy or a stage under way ended, at most `timeout` seconds."""
        if self.connector is not None and (self._copies_in_flight or self.scheduler.num_staging):
            self._results += self.connector.worker.poll(timeout)

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

    def reset_cache(self) -> None:
        """Forget all KV in the pool and in every tier, as after new weights.

        Raises RequestError while requests live, and TierError when a tier could not make sure of it: then kvtier is off
        in this engine until a reset succeeds, and a later process might find KV of before.
        """
        if self.num_unfinished:
            raise RequestError(f"{self.num_unfinished} requests are unfinished; abort or finish them before a reset")
        self.pool.reset_cache()
        if self.connector is not None and not self.connector.scheduler.reset():
            raise TierError(
                "the reset did not reach every tier (the log says why): kvtier is off in this engine until a reset "
                "succeeds, and a process started later might find KV of before; reset again before that"
            )

    def flush(self, timeout: float) -> int:
        """Store every full block that the pool caches, down to the lowest tier; how many blocks are not. Between steps;
        blocks, at most `timeout` seconds."""
        if self.connector is None:
            return 0
        self._outcomes = self._collect_copies()
        result = self.connector.flush(timeout, self.pool.take_reused())
        self._outcomes += result.outcomes
        self._copies_in_flight = self.connector.scheduler.stats().in_flight_blocks
        return result.num_unstored

    def stats(self) -> StatsSnapshot | None:
        """What kvtier's store counts; None without kvtier."""
        return None if self.connector is None else self.connector.store.stats()

    def check_integrity(self) -> None:
        """Raises IntegrityError when any structure disagrees with another. O(blocks): for tests."""
        self.scheduler.check_integrity()
        if self.connector is not None:
            self.connector.scheduler.check_integrity()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what is left and close the connector, which stores what the pool still caches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request in list(self.scheduler.requests()):
            self.abort(request.request_id)
        if self.connector is not None:
            self._collect_copies()  # what `wait` has taken from the worker has ended
            self.connector.close(timeout, self.pool.take_reused())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside a step -------------------------------------------------------------------------------------------

    def _collect_copies(self) -> list[RestoreOutcome]:
        if self.connector is None:
            return []
        results, self._results = self._results + self.connector.worker.poll(), []
        outcomes, self._outcomes = self._outcomes, []
        return outcomes + self.connector.scheduler.complete(results)

    def _start_copies(self) -> None:
        reused, demand = self.pool.take_reused(), self.scheduler.demand()
        if self.connector is None:
            return
        plan = self.connector.scheduler.plan_step(reused, demand)
        self._copies_in_flight = plan.in_flight
        if plan.jobs:
            # The forward that wrote these blocks returned before this step began, so there is no event to wait for.
            self.connector.worker.submit(plan, WRITTEN)

    def _forward(self, scheduled: list[Scheduled]) -> list[RequestOutput]:
        batch = [self._batch_item(share) for share in scheduled]
        try:
            tokens = self._execute(batch)
        except Exception as error:  # the model's failure is the batch's, not the engine's
            logger.exception("the forward of %d requests failed", len(scheduled))
            return [self._fail(share.request, f"the forward failed: {error!r}") for share in scheduled]
        now = self._clock.now()
        outputs: list[RequestOutput] = []
        for share, item, token in zip(scheduled, batch, tokens, strict=True):
            request = share.request
            if request.finish_reason is not None:
                continue  # the stream of another request aborted it
            problem = self._describe_bad_token(request, item, token)
            if problem is not None:
                logger.error("request %s: %s", request.request_id, problem, exc_info=request.sampler.error)
                outputs.append(self._fail(request, problem))
                continue
            self.scheduler.confirm(share, token, now)
            if token is not None:
                outputs.append(self._put_out(request, token))
        return outputs

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

    def _describe_bad_token(self, request: Request, item: BatchItem, token: object) -> str | None:
        """Why what the runner returned for a request cannot be taken; None when it can."""
        if request.sampler.error is not None:
            return f"sampling failed: {request.sampler.error!r}"
        if item.sampler is None:
            return None if token is None else f"the model sampled {token!r} before the prompt's end"
        if type(token) is not int or not 0 <= token < self._runner.vocab_size:
            return f"the model sampled {token!r}; its tokens are 0..{self._runner.vocab_size - 1}"
        return None

    def _put_out(self, request: Request, token: int) -> RequestOutput:
        reason, error = self._finish_reason(request, token), None
        stream, text = self._streams[request.request_id], ""
        try:
            if reason is not FinishReason.STOP:  # an end token has no text
                text += stream.push(token)
            if reason is None and stream.stopped:
                reason = FinishReason.STOP
            if reason is not None:
                text += stream.finish()
        except Exception as raised:  # a stream is the caller's code, and may raise anything
            logger.exception("the text stream of request %s failed", request.request_id)
            reason, error = FinishReason.ERROR, f"the text stream failed: {raised!r}"
        if reason is not None:
            self.scheduler.finish(request.request_id, reason, error)
            self._streams.pop(request.request_id, None)
        return self._output(request, (token,), text)

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return FinishReason.STOP
        num_output = len(request.tokens) - request.num_prompt_tokens
        if num_output == params.max_tokens or len(request.tokens) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _fail(self, request: Request, error: str) -> RequestOutput:
        self.scheduler.finish(request.request_id, FinishReason.ERROR, error)
        return self._last_output(request)

    def _last_output(self, request: Request) -> RequestOutput:
        text = ""
        try:
            text += self._streams.pop(request.request_id).finish()
        except Exception:  # it has ended for another reason, and that one is reported
            logger.exception("the text stream of request %s failed at its end", request.request_id)
        return self._output(request, (), text)

    @staticmethod
    def _output(request: Request, new: tuple[int, ...], text: str) -> RequestOutput:
        first = request.first_token_at
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=new,
            token_ids=request.output_tokens,
            new_text=text,
            finish_reason=request.finish_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            gpu_hit_tokens=request.gpu_hit_tokens,
            restored_tokens=request.restored_tokens,
            ttft_s=None if first is None else first - request.arrival,
            error=request.error,
        )

    def _check_prompt(self, request_id: str, prompt: Sequence[int]) -> None:
        if request_id in self.scheduler:
            raise RequestError(f"request id {request_id!r} is in use; choose another or abort it first")
        if not len(prompt):
            raise EmptyPromptError(f"request {request_id!r} has an empty prompt")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(
                f"request {request_id!r} has a prompt of {len(prompt)} tokens, which with one token of output is more "
                f"than max_model_len {self.max_model_len}; shorten it, or raise max_model_len or num_blocks"
            )
        last = self._runner.vocab_size - 1
        bad = next((t for t in prompt if not _is_integer(t) or not 0 <= t <= last), None)
        if bad is not None:
            raise TokenError(f"request {request_id!r} has token {bad!r}; this model's are 0..{last}")

    def _describe_stall(self, request: Request) -> str:
        return (
            f"no progress is possible: {len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting, "
            f"{self.pool.num_free} of {self.pool.num_blocks} blocks free; request {request.request_id!r} needs "
            f"{request.blocks_for(len(request.tokens) + 1) - len(request.block_table)} more"
        )
