"""All rows and figures of harm to Redis, alone or below a disk, at servers that are started for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvtier_connectors.bench.fault_case import FaultCase
from kvtier_connectors.bench.faults import BACK_TIMEOUT_S, FaultRow, FaultSizes, fault_rows, quiet
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.bench.ground import Ground, alone
from kvtier_connectors.bench.opening import scratch_directory
from kvtier_connectors.bench.redis_faults import FAILING_OVER, KILLED, STOPPED
from kvtier_connectors.bench.step_time import STEP_LIMIT_MS, SickTime, measure_sick_time

__all__ = ["NEEDED_BYTES", "redis_fault_report"]

NEEDED_BYTES = 2 << 30
TIMEOUT_S = 1.0  # as redis.timeout_s has it
MAX_WAIT_S = 30.0  # as restore.max_wait_s has it: what ends a wait is that the server is found sick
MAX_INTERVALS = 2.0
MIN_INTERVAL_S = 1.0  # of a server that never was left alone: the shortest
SHAPE = "blocks of 32 KiB"
# The last: by what the steps are divided. A fail-over takes two seconds, and should be a good part of the time.
FIGURES = (("stopped", STOPPED, 1), ("killed", KILLED, 1), ("failing_over", FAILING_OVER, 5))


def redis_fault_report(
    parent: Path | None, tier: str, sizes: FaultSizes
) -> tuple[Iterator[FaultRow], Iterator[Figure]]:
    """The rows of all faults of `tier`, which is redis or all; then the figures, which are of Redis alone."""

    def rows() -> Iterator[FaultRow]:
        with quiet(), scratch_directory(parent, NEEDED_BYTES) as directory:
            yield from fault_rows(tier, directory, sizes)

    def figures() -> Iterator[Figure]:
        with quiet():
            for name, case, share in FIGURES:
                yield from _figures_of(name, case, sizes.steps // share)

    return rows(), figures()


def _figures_of(name: str, case: FaultCase, num_steps: int) -> Iterator[Figure]:
    with ExitStack() as stack:
        assert case.redis is not None
        sick, well = (Ground(None, stack.enter_context(kind())) for kind in (case.redis, alone))
        found = measure_sick_time(sick, well, case, num_steps, timeout_s=TIMEOUT_S, max_wait_s=MAX_WAIT_S)
    yield Figure(f"faults.redis.step_time.{name}", SHAPE, found.effect_ms, "ms", STEP_LIMIT_MS, found.steps)
    yield _waited(name, found)
    yield Figure(f"faults.redis.unhindered.{name}", SHAPE, found.unhindered, "", 1.0, len(found.waits))
    interval_s = max(MIN_INTERVAL_S, found.probe_interval_s)
    back_s = BACK_TIMEOUT_S if found.back_s is None else found.back_s
    yield Figure(f"faults.redis.back.{name}", SHAPE, back_s / interval_s, "intervals", MAX_INTERVALS, 1)


def _waited(name: str, found: SickTime) -> Figure:
    longest_s = max(wait.seconds for wait in found.waits)
    unit_s = TIMEOUT_S + found.longest_step_s
    return Figure(f"faults.redis.waited.{name}", SHAPE, longest_s / unit_s, "timeouts", 1.0, len(found.waits))
