"""All figures of the disk tier, in a directory that is made for them and removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtier.layout import KVLayout
from kvtier_connectors.bench.disk import MAX_SLOW_RUNS, DiskSizes, disk_copy_figures
from kvtier_connectors.bench.disk_age import aged_figures, restart_figure
from kvtier_connectors.bench.disk_faults import STALLED
from kvtier_connectors.bench.faults import FaultRow, FaultSizes, fault_rows, quiet
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.bench.ground import Ground
from kvtier_connectors.bench.opening import scratch_directory
from kvtier_connectors.bench.step_time import STEP_LIMIT_MS, measure_sick_time

__all__ = ["disk_figures", "fault_report"]

FAULTS_NEED_BYTES = 2 << 30


def disk_figures(parent: Path | None, shape: str, layout: KVLayout, runs: int) -> Iterator[Figure]:
    """Each as soon as it is measured. ConfigError where there is no room."""
    sizes = DiskSizes()
    with scratch_directory(parent, sizes.needed_bytes) as directory:
        yield from disk_copy_figures(directory, shape, layout, runs, sizes)
    with scratch_directory(parent, sizes.needed_bytes) as directory:
        yield restart_figure(directory, shape, layout, min(runs, MAX_SLOW_RUNS), sizes)
    with scratch_directory(parent, sizes.needed_bytes) as directory:
        yield from aged_figures(directory, shape, layout, sizes)


def fault_report(parent: Path | None) -> tuple[Iterator[FaultRow], Iterator[Figure]]:
    """The rows of all faults, then the one figure."""
    sizes = FaultSizes()

    def rows() -> Iterator[FaultRow]:
        with quiet(), scratch_directory(parent, FAULTS_NEED_BYTES) as directory:
            yield from fault_rows("disk", directory, sizes)

    def figures() -> Iterator[Figure]:
        with quiet(), scratch_directory(parent, FAULTS_NEED_BYTES) as directory:
            sick, well = Ground(directory / "stalled", None), Ground(directory / "control", None)
            found = measure_sick_time(sick, well, STALLED, sizes.steps, timeout_s=5.0, max_wait_s=0.5)
            yield Figure("faults.step_time", "blocks of 32 KiB", found.effect_ms, "ms", STEP_LIMIT_MS, found.steps)

    return rows(), figures()
