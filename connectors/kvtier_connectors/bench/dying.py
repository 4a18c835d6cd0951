"""A process that ends by SIGKILL, as `python -m kvtier_connectors.bench.dying JSON`: for what is found afterwards.

{"task": "fill", ...}: opens a tier, tells on a line of JSON how long that took and what it holds, writes blocks, dies.
{"task": "serve", ...}: stores chains through store and connector for as long as it lives, and tells on a line each time
how many of them have been written.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.keys import Key
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier

__all__ = ["command_of", "key_of"]

FLUSH_TIMEOUT_S = 30.0
CHAINS_A_FLUSH = 4


def command_of(**task: object) -> list[str]:
    """What to start."""
    return [sys.executable, "-P", "-m", "kvtier_connectors.bench.dying", json.dumps(task)]


def key_of(number: int) -> Key:
    return Key(b"kvtier bench".ljust(16, b"\0") + number.to_bytes(32, "little"))


def _fill(directory: str, capacity: int, block_bytes: int, first: int, count: int) -> None:
    began = time.perf_counter()
    tier = DiskTier([Path(directory)], capacity)
    seconds = time.perf_counter() - began
    _tell({"seconds": seconds, "blocks": tier.snapshot().num_blocks})
    block = memoryview(np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8).tobytes())
    at_once = max(1, (8 << 20) // block_bytes)
    for start in range(first, first + count, at_once):
        numbers = range(start, min(start + at_once, first + count))
        outcomes = tier.write([WriteRequest(key_of(number), None, block) for number in numbers])
        assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.ALREADY_STORED}, (
            f"blocks were not written: {outcomes}"
        )
    _die()


def _serve(directory: str) -> None:
    from kvtier_connectors.bench.rig import FaultRig, disk_at

    rig = FaultRig(disk_at(Path(directory)))
    for number in itertools.count(1):
        rig.traffic.start(rig.chain(number - 1))
        rig.traffic.step()
        if number % CHAINS_A_FLUSH == 0:
            rig.traffic.drain()
            assert rig.store.flush(FLUSH_TIMEOUT_S) == 0
            _tell({"chains": number})


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    kind = task.pop("task")
    (_fill if kind == "fill" else _serve)(**task)


if __name__ == "__main__":
    _main()
