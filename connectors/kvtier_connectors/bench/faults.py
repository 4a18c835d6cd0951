"""Faults of lower tiers, one after the other, under traffic: what each costs, and when all is well again."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.breaker import BreakerState
from kvtier.errors import KVTierError
from kvtier.keys import BlockDigest
from kvtier.lower import LowerTier
from kvtier.metrics import DiskStats, RedisStats, ServerStats
from kvtier_connectors.bench.disk_faults import DISK_FAULTS, small_file_system
from kvtier_connectors.bench.dying import command_of
from kvtier_connectors.bench.fault_case import NO_FAULT, FaultCase
from kvtier_connectors.bench.ground import Ground, RedisGround, ServerGround, alone, in_memory
from kvtier_connectors.bench.redis_faults import REDIS_FAULTS
from kvtier_connectors.bench.rig import FaultRig, disk_at
from kvtier_connectors.bench.server_faults import SERVER_FAULTS
from kvtier_connectors.bench.traffic import CHAIN_BLOCKS

__all__ = ["CASES", "FaultRow", "FaultSizes", "fault_rows", "quiet", "seconds_until_back"]

FLUSH_TIMEOUT_S = 10.0
SHORT_FLUSH_S = 0.2
BACK_TIMEOUT_S = 30.0
PERCENTILE = 99.0
FREE_STEPS = 2  # in which a request learns that it waits for nothing


@dataclass(frozen=True, slots=True)
class FaultSizes:
    """How much traffic a fault meets."""

    num_chains: int = 48
    """Conversations of 8 blocks that are in the lower tiers when the fault comes, and as many that come during it."""
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
    """From its end until a new conversation went to the harmed tier and came back; None when it does not end."""
    wrong_blocks: int
    """That landed with other bytes."""
    step_effect_ms: float
    """99th percentile of the connector's time a step, less that of the run without a fault."""
    waited_s: float = 0.0
    """The longest that one request waited for lower tiers, from the fault on."""
    late_waits: int = 0
    """Requests that waited for more than two steps while a tier was already being left alone; only where there is one
    tier is that a wait for the sick one."""
    probe_interval_s: float | None = None
    """How long the harmed tier was left alone at a time when the fault ended; None where it was not."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Blocks that were not written to the harmed tier, by reason."""

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


CASES = {
    "disk": DISK_FAULTS,
    "redis": REDIS_FAULTS,
    "server": SERVER_FAULTS,
    "all": (*DISK_FAULTS, *REDIS_FAULTS),
}
"""By what a rig has: the disk tier, Redis, a kvtier-server, or the first two."""


def fault_rows(tier: str, directory: Path, sizes: FaultSizes) -> Iterator[FaultRow]:
    """Every fault of these tiers, each on a ground of its own; first a run without one."""
    with _ground(tier, NO_FAULT, directory / "none") as ground:
        none, control_ms = _run(NO_FAULT, ground, sizes, None)
    yield none
    if tier == "disk":
        yield _kill(directory / "killed", sizes, control_ms)
    for number, case in enumerate(CASES[tier]):
        with _ground(tier, case, directory / f"fault-{number}") as ground:
            yield _run(case, ground, sizes, control_ms)[0]


@contextmanager
def _ground(tier: str, case: FaultCase, path: Path) -> Iterator[Ground]:
    with ExitStack() as stack:
        redis: RedisGround | None = None
        server: ServerGround | None = None
        if tier == "server":
            server = stack.enter_context((case.server or in_memory)())
        elif tier != "disk":
            redis = stack.enter_context((case.redis or alone)())
        if case.on_small_disk:
            stack.enter_context(small_file_system(path))
            path = path / "tier"
        ground = Ground(None if tier in ("redis", "server") else path, redis, server)
        stack.callback(ground.heal)
        yield ground


def _run(case: FaultCase, ground: Ground, sizes: FaultSizes, control_ms: float | None) -> tuple[FaultRow, float]:
    """The row, and the percentile of the time a step."""
    rig = ground.open()
    try:
        harmed = case.tier if case is not NO_FAULT else rig.store.lower[0].name
        old = [rig.chain(number) for number in range(sizes.num_chains)]
        new = [rig.chain(number) for number in range(sizes.num_chains, 2 * sizes.num_chains)]
        rig.run(old)
        rig.store.flush(FLUSH_TIMEOUT_S)
        known = set(rig.traffic.known)
        if case.needs_restart:
            rig.close()
            began = time.monotonic()
            case.begin(ground)
            rig = ground.open()
            rig.traffic.known = known
            watch = _Watch(rig, harmed, began, is_fresh=True)
        else:
            rig.forget_host()
            rig.traffic.forget_figures()
            watch = _Watch(rig, harmed, time.monotonic())
            case.begin(ground)
        rig.run([chain for pair in zip(old, new, strict=True) for chain in pair], watch.look)
        _last(rig, watch, case.lasts_s, old if case.is_met_again else [])
        rig.store.flush(SHORT_FLUSH_S)
        watch.look()
        step_ms = 1e3 * float(np.percentile(rig.traffic.step_seconds, PERCENTILE))
        if not case.is_endless:
            case.end(ground)
        back_s = None if case.is_endless else _until_back(rig, harmed)
        rig.forget_host()
        rig.run(old + new)
        rig.verify()
        return _row(case, rig, watch, back_s, step_ms - (step_ms if control_ms is None else control_ms)), step_ms
    finally:
        ground.heal()
        rig.close()


def _row(case: FaultCase, rig: FaultRig, watch: _Watch, back_s: float | None, step_effect_ms: float) -> FaultRow:
    traffic = rig.traffic
    return FaultRow(
        f"{case.tier}: {case.name}" if len(rig.store.lower) > 1 and case is not NO_FAULT else case.name,
        case.injected,
        traffic.lost,
        traffic.asked,
        traffic.recomputed,
        traffic.requests,
        watch.noticed_s,
        back_s,
        traffic.wrong,
        step_effect_ms,
        max((wait.seconds for wait in traffic.waits), default=0.0),
        sum(wait.sick_steps > FREE_STEPS for wait in traffic.waits),
        watch.probe_interval_s,
        {reason.value: count for reason, count in watch.tier.write_behind.ledger.snapshot().dropped.items()},
    )


class _Watch:
    """Says when the tier's counters first told of trouble, and how long it is left alone at a time."""

    def __init__(self, rig: FaultRig, name: str, began: float, *, is_fresh: bool = False) -> None:
        self._rig = rig
        self.tier: LowerTier = rig.tier(name)
        self._began = began
        self._before = None if is_fresh else self._signs()
        self.noticed_s: float | None = None
        self.probe_interval_s: float | None = None
        self.look()

    def look(self) -> None:
        breaker = self.tier.breaker
        if breaker.open_for_s:
            # Just after it opened, or a probe failed, this is the whole cool-down; half open it is the probe's time.
            left_s = breaker.next_probe_in_s if breaker.state is BreakerState.OPEN else 0.0
            self.probe_interval_s = max(self.probe_interval_s or 0.0, left_s)
        if self.noticed_s is None:
            signs = self._signs()
            if any(signs) if self._before is None else signs != self._before:
                self.noticed_s = time.monotonic() - self._began

    def _signs(self) -> tuple[object, ...]:
        stats = self.tier.stats()
        told = [*stats.reads.items(), *stats.writes.items()]
        own: tuple[object, ...] = ()
        if isinstance(stats, DiskStats):
            buffered = sum(mode == "buffered" for mode in stats.modes.values())
            own = stats.damaged_blocks, stats.evicted_blocks, stats.reclaimed_files, len(stats.read_only), buffered
        elif isinstance(stats, RedisStats):
            own = stats.damaged_blocks, stats.disconnects, stats.redirects, sum(stats.refusals.values())
        elif isinstance(stats, ServerStats):
            own = stats.damaged_blocks, stats.disconnects, sum(stats.refusals.values())
        return (
            sum(count for name, count in told if name in ("error", "damaged", "full")),
            stats.breaker_opened,
            sum(self._rig.store.stats().fallbacks.values()),
            sum(stats.errors.values()),
            *own,
        )


def _last(rig: FaultRig, watch: _Watch, seconds: float, again: Sequence[Sequence[BlockDigest]]) -> None:
    """Go on stepping for so long, beside requests for these, of which host memory has nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if again:
            rig.forget_host()
            rig.run(again, watch.look)
        else:
            rig.traffic.step()
            watch.look()


def _until_back(rig: FaultRig, harmed: str) -> float | None:
    """As `seconds_until_back`. What these requests lose and wait, waiting for that, is not counted."""
    traffic = rig.traffic
    counts = traffic.asked, traffic.lost, traffic.recomputed, traffic.requests
    waits = list(traffic.waits)
    seconds = seconds_until_back(rig, harmed)
    traffic.asked, traffic.lost, traffic.recomputed, traffic.requests = counts
    traffic.waits = waits
    return seconds


def seconds_until_back(rig: FaultRig, harmed: str) -> float | None:
    """Seconds until a new conversation goes to the tier that was harmed and comes back whole; None when it does not."""
    began = time.monotonic()
    number = 1 << 20
    while time.monotonic() - began < BACK_TIMEOUT_S:
        number += 1
        digests = rig.chain(number)
        rig.run([digests])
        rig.store.flush(SHORT_FLUSH_S)
        rig.forget_host()
        landed = rig.engine.connector.scheduler.stats().landed_blocks
        is_there = all(_held(rig, harmed, digests))
        rig.run([digests])
        if is_there and rig.engine.connector.scheduler.stats().landed_blocks == landed + CHAIN_BLOCKS:
            return time.monotonic() - began
    return None


def _held(rig: FaultRig, harmed: str, digests: Sequence[BlockDigest]) -> list[bool]:
    return [rig.tier(harmed).holds(rig.namespace, digest) for digest in digests]


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
    with FaultRig(disk_at(path)) as rig:
        opened_s = time.monotonic() - began
        chains = [rig.chain(number) for number in range(written)]
        rig.traffic.known = {digest for digests in chains for digest in digests}
        rig.run(chains)
        traffic = rig.traffic
        step_ms = 1e3 * float(np.percentile(traffic.step_seconds, PERCENTILE))
        back_s = opened_s + (_until_back(rig, "disk") or BACK_TIMEOUT_S)
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
