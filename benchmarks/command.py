"""The command of a benchmark that measures figures, each with a bar: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from kvtier_connectors.bench.figures import Figure

__all__ = ["run"]

UNITS = {"us": 1e6, "ms": 1e3}
MAX_RUNS = 15


def run(
    name: str,
    text: str | None,
    measure: Callable[[int], Sequence[Figure]],
    bars: Mapping[str, tuple[str, float | None]],
    *,
    runs: int,
    unit: str,
) -> None:
    """Measure and print, a line a figure, and exit with 1 where a bar is missed.

    measure: takes how often each measurement is repeated, `runs` unless `--runs` says otherwise. bars: what each figure
    is, in words, and the most that its ratio may be. unit: of UNITS, for figures in seconds.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=int, default=runs, help=f"of each measurement, at most {MAX_RUNS}")
    arguments = parser.parse_args()
    if not 1 <= arguments.runs <= MAX_RUNS:
        parser.error(f"--runs must be from 1 to {MAX_RUNS}, not {arguments.runs}")
    logging.disable(logging.WARNING)
    num_missed = 0
    for figure in measure(arguments.runs):
        what, bar = bars[figure.figure]
        is_missed = bar is not None and figure.ratio > bar
        num_missed += is_missed
        if arguments.json:
            print(json.dumps(figure.as_json() | {"bar": bar}))
            continue
        bound = "" if bar is None else f" (bar {bar:g}{', missed' if is_missed else ''})"
        value, limit = figure.value * UNITS[unit], figure.limit * UNITS[unit]
        print(f"{figure.figure:28} {value:9.3f} {unit} beside {limit:9.3f} {unit}: {figure.ratio:.3f}{bound}  {what}")
    raise SystemExit(1 if num_missed else 0)
