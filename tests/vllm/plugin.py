"""The plug-in under the scheduler rig: prompts, its parts, and what must hold when all is quiet."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.metrics import StatsSnapshot
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.vllm.worker import WorkerSide
from tests.vllm.scheduler_rig import SchedulerRig

__all__ = [
    "BLOCK",
    "MODULE",
    "NAME",
    "OpenRig",
    "fail_once",
    "fill",
    "half",
    "owner_of",
    "prompt",
    "stats",
    "verify_quiet",
    "worker",
]

OpenRig = Callable[..., SchedulerRig]
BLOCK = 32
SOON_S = 10.0
MODULE, NAME = "kvtier_connectors.vllm", "KVTierConnector"


def prompt(start: int, num_blocks: int, extra: int = 8) -> list[int]:
    return list(range(start, start + num_blocks * BLOCK + extra))


def half(rig: SchedulerRig) -> KVTierScheduler:
    found = rig.connector.scheduler_side.kv
    assert isinstance(found, KVTierScheduler)
    return found


def worker(rig: SchedulerRig) -> WorkerSide:
    assert rig.worker is not None
    found = rig.worker.worker_side
    assert isinstance(found, WorkerSide)
    return found


def stats(rig: SchedulerRig) -> StatsSnapshot:
    found = rig.connector.scheduler_side.store.stats()
    assert isinstance(found, StatsSnapshot)
    return found


def verify_quiet(rig: SchedulerRig) -> None:
    """No request is left, and nothing of ours."""
    rig.run()
    rig.check_nothing_is_held()
    half(rig).check_integrity()
    side = rig.connector.scheduler_side
    assert not any((side._live, side._waiting, side._promised, side._computing, side._loads, side._jobs, side._landed))
    assert half(rig).stats().ledger.pending == 0
    deadline = time.monotonic() + SOON_S
    while stats(rig).leases and time.monotonic() < deadline:  # a disk's threads still read or write
        time.sleep(0.001)
    assert stats(rig).leases == 0
    assert not rig.connector._errors
    assert not rig.worker._errors


def fill(rig: SchedulerRig, name: str = "") -> None:
    """Have a prompt of 16 blocks computed, and pushed out of the pool by others. name: what theirs begin with."""
    rig.add_request(f"{name}a", prompt(100, 16), 2)
    rig.run()
    for number in range(3):
        rig.add_request(f"{name}other {number}", prompt(10_000 * (number + 1), 16), 2)
        rig.run()


def owner_of(found: Any, where: str) -> tuple[object, str]:
    """Whose method `a.b.name` is, and its name."""
    *path, name = where.split(".")
    for part in path:
        found = getattr(found, part)
    return found, name


def fail_once(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, calls = getattr(owner, name), itertools.count()

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) == 0:
            raise RuntimeError(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
