"""A figure, and how value and limit are measured beside each other."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Figure", "Timed", "measure_pairs", "seconds_of", "steady"]

Timed = Callable[[], float]
"""Does the work once and returns what it measured, in the figure's unit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number beside what bounds it."""

    figure: str
    shape: str
    value: float
    unit: str
    limit: float
    runs: int

    @property
    def ratio(self) -> float:
        return self.value / self.limit

    def as_json(self) -> dict[str, Any]:
        """The object of one JSON line."""
        return {
            "figure": self.figure,
            "shape": self.shape,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "ratio": self.ratio,
            "runs": self.runs,
        }


@contextmanager
def steady() -> Iterator[None]:
    """Keep the garbage collector out of a measurement."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_pairs(figure: str, shape: str, unit: str, value: Timed, limit: Timed, runs: int) -> Figure:
    """Medians of `runs` values and limits, measured in turn so that a machine that slows down slows both.

    Every second pair is measured in the other order. The first pair warms up and is not counted.
    """
    values: list[float] = []
    limits: list[float] = []
    with steady():
        value()
        limit()
        for run in range(runs):
            if run % 2:
                limits.append(limit())
                values.append(value())
            else:
                values.append(value())
                limits.append(limit())
    return Figure(figure, shape, statistics.median(values), unit, statistics.median(limits), runs)
