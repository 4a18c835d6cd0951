"""All rows and figures of harm to a remote tier, at servers that are started for it: Redis, alone or below a disk, and
kvtier-server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvtier_connectors.bench import redis_faults, server_faults
from kvtier_connectors.bench.fault_case import FaultCase
from kvtier_connectors.bench.faults import BACK_TIMEOUT_S, FaultRow, FaultSizes, fault_rows, quiet, seconds_until_back
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.bench.ground import Ground, alone, in_memory, over_disk
from kvtier_connectors.bench.opening import scratch_directory
from kvtier_connectors.bench.step_time import STEP_LIMIT_MS, SickTime, measure_sick_time

__all__ = ["NEEDED_BYTES", "remote_fault_report"]

NEEDED_BYTES = 2 << 30
TIMEOUT_S = 1.0  # as redis.timeout_s and server.timeout_s have it
MAX_WAIT_S = 30.0  # as restore.max_wait_s has it: what ends a wait is that the server is found sick
MAX_INTERVALS = 2.0
MIN_INTERVAL_S = 1.0  # of a server that never was left alone: the shortest
FLUSH_TIMEOUT_S = 30.0
SHAPE = "blocks of 32 KiB"
# The last of each: by what the steps are divided. A fail-over takes two seconds, and should be a good part of the time.
REDIS_FIGURES = (
    ("stopped", redis_faults.STOPPED, 1),
    ("killed", redis_faults.KILLED, 1),
    ("failing_over", redis_faults.FAILING_OVER, 5),
)
SERVER_FIGURES = (
    ("stopped", server_faults.STOPPED, 1),
    ("killed", server_faults.KILLED, 1),
    ("restarting", server_faults.RESTARTING, 1),
)


def remote_fault_report(
    parent: Path | None, tier: str, sizes: FaultSizes
) -> tuple[Iterator[FaultRow], Iterator[Figure]]:
    """The rows of all faults of `tier`, which is redis, server, or all: disk and Redis; then the figures, which are of
    the remote tier alone."""

    def rows() -> Iterator[FaultRow]:
        with quiet(), scratch_directory(parent, NEEDED_BYTES) as directory:
            yield from fault_rows(tier, directory, sizes)

    def figures() -> Iterator[Figure]:
        with quiet():
            for name, case, share in SERVER_FIGURES if tier == "server" else REDIS_FIGURES:
                yield from _figures_of(name, case, sizes.steps // share)
            if tier == "server":
                yield _warm(sizes)

    return rows(), figures()


def _figures_of(name: str, case: FaultCase, num_steps: int) -> Iterator[Figure]:
    with ExitStack() as stack:
        sick, well = (_ground(stack, each, case.tier) for each in (case, None))
        found = measure_sick_time(sick, well, case, num_steps, timeout_s=TIMEOUT_S, max_wait_s=MAX_WAIT_S)
    begins = f"faults.{case.tier}"
    yield Figure(f"{begins}.step_time.{name}", SHAPE, found.effect_ms, "ms", STEP_LIMIT_MS, found.steps)
    yield _waited(f"{begins}.waited.{name}", found)
    yield Figure(f"{begins}.unhindered.{name}", SHAPE, found.unhindered, "", 1.0, len(found.waits))
    interval_s = max(MIN_INTERVAL_S, found.probe_interval_s)
    back_s = BACK_TIMEOUT_S if found.back_s is None else found.back_s
    yield Figure(f"{begins}.back.{name}", SHAPE, back_s / interval_s, "intervals", MAX_INTERVALS, 1)


def _ground(stack: ExitStack, case: FaultCase | None, tier: str) -> Ground:
    """What a case needs; for None, what a well tier stands on."""
    if tier == "server":
        kind = (case and case.server) or in_memory
        return Ground(None, server=stack.enter_context(kind()))
    return Ground(None, stack.enter_context(((case and case.redis) or alone)()))


def _waited(figure: str, found: SickTime) -> Figure:
    longest_s = max(wait.seconds for wait in found.waits)
    unit_s = TIMEOUT_S + found.longest_step_s
    return Figure(figure, SHAPE, longest_s / unit_s, "timeouts", 1.0, len(found.waits))


def _warm(sizes: FaultSizes) -> Figure:
    """Of the blocks that were on a server's disk when it was killed, those that are had from it afterwards."""
    with ExitStack() as stack:
        ground = Ground(None, server=stack.enter_context(over_disk()))
        rig = stack.enter_context(ground.open(timeout_s=TIMEOUT_S, max_wait_s=MAX_WAIT_S))
        chains = [rig.chain(number) for number in range(sizes.num_chains)]
        rig.run(chains)
        rig.store.flush(FLUSH_TIMEOUT_S)
        assert ground.server.server.flush() == 0, "not all was written to the server's disk"
        ground.server.server.restart()
        assert seconds_until_back(rig, "server") is not None, "the server is not used again"
        rig.forget_host()
        asked, lost = rig.traffic.asked, rig.traffic.lost
        rig.run(chains)
        asked, lost = rig.traffic.asked - asked, rig.traffic.lost - lost
        assert not rig.traffic.wrong, "blocks landed with other bytes"
        rig.verify()
        return Figure("faults.server.warm", SHAPE, 1 - lost / asked, "", 1.0, asked)
