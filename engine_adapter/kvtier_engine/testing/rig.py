"""A connector, or a whole engine, under control: tiny pools, copies that run when told, every output held against the
oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from kvtier.clock import Clock
from kvtier.config import MemorySnapshot, Settings, load_settings
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Extras, Namespace, Shard, digest_tokens
from kvtier.metrics import LedgerSnapshot
from kvtier.pool import Owner
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier_connectors.contract import (
    NO_OPTIONS,
    WRITTEN,
    CopyResult,
    KVOptions,
    RequestInfo,
    RestoreOutcome,
    RestorePoll,
    StepDemand,
    TransferPlan,
    WriteFence,
)
from kvtier_connectors.counts import ConnectorStats
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.worker import KVTierWorker
from kvtier_engine.beside import ConnectorOpener
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.config import EngineConfig
from kvtier_engine.engine import NO_EXTRAS, Engine, StepResult
from kvtier_engine.request import FinishReason, RequestOutput
from kvtier_engine.runner import ModelRunner
from kvtier_engine.sampling import Sampler, SamplingParams
from kvtier_engine.testing.fake_model import FakeRunner, FakeSampler, expected_tokens
from kvtier_kernels import BlockPlanes

__all__ = ["ConnectorRig", "EngineRig", "namespace_of", "tiny_settings", "tiny_store"]

PAGE_BYTES = 4096
ENOUGH_MEMORY = MemorySnapshot(total_bytes=1 << 40, available_bytes=1 << 40)


def tiny_settings(host_blocks: int, policy: str = "on_evict", **overrides: object) -> Settings:
    """A host pool of `host_blocks` blocks of at most one page. Overrides are dotted, with `__` for the dot."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    sizes = {"host.size": host_blocks * PAGE_BYTES, "host.slab": PAGE_BYTES, "store.policy": policy}
    return load_settings(env={}, overrides=sizes | dotted)


def tiny_store(settings: Settings, clock: Clock | None = None) -> Store:
    """A store whose size does not depend on the machine, and without a thread of its own."""
    return Store(settings, memory=ENOUGH_MEMORY, touch=False, clock=clock)


def namespace_of(runner: ModelRunner, model: str = "fake") -> Namespace:
    return Namespace(model=model, revision="", layout=runner.layout, group="all", shard=Shard(0, 1))


class ConnectorRig:
    """Both halves of a connector over a real block pool; the caller plays the engine.

    Each published block is filled with its own digest, so that what a slot or a GPU block holds can be told from its
    bytes. Requests are named; their prompt's tokens come from `tokens`.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        host_blocks: int = 16,
        policy: str = "on_evict",
        *,
        block_tokens: int = 4,
        executor: Executor | None = None,
        make_store: Callable[[Settings], Store] = tiny_store,
        clock: FakeClock | None = None,
        num_ranks: int = 1,
        **overrides: object,
    ) -> None:
        self.clock = clock or FakeClock()
        self.runner = FakeRunner(num_blocks, block_tokens)
        self.block_tokens = block_tokens
        self.pool = BlockPool(num_blocks)
        self.store = make_store(tiny_settings(host_blocks, policy, **overrides))
        self.space = self.store.open_space(namespace_of(self.runner))
        self.scheduler = KVTierScheduler(self.store, self.space, self.pool, num_ranks=num_ranks, clock=self.clock)
        self.executor = ManualExecutor()
        planes = BlockPlanes.from_arrays(self.runner.planes())
        self.worker = KVTierWorker(planes, self.space.buffer, executor=self.executor if executor is None else executor)
        self.digests: dict[str, Sequence[BlockDigest]] = {}

    # ---- playing the engine --------------------------------------------------------------------------------------

    def start(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        options: KVOptions = NO_OPTIONS,
        num_local_blocks: int = 0,
        num_tokens: int = 0,
    ) -> Sequence[BlockDigest]:
        digests = digest_tokens(tokens, self.block_tokens, NO_EXTRAS)
        self.digests[request_id] = digests
        self.scheduler.start_request(RequestInfo(request_id, digests, options, num_local_blocks, num_tokens))
        return digests

    def compute(self, request_id: str, tokens: Sequence[int]) -> list[int]:
        """A request whose blocks were all computed and published; it still references them."""
        digests = self.start(request_id, tokens)
        blocks = self.pool.allocate(len(digests))
        assert blocks is not None, "the pool is too small for this story"
        self.write(blocks, digests)
        self.publish(request_id, 0, blocks)
        return blocks

    def write(self, blocks: Sequence[int], digests: Sequence[BlockDigest]) -> None:
        for block_id, digest in zip(blocks, digests, strict=True):
            self.runner.pool[:, block_id] = int.from_bytes(digest[:7], "little")

    def publish(self, request_id: str, first_block: int, blocks: Sequence[int]) -> None:
        digests = self.digests[request_id]
        for index, block_id in enumerate(blocks, first_block):
            previous = None if index == first_block else blocks[index - first_block - 1]
            root = digests[first_block - 1] if previous is None and first_block else b"root"
            self.pool.publish(block_id, digests[index], root, previous, (index,))
        self.scheduler.publish(request_id, first_block, blocks)

    def finish(self, request_id: str, blocks: Sequence[int]) -> None:
        self.pool.release(blocks)
        self.scheduler.finish_request(request_id)

    def plan(
        self, step_budget: int = 0, *, waiting: int = 0, written: WriteFence | None = WRITTEN, submit: bool = True
    ) -> TransferPlan:
        """One step's plan, handed to the worker."""
        demand = StepDemand(self.pool.take_num_allocated(), step_budget, waiting)
        plan = self.scheduler.plan_step(self.pool.take_reused(), demand)
        if submit:
            self.worker.submit(plan, written)
        self.check_integrity()
        return plan

    def collect(self, results: Sequence[CopyResult] | None = None) -> list[RestoreOutcome]:
        outcomes = self.scheduler.complete(self.worker.poll() if results is None else results)
        self.check_integrity()
        return outcomes

    def poll(self) -> RestorePoll:
        """One step's look at the restores."""
        poll = self.scheduler.poll_restores()
        self.check_integrity()
        return poll

    def copy_all(self) -> list[RestoreOutcome]:
        """Run every queued copy and collect."""
        self.executor.run_all()
        return self.collect()

    def store_all(self, steps: int = 100) -> None:
        """Plan and copy until nothing is due or on its way."""
        for _ in range(steps):
            plan = self.plan(self.pool.num_blocks)
            self.copy_all()
            if not plan.in_flight:
                return
        raise AssertionError(f"an idle engine still stores after {steps} steps")

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> ConnectorStats:
        return self.scheduler.stats()

    @property
    def ledger(self) -> LedgerSnapshot:
        return self.stats.ledger

    @property
    def dropped(self) -> dict[DropReason, int]:
        return dict(self.ledger.dropped)

    def held(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Which blocks a lookup would find by themselves."""
        return [self.store.host.committed_run(self.space.digest, [digest]) == 1 for digest in digests]

    def verify_stored(self, digests: Sequence[BlockDigest]) -> None:
        """Every one of these is in the host tier with its own bytes."""
        with self.space.owner("verification") as owner:
            for digest in digests:
                leases = self.space.lease([digest], owner)
                assert leases, "a block that should be stored is not"
                self._verify(leases[0].view[: self.space.block_bytes].tobytes(), digest)

    def verify_landed(self, blocks: Sequence[int], digests: Sequence[BlockDigest]) -> None:
        for block_id, digest in zip(blocks, digests, strict=True):
            self._verify(self.runner.pool[:, block_id].tobytes(), digest)

    def pins(self) -> list[int]:
        return [block for block in range(self.pool.num_blocks) if self.pool.pins(block)]

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.scheduler.check_integrity()

    def close(self) -> None:
        self.scheduler.complete(self.worker.close(1.0))
        self.scheduler.close()
        self.store.close()

    @staticmethod
    def _verify(data: bytes, digest: BlockDigest) -> None:
        values = np.frombuffer(data, np.int64)
        assert (values == int.from_bytes(digest[:7], "little")).all(), "a block holds another block's bytes"


class EngineRig:
    """A real engine over the fake model. Copies run when the test says so, unless it gives an executor.

    Every step is followed by `check_integrity`, and every output is compared with the oracle as it comes.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        host_blocks: int = 64,
        policy: str = "on_evict",
        *,
        block_tokens: int = 4,
        max_num_seqs: int = 4,
        max_batch_tokens: int = 64,
        max_model_len: int | None = None,
        executor: Executor | None = None,
        store: Store | None = None,
        model: str = "fake",
        make_store: Callable[[Settings], Store] | None = None,
        kvtier: bool = True,
        clock: Clock | None = None,
        eos_token_ids: Sequence[int] = (),
        runner: FakeRunner | None = None,
        engine: Mapping[str, Any] | None = None,
        open_connector: ConnectorOpener | None = None,
        **overrides: object,
    ) -> None:
        """engine: fields of EngineConfig beside those that have a name here. open_connector: what stands in for kvtier,
        with `kvtier=False`. overrides: settings, dotted, with `__` for the dot."""
        self.runner = runner or FakeRunner(num_blocks, block_tokens)
        self.executor = executor if isinstance(executor, ManualExecutor) else ManualExecutor()
        self._is_manual = executor is None
        settings = tiny_settings(host_blocks, policy, **overrides)
        clock = clock or FakeClock()
        make_store = make_store or (lambda settings: tiny_store(settings, clock))
        self._own_store = make_store(settings) if store is None and kvtier else None
        self.store = store or self._own_store
        try:
            self.engine = Engine(
                self.runner,
                namespace_of(self.runner, model),
                EngineConfig(max_num_seqs, max_batch_tokens, max_model_len, **(engine or {})),
                settings if kvtier else None,
                eos_token_ids=eos_token_ids,
                store=self.store,
                executor=self.executor if executor is None else executor,
                clock=clock,
                make_sampler=cast("Callable[[SamplingParams], Sampler]", FakeSampler),
                open_connector=open_connector,
            )
        except BaseException:
            if self._own_store is not None:
                self._own_store.close()
            raise
        self.prompts: dict[str, list[int]] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.last: StepResult | None = None

    # ---- driving -------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int | None = 1,
        *,
        extras: Extras = NO_EXTRAS,
        options: KVOptions = NO_OPTIONS,
        **params: Any,
    ) -> None:
        params_ = SamplingParams(max_tokens=max_tokens, **params)
        self.engine.add_request(request_id, prompt, params_, extras=extras, options=options)
        self.prompts[request_id] = list(prompt)

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.check_integrity()
        for output in result.outputs:
            self._take(output)
        self.last = result
        return result

    def abort(self, request_id: str) -> RequestOutput | None:
        output = self.engine.abort(request_id)
        self.engine.check_integrity()
        if output is not None:
            self._take(output)
        return output

    def run(self, max_steps: int = 1000) -> None:
        """Step, with every copy run at once, until the engine has no work. A hang is a failure."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
            self._run_jobs()
        raise AssertionError(f"{self.engine.num_unfinished} requests and copies are left after {max_steps} steps")

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, **kwargs: Any) -> RequestOutput:
        """Add a request, run until nothing is left, return its last output."""
        request_id = f"generate {len(self.finished)}"
        self.add(request_id, prompt, max_tokens, **kwargs)
        self.run()
        return self.finished[request_id]

    def flush_gpu(self) -> None:
        """Use up the whole GPU pool with a prompt of its own, so that all it held can only be in the tiers."""
        self._num_flushes = getattr(self, "_num_flushes", 0) + 1
        size = self.engine.max_model_len - 1
        self.generate([40_000 + self._num_flushes] * size)

    def close(self) -> None:
        # Copies that only run when told would be waited for in vain.
        self.engine.close(0.0 if self._is_manual else 5.0)
        if self._own_store is not None:
            self._own_store.close()

    def _run_jobs(self) -> None:
        self.executor.run_all()

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> ConnectorStats:
        assert self.engine.connector is not None
        return self.engine.connector.scheduler.stats()

    @property
    def ledger(self) -> LedgerSnapshot:
        return self.stats.ledger

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV the model was asked for so far."""
        return sum(len(item.token_ids) for batch in self.runner.batches for item in batch)

    def owner(self, name: str) -> Owner:
        assert self.store is not None
        return self.store.pool.owner(name)

    def verify_quiet(self) -> None:
        """Nothing runs: every block is free, nothing is pinned, leased or pending."""
        pool = self.engine.pool
        assert not self.engine.has_work
        assert pool.num_free == pool.num_blocks
        assert not any(pool.pins(block_id) or pool.refs(block_id) for block_id in range(pool.num_blocks))
        if self.store is not None:
            assert self.store.stats().leases == 0
            assert self.ledger.pending == 0
            assert self.stats.in_flight_blocks == self.stats.live_requests == 0
        self.engine.check_integrity()

    def _take(self, output: RequestOutput) -> None:
        prompt = self.prompts[output.request_id]
        assert list(output.token_ids) == expected_tokens(prompt, len(output.token_ids)), (
            f"request {output.request_id} put out other tokens than a cold run"
        )
        if output.finish_reason is FinishReason.ERROR:
            assert output.error
        if output.finished:
            self.finished[output.request_id] = output
