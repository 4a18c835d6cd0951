"""Memory beyond the pools while blocks go down and up: a leak or a hidden copy shows here."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import numpy as np

from kvtier.config import HostSettings, Settings
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.store import Store
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.selftest.toy_engine import ToyEngine

__all__ = ["peak_memory_figure"]

MIB = 1 << 20
TOUCH_TIMEOUT_S = 60.0


def peak_memory_figure(shape: str, layout: KVLayout, runs: int, moved_bytes: int) -> Figure:
    """MiB by which resident memory grew at most while `moved_bytes` were stored and restored through a connector.

    The engine's pool and the host pool are touched before; their sizes are the limit.
    """
    total = max(1, -(-moved_bytes // layout.block_bytes))
    num_chains = -(-total // Settings().restore.max_inflight_blocks)
    chain_blocks = -(-total // num_chains)
    num_blocks = chain_blocks * num_chains
    slab = HostSettings().slab
    size = (num_blocks * (layout.block_bytes + 4096) // slab + 2) * slab
    namespace = Namespace("kvtier bench", "", layout, "all", Shard(0, 1))
    with ToyEngine(Store(Settings(host=HostSettings(size=size))), namespace, num_blocks, num_blocks) as engine:
        engine.memory[:] = 1
        engine.store.memory.wait_touched(TOUCH_TIMEOUT_S)
        pools = engine.memory.nbytes + engine.store.pool.usage().reserved_bytes
        before = _reset_peak()
        for _ in range(runs):
            chains = [_digests(number, chain_blocks) for number in range(num_chains)]
            for digests in chains:
                request_id, ids = engine.begin_chain(digests, chain_blocks)
                engine.end_chain(request_id, 0, ids, chain_blocks)
            for digests in chains:
                _restore(engine, digests)
            engine.connector.scheduler.reset()
        peak = _peak()
    return Figure("peak_memory", shape, max(0, peak - before) / MIB, "MiB", pools / MIB, runs)


def _digests(chain: int, count: int) -> list[BlockDigest]:
    seed = np.random.default_rng(chain)
    return [BlockDigest(seed.bytes(32)) for _ in range(count)]


def _restore(engine: ToyEngine, digests: list[BlockDigest]) -> None:
    request_id, ids = engine.begin_chain(digests, len(digests))
    begun = engine.connector.scheduler.admit(request_id, 0, len(digests), ids)
    landed = sum(outcome.num_landed for outcome in engine.settle())
    assert begun == landed == len(digests), f"{landed} of {len(digests)} blocks were restored"
    engine.end_chain(request_id, 0, ids, landed)


def _reset_peak() -> int:
    """Resident bytes now, from which on the kernel keeps the peak anew; where it cannot, the peak so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
