"""What a hung disk costs the engine: the time of its steps beside that of steps beside a healthy one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from kvtier_connectors.bench.figures import steady
from kvtier_connectors.bench.traffic import FaultRig, SickFiles, Traffic

__all__ = ["STEP_LIMIT_MS", "StepTime", "measure_step_time"]

STEP_LIMIT_MS = 1.0
PERCENTILE = 99.9
POPULATION = 256  # conversations: four times what host memory holds, a good part of what the disk does
HOST_BYTES = 16 << 20
SLICE_STEPS = 500
STEPS_A_REQUEST = 4
FLUSH_TIMEOUT_S = 30.0


class StepTime:
    """99.9th percentiles of the time that a step spends in hooks, in milliseconds."""

    def __init__(self, stalled: Traffic, control: Traffic) -> None:
        times = [traffic.step_seconds for traffic in (stalled, control)]
        self.steps = min(map(len, times))
        self.stalled_ms, self.control_ms = (1e3 * float(np.percentile(each, PERCENTILE)) for each in times)

    @property
    def effect_ms(self) -> float:
        return self.stalled_ms - self.control_ms


def measure_step_time(directory: Path, num_steps: int) -> StepTime:
    """Two engines with the same traffic step in turn, slice by slice; one's disk hangs, reads and writes, for good.

    Requests come every fourth step, one in eight of a new conversation, the others of one of 256, of which the disk
    holds all and host memory a quarter: what they store and what they want back both go to the disk.
    """
    files = SickFiles()
    stalled = FaultRig(directory / "stalled", files, host_bytes=HOST_BYTES, timeout_s=5.0)
    control = FaultRig(directory / "control", SickFiles(), host_bytes=HOST_BYTES, timeout_s=5.0)
    try:
        for rig in (stalled, control):
            for start in range(0, POPULATION, 16):
                rig.run([rig.chain(number) for number in range(start, start + 16)])
                rig.store.flush(FLUSH_TIMEOUT_S)
            rig.traffic.step_seconds.clear()
        files.stall("read")
        files.stall("write")
        draws = {id(rig): random.Random(0) for rig in (stalled, control)}
        with steady():
            for number in range(-(-num_steps // SLICE_STEPS)):
                for rig in (stalled, control) if number % 2 else (control, stalled):
                    _slice(rig, draws[id(rig)], min(SLICE_STEPS, num_steps))
                    if rig is control:
                        rig.store.flush(FLUSH_TIMEOUT_S)  # so that none of its threads works in the other's slice
        assert not stalled.traffic.wrong + control.traffic.wrong, "blocks landed with other bytes"
        return StepTime(stalled.traffic, control.traffic)
    finally:
        files.heal()
        stalled.close()
        control.close()


def _slice(rig: FaultRig, draw: random.Random, num_steps: int) -> None:
    for step in range(num_steps):
        if step % STEPS_A_REQUEST == 0 and rig.traffic.num_live < 16:
            is_new = draw.random() < 0.125
            rig.traffic.start(rig.chain(draw.randrange(1 << 20) + POPULATION if is_new else draw.randrange(POPULATION)))
        rig.traffic.step()
