"""What a step of an engine costs that has nothing to copy."""

from __future__ import annotations

import time

from kvtier.config import HostSettings, Settings
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.store import Store
from kvtier_connectors.bench.figures import Figure, steady
from kvtier_connectors.contract import WRITTEN, StepDemand
from kvtier_connectors.selftest.toy_engine import ToyEngine

__all__ = ["idle_figure"]

LIMIT_US = 50.0
STEPS = 2_000
PAGE_BYTES = 4096
CHAIN_BLOCKS = 100
STEP_BLOCKS = 512  # a step of 8,192 tokens
# The smallest block there is: what counts here is how many there are.
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bfloat16", block_tokens=16)


def idle_figure(shape: str, runs: int, num_blocks: int) -> Figure:
    """Microseconds that plan, submit, poll and complete take on the engine's thread. Its limit is a bar.

    The pool is full of cached blocks. Those within the danger depth are stored; all others are dirty, so that the
    table of the on-evict policy is as large as it gets.
    """
    slab = HostSettings().slab
    settings = Settings(host=HostSettings(size=-(-num_blocks * PAGE_BYTES // slab) * slab))
    namespace = Namespace("kvtier bench", "", LAYOUT, "all", Shard(0, 1))
    depth = min(STEP_BLOCKS, num_blocks)
    # The slots of what is stored are touched by storing it; the rest of the pool is not needed.
    with ToyEngine(Store(settings, touch=False), namespace, num_blocks, depth) as engine:
        for start in range(0, num_blocks, CHAIN_BLOCKS):
            numbers = range(start, min(start + CHAIN_BLOCKS, num_blocks))
            digests = [BlockDigest(number.to_bytes(32, "little")) for number in numbers]
            request_id, ids = engine.begin_chain(digests, len(digests))
            engine.end_chain(request_id, 0, ids, len(ids))
        num_due = engine.connector.scheduler.stats().ledger.due
        assert num_due < depth + CHAIN_BLOCKS, f"{num_due} blocks were stored; most were to stay dirty"
        scheduler, worker = engine.connector.scheduler, engine.connector.worker
        demand = StepDemand(0, depth, 0)

        def step() -> None:
            plan = scheduler.plan_step((), demand)
            worker.submit(plan, WRITTEN)
            scheduler.complete(worker.poll())

        times = []
        with steady():
            for _ in range(runs + 1):
                began = time.perf_counter()
                for _ in range(STEPS):
                    step()
                times.append((time.perf_counter() - began) / STEPS * 1e6)
        scheduler.reset()  # or closing would store what is dirty, for seconds, for nobody
    warm = sorted(times[1:])
    return Figure("connector.idle_step", shape, warm[len(warm) // 2], "us", LIMIT_US, runs)
