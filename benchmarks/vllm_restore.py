"""What a restore is worth in vLLM, and what the plug-in costs where it has nothing to do.

The real vLLM on a CPU with the real model, in this process, one thread; each figure beside another of the same run,
measured in turn. In vLLM's own environment (`make bench-vllm` makes it):

    python -m benchmarks.vllm_restore [--json] [--runs 7]

* `vllm.ttft_*`: until the first token of a 1,000-token prompt whose blocks are in host memory, beside the same prompt
  in vLLM's own prefix cache, and beside a prompt that nobody has computed.
* `vllm.load`: of the same 31 blocks, from when the worker is given the load to when it tells vLLM that it is over (what
  lay where they go was stored before), beside what vLLM's ExampleConnector takes to read them from its files, which the
  page cache has.
* `vllm.hooks`: processor time in all hooks of both halves in a step that decodes for one request, nothing being reused,
  beside the time of the step.
* `vllm.match_first`, `vllm.match_again`: `get_num_new_matched_tokens` of a prompt of which 8,192 blocks are in host
  memory, beside 2 ms and 100 us.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

# vLLM reads them when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.request import Request

from benchmarks import command
from kvtier.reasons import DropReason
from kvtier_connectors.bench.figures import Figure, steady
from kvtier_connectors.contract import CopyDirection, TransferPlan, WriteFence
from kvtier_connectors.worker import KVTierWorker
from kvtier_engine.weights import ensure_default_model
from tests.vllm.scheduler_rig import SchedulerRig

BLOCK = 32
PROMPT_TOKENS = 1000
NUM_LOADED = (PROMPT_TOKENS - 1) // BLOCK
POOL_BLOCKS = 48  # for one prompt, and not for two
DECODED = 40
MATCHED_BLOCKS = 8192
SHAPE = "SmolLM2-135M, 32-token blocks"

BARS: dict[str, tuple[str, float | None]] = {
    "vllm.ttft_beside_local_hit": ("first token, restored; beside vLLM's own cache", 1.3),
    "vllm.ttft_beside_cold": ("first token, restored; beside computed", 0.4),
    "vllm.load": ("the load; beside ExampleConnector's", 0.5),
    "vllm.hooks": ("all hooks of a decode step; beside the step", 0.01),
    "vllm.match_first": ("first match; beside 2 ms", 1.0),
    "vllm.match_again": ("the same match again; beside 100 us", 1.0),
}
HOOKS = {
    "scheduler": (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "has_pending_push_work",
        "take_events",
        "get_kv_connector_stats",
    ),
    "worker": (
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
}


def prompt(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


class Engine:
    """A vLLM with a connector."""

    def __init__(self, connector: str, module: str | None, options: dict[str, Any]) -> None:
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options,
        )
        self._llm = LLM(
            model=str(ensure_default_model()),
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK,
            kv_cache_memory_bytes=1 << 30,
            num_gpu_blocks_override=POOL_BLOCKS,
            max_model_len=(POOL_BLOCKS - 2) * BLOCK,
            max_num_seqs=4,
            kv_transfer_config=transfer,
        )
        self.engine = self._llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.halves = {"scheduler": core.scheduler.connector, "worker": get_kv_transfer_group()}
        self._names = iter(range(1 << 30))

    def first_token(self, tokens: list[int], num_cached: int) -> float:
        """Seconds until the first token, of which so many others must have come from a cache."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        begun_at = time.perf_counter()
        (output,) = self._llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        seconds = time.perf_counter() - begun_at
        if output.num_cached_tokens != num_cached:
            raise SystemExit(f"not as meant: {output.num_cached_tokens} tokens came from a cache, not {num_cached}")
        return seconds

    def add(self, tokens: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(f"r{next(self._names)}", {"prompt_token_ids": tokens}, params)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


@contextmanager
def wrapped(owner: object, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method of one object in place of the other, for a while."""
    setattr(owner, name, around(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)


def measure_first_tokens(engine: Engine, runs: int, loads: list[float]) -> list[Figure]:
    """Cold, from vLLM's own cache, pushed out by another prompt, restored; in turn. loads: gets how long those take."""
    cold, local, restored = [], [], []
    with steady(), load_times(engine, loads):
        for run in range(runs + 1):
            mine, other = prompt(2 * run), prompt(2 * run + 1)
            cold.append(engine.first_token(mine, 0))
            local.append(engine.first_token(mine, NUM_LOADED * BLOCK))
            engine.first_token(other, 0)
            restored.append(engine.first_token(mine, NUM_LOADED * BLOCK))
    ledger = engine.halves["scheduler"].scheduler_side.kv.stats().ledger
    if set(ledger.dropped) - {DropReason.ALREADY_STORED}:
        raise SystemExit(f"not as meant: blocks were dropped: {ledger.dropped}")
    value, hit, computed = (statistics.median(times[1:]) for times in (restored, local, cold))
    return [
        Figure("vllm.ttft_beside_local_hit", SHAPE, value, "s", hit, runs),
        Figure("vllm.ttft_beside_cold", SHAPE, value, "s", computed, runs),
    ]


@contextmanager
def load_times(engine: Engine, found: list[float]) -> Iterator[None]:
    """Of each load, from when the copying thread is given it to when the worker tells that it is over."""
    begun_at = 0.0
    submit = KVTierWorker.submit

    def submitted(worker: KVTierWorker, plan: TransferPlan, written: WriteFence | None) -> None:
        nonlocal begun_at
        if any(job.direction is CopyDirection.RESTORE for job in plan.jobs):
            begun_at = time.perf_counter()
        submit(worker, plan, written)

    def finished(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(finished_req_ids: set[str]) -> Any:
            sent, received = call(finished_req_ids)
            if received:
                found.append(time.perf_counter() - begun_at)
            return sent, received

        return timed

    with (
        mock.patch.object(KVTierWorker, "submit", submitted),
        wrapped(engine.halves["worker"], "get_finished", finished),
    ):
        yield


def measure_example_loads(runs: int) -> list[float]:
    """What vLLM's ExampleConnector takes for the same blocks, read from its files."""
    found: list[float] = []

    def timed(call: Callable[..., Any], context: Any, **kwargs: Any) -> None:
        begun_at = time.perf_counter()
        call(context, **kwargs)
        found.append(time.perf_counter() - begun_at)

    with tempfile.TemporaryDirectory() as directory:
        engine = Engine("ExampleConnector", None, {"shared_storage_path": directory})
        try:
            mine = prompt(0)
            engine.first_token(mine, 0)
            for _ in range(runs + 1):
                engine.scheduler.reset_prefix_cache()
                with wrapped(engine.halves["worker"], "start_load_kv", lambda call: partial(timed, call)):
                    engine.first_token(mine, NUM_LOADED * BLOCK)
        finally:
            engine.close()
    # A step that loads nothing takes microseconds.
    return [seconds for seconds in found if seconds > 1e-4]


def measure_hooks(engine: Engine) -> Figure:
    """In steps that decode for one request."""
    spent = 0.0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            begun_at = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent += time.thread_time() - begun_at

        return timed

    hooks, steps = [], []
    engine.add(prompt(0)[:100], DECODED + 4)
    with steady(), contextlib.ExitStack() as stack:
        for _ in range(4):
            engine.engine.step()  # its prompt, and what is done once
        for half, names in HOOKS.items():
            for name in names:
                stack.enter_context(wrapped(engine.halves[half], name, counted))
        while engine.engine.has_unfinished_requests():
            spent, begun_at = 0.0, time.perf_counter()
            engine.engine.step()
            steps.append(time.perf_counter() - begun_at)
            hooks.append(spent)
    return Figure("vllm.hooks", SHAPE, statistics.median(hooks), "s", statistics.median(steps), len(steps))


def measure_match(runs: int) -> list[Figure]:
    options = {"model": "bench", "settings": {"host.size": "128MiB", "host.slab": "1MiB"}}
    num_blocks = MATCHED_BLOCKS + 100
    first: list[float] = []
    again: list[float] = []
    with SchedulerRig(
        "kvtier_connectors.vllm", "KVTierConnector", options, num_blocks=num_blocks, block_size=16
    ) as rig:
        space, connector = rig.connector.scheduler_side.space, rig.connector
        chance = random.Random(0)
        tokens = [chance.randrange(30_000) for _ in range(MATCHED_BLOCKS * 16 + 1)]

        def request(name: str) -> Any:
            params = SamplingParams(max_tokens=1)
            return Request(
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=params,
                pooling_params=None,
                block_hasher=rig.hasher,
            )

        with space.owner("bench") as owner:
            parent = None
            for digest in request("stored").block_hashes:
                space.commit([space.reserve(digest, parent, owner)])
                parent = digest
        for run in range(runs + 1):
            asked = request(f"r{run}")
            connector.on_new_request(asked)
            with steady():
                for times in (first, again):
                    begun_at = time.perf_counter()
                    found = connector.get_num_new_matched_tokens(asked, 0)
                    times.append(time.perf_counter() - begun_at)
                    if found != (MATCHED_BLOCKS * 16, True):
                        raise SystemExit(f"not as meant: {found} matched")
            connector.request_finished(asked, [])
    shape = f"{MATCHED_BLOCKS} blocks"
    return [
        Figure("vllm.match_first", shape, statistics.median(first[1:]), "s", 2e-3, runs),
        Figure("vllm.match_again", shape, statistics.median(again[1:]), "s", 1e-4, runs),
    ]


def measure(runs: int) -> list[Figure]:
    figures = measure_match(runs)
    loads: list[float] = []
    engine = Engine("KVTierConnector", "kvtier_connectors.vllm", {"model": "bench", "settings": {"host.size": "1GiB"}})
    try:
        figures += measure_first_tokens(engine, runs, loads)
        figures.append(measure_hooks(engine))
    finally:
        engine.close()
    example = measure_example_loads(runs)
    if min(len(loads), len(example)) < runs:
        raise SystemExit(f"not as meant: {len(loads)} loads of ours and {len(example)} of the other were seen")
    load = Figure("vllm.load", SHAPE, statistics.median(loads[1:]), "s", statistics.median(example[1:]), runs)
    return [*figures, load]


if __name__ == "__main__":
    command.run("vllm_restore", __doc__, measure, BARS, runs=7, unit="ms")
