"""Does an engine under a public incident's load ever stop, and what does each of its guards contribute?

Twelve agents with long contexts share four slots, and a GPU pool that holds about four of their contexts; host memory
holds half of them, a disk the rest. An engine that gave its turns to prompts which could not be admitted stood still
there for 240 s, until it was stopped; with the fault mended it did 285 turns in 30 minutes, none stalled, and 18
restores that had waited for 60 s were recomputed. Here the product runs in simulated time
(`kvtier_engine.testing.simulation`): engine, scheduler, connector and store are real; the model, the copies and the
disk only take the time that the inputs say. The turns' lengths are such that a turn holds a slot for some 25 s, as the
incident's did.

    python -m benchmarks.agents_under_pressure [--json] [--without GUARD] [--grid] [--minutes 30] [--INPUT VALUE]

stalls: spells in which no step computed a token though requests were unfinished, and that either lasted longer than
2 s with nothing under way (no copy, read, write or other job of the disk), or in which a step's verdict was STALL. A
spell counts once.
max_token_gap_s: the longest time between two tokens of one request, or since its last one, while it holds its slot.
restores: requests for which copies to the GPU began. restores_recomputed: requests that computed what they had hoped to
restore, by the reason of their warning.

Bars: no stall, no client timeout, no failed turn, and a gap of at most 2 s and one step; and without the escape there
is a stall. The exit code is 1 if one is missed. `--grid` runs each rate at a quarter and at four times, and all with
half and twice the pool. In a cell where clients may well give up on any engine their number is shown, and no bar; see
`Load`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.agents import Inputs, run_agents
from benchmarks.guards import GUARDS, without

RATES = ("prefill", "decode", "host copy", "disk")
SCALES = (0.25, 1.0, 4.0)
POOLS = (0.5, 1.0, 2.0)
MAX_GAP_S = 2.0
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What a machine needs for a turn, by formula. A closed loop offers what is served, so it can always be served,
    unless the pool holds not one context, or a client's patience is shorter than a turn must take."""

    holds_one: bool
    """blocks of the longest sequence <= pool"""
    alone_s: float
    """A turn with the machine to itself: its whole context computed, its whole answer decoded, all at their longest."""
    in_turn_s: float
    """A turn behind one of every other agent, at the best: of every turn only what tools returned is computed, and as
    many decode at once as the slots and the pool have room for, each at its mean length."""
    begin_s: float
    """The last of the first turns, whose contexts are cached nowhere and come all at once: all of them computed, in the
    prompts' share of the time. Less, where fewer decode beside them. This term was added after a first run."""
    timeout_s: float

    @classmethod
    def of(cls, inputs: Inputs) -> Load:
        longest = -(-inputs.max_model_len // inputs.block_tokens)
        alone_s = inputs.max_context / inputs.prefill_tokens_per_s
        alone_s += inputs.max_output_tokens * (inputs.decode_step_s + inputs.decode_request_s)
        mean_blocks = (inputs.min_context + inputs.max_context) / 2 / inputs.block_tokens
        at_once = max(1.0, min(float(inputs.slots), inputs.pool_blocks / mean_blocks))
        output = (inputs.min_output_tokens + inputs.max_output_tokens) / 2
        tool = (inputs.min_tool_tokens + inputs.max_tool_tokens) / 2
        turn_s = output * (inputs.decode_step_s / at_once + inputs.decode_request_s)
        turn_s += tool / inputs.prefill_tokens_per_s
        begin = sum(inputs.first_context(index) for index in range(inputs.agents))
        return cls(
            holds_one=longest <= inputs.pool_blocks,
            alone_s=alone_s,
            in_turn_s=inputs.agents * turn_s,
            begin_s=begin / inputs.prefill_tokens_per_s / inputs.prefill_share,
            timeout_s=inputs.client_timeout_s,
        )

    @property
    def is_served_in_time(self) -> bool:
        """Whether an engine can be expected to answer every turn before its client gives up."""
        return self.holds_one and max(self.alone_s, self.in_turn_s, self.begin_s) < self.timeout_s


def longest_step_s(inputs: Inputs) -> float:
    """A full chunk, or a decode of every slot."""
    decode = inputs.decode_step_s + inputs.slots * inputs.decode_request_s
    return max(inputs.max_batch_tokens / inputs.prefill_tokens_per_s, decode)


def missed_bars(inputs: Inputs, figures: dict[str, Any], guard: str | None) -> list[str]:
    """What a run should have shown and did not."""
    if guard == "escape":
        return [] if figures["stalls"] else ["without the escape nothing stalls"]
    if guard is not None:
        return []
    most = {"stalls": 0, "failed_turns": 0, "max_token_gap_s": MAX_GAP_S + longest_step_s(inputs)}
    if Load.of(inputs).is_served_in_time:
        most["client_timeouts"] = 0
    return [f"{name} {figures[name]:g} is above {bar:g}" for name, bar in most.items() if figures[name] > bar]


def scaled(inputs: Inputs, rate: str, scale: float, pool: float) -> Inputs:
    """These inputs with one rate and the pool changed."""
    inputs = replace(inputs, pool_blocks=int(inputs.pool_blocks * pool))
    match rate:
        case "prefill":
            return replace(inputs, prefill_tokens_per_s=inputs.prefill_tokens_per_s * scale)
        case "decode":
            return replace(
                inputs,
                decode_step_s=inputs.decode_step_s / scale,
                decode_request_s=inputs.decode_request_s / scale,
            )
        case "host copy":
            return replace(inputs, copy_bytes_per_s=inputs.copy_bytes_per_s * scale)
        case _:
            return replace(inputs, disk_bytes_per_s=inputs.disk_bytes_per_s * scale)


def cells() -> Iterator[tuple[str, float, float]]:
    """Each rate alone, and the base of each pool once."""
    for pool in POOLS:
        yield "prefill", 1.0, pool
        yield from ((rate, scale, pool) for rate in RATES for scale in SCALES if scale != 1.0)


def run_case(inputs: Inputs, guard: str | None = None) -> dict[str, Any]:
    """One run; a function of its own, so that another process can call it."""
    logging.disable(logging.WARNING)  # the counts say it all
    with without(guard):
        return run_agents(inputs)


def run_grid(inputs: Inputs, *, as_json: bool) -> bool:
    """All cells, a line each as they are done; whether all bars were met."""
    all_met = True
    named = list(cells())
    with ProcessPoolExecutor(PROCESSES) as pool:
        scaled_inputs = [scaled(inputs, *cell) for cell in named]
        results = pool.map(run_case, scaled_inputs)
        for number, (cell, case, figures) in enumerate(zip(named, scaled_inputs, results, strict=True), 1):
            rate, scale, pool_scale = cell
            load, missed = Load.of(case), missed_bars(case, figures, None)
            all_met &= not missed
            row = {"rate": rate, "scale": scale, "pool": pool_scale, "is_served_in_time": load.is_served_in_time}
            if as_json:
                print(json.dumps(row | {"load": asdict(load), "missed": missed} | figures), flush=True)
                continue
            is_exempt = figures["client_timeouts"] and not load.is_served_in_time
            verdict = "; ".join(missed) or ("met, timeouts aside" if is_exempt else "met")
            print(
                f"{number:>3}/{len(named)}  {rate:>9} x{scale:<4g} pool x{pool_scale:<3g}"
                f"  alone {load.alone_s:4.0f} s, in turn {load.in_turn_s:4.0f} s, begin {load.begin_s:4.0f} s"
                f"  stalls {figures['stalls']}  timeouts {figures['client_timeouts']:>3}"
                f"  gap {figures['max_token_gap_s']:6.3f} s  turns {figures['turns']:>4}"
                f"  recomputed {sum(figures['restores_recomputed'].values()):>3}"
                f"  ttft {figures['ttft_s']['mean'] or 0.0:6.1f} s  {verdict}",
                flush=True,
            )
    return all_met


def _in_words(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{key} {count}" for key, count in value.items()) or "none"


def print_table(inputs: Inputs, figures: dict[str, Any], guard: str | None) -> None:
    print(f"{inputs.minutes:g} simulated minutes" + (f", without this guard: {GUARDS[guard]}" if guard else ""))
    for name, value in figures.items():
        print(f"  {name:<22} {_in_words(value)}")
    print("inputs")
    for item in fields(inputs):
        print(f"  {item.name:<22} {getattr(inputs, item.name)!s:<14} {item.metadata['source']}")
    print(f"  {'host_blocks':<22} {inputs.host_blocks!s:<14} by host_share")


def parse() -> tuple[Inputs, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents_under_pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --grid one a cell")
    parser.add_argument("--without", choices=sorted(GUARDS), help="run an engine without this guard")
    parser.add_argument("--grid", action="store_true", help="every rate and the pool, scaled")
    base = Inputs()
    for item in fields(Inputs):
        default = getattr(base, item.name)
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{item.metadata['source']} (default: {default})",
        )
    arguments = parser.parse_args()
    if arguments.grid and arguments.without:
        parser.error("--grid is for the engine with all its guards")
    inputs = Inputs(**{item.name: getattr(arguments, item.name) for item in fields(Inputs)})
    for item in fields(Inputs):
        if item.name != "seed" and getattr(inputs, item.name) <= 0:
            parser.error(f"--{item.name.replace('_', '-')} must be above 0, not {getattr(inputs, item.name)}")
    if not Load.of(inputs).holds_one:
        parser.error(f"--pool-blocks {inputs.pool_blocks} hold not one context of {inputs.max_model_len} tokens")
    return inputs, arguments


def main() -> int:
    inputs, arguments = parse()
    if arguments.grid:
        return 0 if run_grid(inputs, as_json=arguments.json) else 1
    figures = run_case(inputs, arguments.without)
    missed = missed_bars(inputs, figures, arguments.without)
    if arguments.json:
        print(json.dumps(figures | {"without": arguments.without, "missed": missed, "inputs": asdict(inputs)}))
    else:
        print_table(inputs, figures, arguments.without)
    for bar in missed:
        print(f"missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
