"""What a sick lower tier costs the engine: the time of its steps beside that of steps beside a healthy one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from kvtier_connectors.bench.fault_case import FaultCase
from kvtier_connectors.bench.faults import FREE_STEPS, seconds_until_back
from kvtier_connectors.bench.figures import steady
from kvtier_connectors.bench.ground import Ground
from kvtier_connectors.bench.rig import FaultRig
from kvtier_connectors.bench.traffic import Traffic, Wait

__all__ = ["STEP_LIMIT_MS", "SickTime", "measure_sick_time"]

STEP_LIMIT_MS = 1.0
PERCENTILE = 99.9
POPULATION = 256  # conversations: four times what host memory holds, a good part of what the lower tier does
HOST_BYTES = 16 << 20
SLICE_STEPS = 500
STEPS_A_REQUEST = 4
FLUSH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SickTime:
    """Of an engine whose tier is sick, beside one whose tier is well."""

    steps: int
    """Of each."""
    sick_ms: float
    """99.9th percentile of the time that a step spends in hooks."""
    control_ms: float
    """As `sick_ms`."""
    waits: tuple[Wait, ...]
    """Of the requests that were admitted beside the sick tier."""
    longest_step_s: float
    """Of its engine, forward included."""
    probe_interval_s: float
    """How long the sick tier was left alone at a time in the end; 0.0 where it was not."""
    back_s: float | None
    """From the end of the fault until a new conversation went there and came back; None when none did."""

    @property
    def effect_ms(self) -> float:
        return self.sick_ms - self.control_ms

    @property
    def unhindered(self) -> float:
        """The share of the requests that waited for no tier that was already being left alone."""
        return sum(wait.sick_steps <= FREE_STEPS for wait in self.waits) / len(self.waits)


def measure_sick_time(
    sick_ground: Ground, well_ground: Ground, case: FaultCase, num_steps: int, *, timeout_s: float, max_wait_s: float
) -> SickTime:
    """Two engines with the same traffic step in turn, slice by slice; the lower tier of one is sick all the time.

    Requests come every fourth step, one in eight of a new conversation, the others of one of 256, of which the tier
    holds all and host memory a quarter: what they store and what they want back both go there.
    """
    grounds = (sick_ground, well_ground)
    rigs: list[FaultRig] = []
    try:
        rigs += (ground.open(timeout_s=timeout_s, max_wait_s=max_wait_s, host_bytes=HOST_BYTES) for ground in grounds)
        sick, control = rigs
        for rig in rigs:
            for start in range(0, POPULATION, 16):
                rig.run([rig.chain(number) for number in range(start, start + 16)])
                rig.store.flush(FLUSH_TIMEOUT_S)
            rig.traffic.forget_figures()
        probe_interval_s = 0.0
        case.begin(sick_ground)
        draws = {id(rig): random.Random(0) for rig in rigs}
        with steady():
            for number in range(-(-num_steps // SLICE_STEPS)):
                for rig in (sick, control) if number % 2 else (control, sick):
                    _slice(rig, draws[id(rig)], min(SLICE_STEPS, num_steps))
                    if rig is control:
                        rig.store.flush(FLUSH_TIMEOUT_S)  # so that none of its threads works in the other's slice
                    else:
                        probe_interval_s = max(probe_interval_s, rig.tier(case.tier).breaker.next_probe_in_s)
        assert not sick.traffic.wrong + control.traffic.wrong, "blocks landed with other bytes"
        found = _percentiles(sick.traffic, control.traffic)
        waits, longest_step_s = tuple(sick.traffic.waits), sick.traffic.longest_step_s
        case.end(sick_ground)
        back_s = seconds_until_back(sick, case.tier)
        sick.verify()
        return SickTime(*found, waits, longest_step_s, probe_interval_s, back_s)
    finally:
        sick_ground.heal()
        for rig in rigs:
            rig.close()


def _percentiles(sick: Traffic, control: Traffic) -> tuple[int, float, float]:
    times = [traffic.step_seconds for traffic in (sick, control)]
    sick_ms, control_ms = (1e3 * float(np.percentile(each, PERCENTILE)) for each in times)
    return min(map(len, times)), sick_ms, control_ms


def _slice(rig: FaultRig, draw: random.Random, num_steps: int) -> None:
    """Ends with no request under way: one that waited while the other engine steps would seem to wait for its tier."""
    for step in range(num_steps):
        if step % STEPS_A_REQUEST == 0 and rig.traffic.num_live < 16:
            is_new = draw.random() < 0.125
            rig.traffic.start(rig.chain(draw.randrange(1 << 20) + POPULATION if is_new else draw.randrange(POPULATION)))
        rig.traffic.step()
    while rig.traffic.num_live:
        rig.traffic.step()
