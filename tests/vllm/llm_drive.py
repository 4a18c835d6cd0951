"""A whole vLLM, stepped by hand: what requests put out, what is left of them, and copies that fail.

Answers are to be compared in float32. bfloat16 would tell nothing: its logits of two tokens are often equal to the bit,
and what else is in a batch, or how a prompt was cut into chunks, decides between them. In float32 that moves a log
probability by less than `ROUNDING`; every expected answer has its two best tokens further apart (`expect`), so that a
right engine puts out the same tokens whatever the batch, the chunks and the preemptions were. Log probabilities are
compared too, since a wrong block need not change a token. (Blocks of one prompt in each other's place change nothing
here: attention sums over them. `scheduler_rig` notices.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvtier.metrics import StatsSnapshot
from kvtier_connectors.contract import CopyDirection, CopyFailure, CopyJob

__all__ = ["MAX_TOKENS", "SOON_S", "Answer", "Drive", "FailingCopies", "check_same", "expect", "verify_quiet"]

MAX_TOKENS = 8
ROUNDING = 2e-4
SOON_S = 30.0


class Answer(NamedTuple):
    """What a request put out."""

    num_cached: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gap: float
    """How far the best token was before the second one, where they were nearest."""


class Drive:
    """An engine that is stepped by hand."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Any] = {}
        """vLLM's own, by name; they stay here when they ended."""

    @property
    def side(self) -> Any:
        return self.core.scheduler.connector.scheduler_side

    @property
    def stats(self) -> StatsSnapshot:
        found = self.side.store.stats()
        assert isinstance(found, StatsSnapshot)
        return found

    def add(self, name: str, tokens: list[int], max_tokens: int = MAX_TOKENS, salt: str | None = None) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2, ignore_eos=True)
        request_id = self.llm.llm_engine.add_request(name, prompt, params)
        self.requests[name] = self.core.scheduler.requests[request_id]

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.answers[output.request_id] = answer(output)

    def run(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline, {name: self.status(name) for name in self.requests}
            self.step()

    def ask(self, tokens: list[int], max_tokens: int = MAX_TOKENS, salt: str | None = None) -> Answer:
        name = f"ask {len(self.requests)}"
        self.add(name, tokens, max_tokens, salt)
        self.run()
        return self.answers[name]

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def status(self, name: str) -> str:
        return str(self.requests[name].status.name)

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())


def answer(output: Any) -> Answer:
    (completion,) = output.outputs
    steps = list(zip(completion.token_ids, completion.logprobs, strict=True))
    best = [sorted((item.logprob for item in step.values()), reverse=True) for _, step in steps]
    chosen = tuple(step[token].logprob for token, step in steps)
    return Answer(
        output.num_cached_tokens, tuple(completion.token_ids), chosen, min(first - second for first, second, *_ in best)
    )


def expect(found: Answer) -> Answer:
    """An answer that rounding cannot change."""
    assert found.gap > 4 * ROUNDING, f"these tokens are for rounding to decide: {found}"
    return found


def check_same(found: Answer, expected: Answer) -> None:
    """The expected answer, or its beginning."""
    num_tokens = len(found.tokens)
    assert found.tokens == expected.tokens[:num_tokens]
    wrong = max(abs(one - other) for one, other in zip(found.logprobs, expected.logprobs[:num_tokens], strict=True))
    assert wrong < ROUNDING


def verify_quiet(llm: Any) -> None:
    """No request is left, no copy, and nothing of ours."""
    deadline = time.monotonic() + SOON_S
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        assert time.monotonic() < deadline
        llm.llm_engine.step()
    assert scheduler.requests == {}
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    side = scheduler.connector.scheduler_side
    assert not any((side._live, side._waiting, side._promised, side._computing, side._loads, side._jobs, side._landed))
    side.kv.check_integrity()
    assert side.kv.stats().ledger.pending == 0
    assert (side.kv.stats().in_flight_blocks, side.kv.stats().live_requests) == (0, 0)
    while side.store.stats().leases and time.monotonic() < deadline:  # a disk's threads still read or write
        time.sleep(0.001)
    assert (side.store.stats().leases, side.store.stats().staging_bytes) == (0, 0)
    assert not scheduler.connector._errors
    assert not get_kv_transfer_group()._errors


class FailingCopies:
    """Has the worker report copies as failed, and makes sure that what they were to write is rubbish then.

    choose: for each copy that ended, the positions that fail among so many. Stores fail only where `stores` is true.
    """

    def __init__(
        self, drive: Drive, monkeypatch: pytest.MonkeyPatch, choose: Callable[[int], set[int]], *, stores: bool = False
    ) -> None:
        self.num_failed: Counter[CopyDirection] = Counter()
        self._side = drive.side
        self._caches = [
            layer.kv_cache for layer in drive.core.vllm_config.compilation_config.static_forward_context.values()
        ]
        self._jobs: dict[int, CopyJob] = {}
        self._choose = choose
        self._stores = stores
        worker = get_kv_transfer_group().worker_side
        self._report, begin_step = worker.report, worker.begin_step

        def begin(plan: Any) -> None:
            self._jobs.update((job.job_id, job) for job in plan.jobs)
            begin_step(plan)

        monkeypatch.setattr(worker, "begin_step", begin)
        monkeypatch.setattr(worker, "report", self._failing)

    def _failing(self) -> Any:
        told = self._report()
        for index, result in enumerate(told.results):
            job = self._jobs.get(result.job_id)
            if job is None or result.failure is not None or (job.direction is CopyDirection.STORE and not self._stores):
                continue
            if lost := self._choose(len(job.block_ids)):
                copied = tuple(position not in lost for position in range(len(job.block_ids)))
                told.results[index] = type(result)(result.job_id, copied, CopyFailure.RAISED)
                self._spoil(job, lost)
        return told

    def _spoil(self, job: CopyJob, lost: set[int]) -> None:
        self.num_failed[job.direction] += len(lost)
        for position in lost:
            if job.direction is CopyDirection.RESTORE:
                for cache in self._caches:
                    cache[job.block_ids[position]] = 8.0
            else:
                start = job.offsets[position]
                self._side.space.buffer[start : start + self._side.space.block_bytes] = 0x41
