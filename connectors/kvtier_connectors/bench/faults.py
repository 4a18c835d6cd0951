"""Faults of the disk tier, one after the other, under traffic: what each costs, and when all is well again."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import KVTierError
from kvtier_connectors.bench.dying import command_of
from kvtier_connectors.bench.fault_list import FAULTS, NO_FAULT, FaultCase, small_file_system
from kvtier_connectors.bench.traffic import CHAIN_BLOCKS, FaultRig, SickFiles

__all__ = ["FaultRow", "FaultSizes", "fault_rows", "quiet"]

FLUSH_TIMEOUT_S = 10.0
SHORT_FLUSH_S = 0.2
BACK_TIMEOUT_S = 30.0
PERCENTILE = 99.0


@dataclass(frozen=True, slots=True)
class FaultSizes:
    """How much traffic a fault meets."""

    num_chains: int = 48
    """Conversations of 8 blocks that are on the disk when the fault comes, and as many that come during it."""
    steps: int = 20_000
    """Of each of the two engines whose step times are compared."""


@dataclass(frozen=True, slots=True)
class FaultRow:
    """What one fault did."""

    fault: str
    injected: str
    lost_blocks: int
    asked_blocks: int
    """Blocks that a prompt asked for again, during the fault and after it; `lost_blocks` of them were recomputed."""
    recomputed_requests: int
    asked_requests: int
    noticed_s: float | None
    """From the fault until a counter told of it; None when there was nothing to tell."""
    back_s: float | None
    """From its end until a new block went to the disk and came back; None when it does not end."""
    wrong_blocks: int
    """That landed with other bytes."""
    step_effect_ms: float
    """99th percentile of the connector's time a step, less that of the run without a fault."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def quiet() -> Iterator[None]:
    """What kvtier logs meanwhile is made into text, which costs what it costs, and goes nowhere."""

    class Nowhere(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            self.format(record)

    logger, handler = logging.getLogger("kvtier"), Nowhere()
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)


def fault_rows(directory: Path, sizes: FaultSizes) -> Iterator[FaultRow]:
    """Every fault, each on a tier of its own; first a run without one."""
    none, control_ms = _run(NO_FAULT, directory / "none", sizes, None)
    yield none
    yield _kill(directory / "killed", sizes, control_ms)
    for number, case in enumerate(FAULTS):
        path = directory / f"fault-{number}"
        if case.on_small_disk:
            with small_file_system(path):
                yield _run(case, path / "tier", sizes, control_ms)[0]
        else:
            yield _run(case, path, sizes, control_ms)[0]


def _run(case: FaultCase, path: Path, sizes: FaultSizes, control_ms: float | None) -> tuple[FaultRow, float]:
    """The row, and the percentile of the time a step."""
    files = SickFiles()
    rig = FaultRig(path, files)
    try:
        old = [rig.chain(number) for number in range(sizes.num_chains)]
        new = [rig.chain(number) for number in range(sizes.num_chains, 2 * sizes.num_chains)]
        rig.run(old)
        rig.store.flush(FLUSH_TIMEOUT_S)
        known = set(rig.traffic.known)
        if case.needs_restart:
            rig.close()
            began = time.monotonic()
            case.begin(rig, files)
            rig = FaultRig(path, files)
            rig.traffic.known = known
            watch = _Watch(rig, began, is_fresh=True)
        else:
            rig.forget_host()
            rig.traffic.step_seconds.clear()
            watch = _Watch(rig, time.monotonic())
            case.begin(rig, files)
        mixed = [chain for pair in zip(old, new, strict=True) for chain in pair]
        rig.run(mixed, watch.look)
        _last(rig, watch, case.lasts_s)
        rig.store.flush(SHORT_FLUSH_S)
        watch.look()
        step_ms = 1e3 * float(np.percentile(rig.traffic.step_seconds, PERCENTILE))
        if not case.is_endless:
            case.end(rig, files)
        back_s = None if case.is_endless else _until_back(rig)
        rig.forget_host()
        rig.run(old + new)
        traffic = rig.traffic
        row = FaultRow(
            case.name,
            case.injected,
            traffic.lost,
            traffic.asked,
            traffic.recomputed,
            traffic.requests,
            watch.noticed_s,
            back_s,
            traffic.wrong,
            step_ms - (step_ms if control_ms is None else control_ms),
        )
        return row, step_ms
    finally:
        files.heal()
        rig.close()


class _Watch:
    """Says when the tier's counters first told of trouble."""

    def __init__(self, rig: FaultRig, began: float, *, is_fresh: bool = False) -> None:
        self._rig = rig
        self._began = began
        self._before = None if is_fresh else self._signs()
        self.noticed_s: float | None = None
        self.look()

    def look(self) -> None:
        if self.noticed_s is None:
            signs = self._signs()
            if any(signs) if self._before is None else signs != self._before:
                self.noticed_s = time.monotonic() - self._began

    def _signs(self) -> tuple[object, ...]:
        disk = self._rig.disk
        told = [*disk.reads.items(), *disk.writes.items()]
        bad = sum(count for name, count in told if name in ("error", "damaged", "full"))
        buffered = sum(mode == "buffered" for mode in disk.modes.values())
        fallbacks = sum(self._rig.store.stats().fallbacks.values())
        errors = sum(disk.errors.values())
        return (
            bad,
            disk.damaged_blocks,
            disk.evicted_blocks,
            disk.breaker_opened,
            disk.reclaimed_files,
            len(disk.read_only),
            buffered,
            fallbacks,
            errors,
        )


def _last(rig: FaultRig, watch: _Watch, seconds: float) -> None:
    """Go on stepping for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        rig.traffic.step()
        watch.look()


def _until_back(rig: FaultRig) -> float | None:
    """Seconds until a new conversation goes to the disk and comes back whole; None when it does not.

    What these requests lose, waiting for that, is not counted.
    """
    traffic = rig.traffic
    counts = traffic.asked, traffic.lost, traffic.recomputed, traffic.requests
    began = time.monotonic()
    number = 1 << 20
    seconds = None
    while seconds is None and time.monotonic() - began < BACK_TIMEOUT_S:
        number += 1
        digests = rig.chain(number)
        rig.run([digests])
        rig.store.flush(SHORT_FLUSH_S)
        rig.forget_host()
        landed = rig.engine.connector.scheduler.stats().landed_blocks
        rig.run([digests])
        if rig.engine.connector.scheduler.stats().landed_blocks == landed + CHAIN_BLOCKS:
            seconds = time.monotonic() - began
    traffic.asked, traffic.lost, traffic.recomputed, traffic.requests = counts
    return seconds


def _kill(path: Path, sizes: FaultSizes, control_ms: float) -> FaultRow:
    """A process that stores is killed; what it had said was written is asked for in this one."""
    command = command_of(task="serve", directory=str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None
            written = 0
            while written < sizes.num_chains:
                line = child.stdout.readline()
                if not line:
                    raise KVTierError("the process that stores blocks ended by itself")
                written = json.loads(line)["chains"]
            time.sleep(0.003)  # into the next stores
        finally:
            child.send_signal(signal.SIGKILL)
        for line in child.stdout:  # what it told before it died
            written = json.loads(line)["chains"] if line.endswith("\n") else written
    began = time.monotonic()
    with FaultRig(path) as rig:
        opened_s = time.monotonic() - began
        chains = [rig.chain(number) for number in range(written)]
        rig.traffic.known = {digest for digests in chains for digest in digests}
        rig.run(chains)
        traffic = rig.traffic
        step_ms = 1e3 * float(np.percentile(traffic.step_seconds, PERCENTILE))
        back_s = opened_s + (_until_back(rig) or BACK_TIMEOUT_S)
        return FaultRow(
            "kill -9",
            "SIGKILL of a process amid its stores",
            traffic.lost,
            traffic.asked,
            traffic.recomputed,
            traffic.requests,
            opened_s,
            back_s,
            traffic.wrong,
            step_ms - control_ms,
        )
