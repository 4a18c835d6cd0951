"""The commands `kvtier bench tiers` and `kvtier bench lookup`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier_connectors.bench.figures import Figure

__all__ = ["command"]

TIERS = ("host",)

# What a figure should be on any machine.
GOOD = {
    "host.store": "0.8 or more",
    "host.restore": "0.8 or more",
    "host.store_first_touch": "near 1",
    "pool.start": "below 1",
    "connector.idle_step": "below 1",
    "peak_memory": "near 0",
    "lookup.array": "1.6 or less",
    "lookup.list": "2.5 or less",
}
# Small segments: the copy's own work per segment counts.
GOOD_BY_SHAPE = {("host.store", "smollm2"): "0.5 or more", ("host.restore", "smollm2"): "0.5 or more"}

command = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    help="""Measure storing, restoring and lookup against what the machine can do.

    Every figure has a value and a limit: what plain memory copies, or plain hashing, reach for the same bytes in the
    same process, measured in turn with it. Compare ratios (value / limit), also between machines; values move with the
    machine and with what else it runs. Value and limit are medians of the runs, and the ratio is theirs. One thread
    copies.
    """,
)

Runs = Annotated[
    int,
    typer.Option(
        min=1, help="Measured pairs a figure; figures that take long are measured at most 5 times. More: steadier."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a figure and line, as it is measured.")]


@command.command("tiers")
def tiers(
    tier: Annotated[str, typer.Option(help="The tier to measure: host.")] = "host",
    shape: Annotated[
        str,
        typer.Option(
            help="Block layout: llama8b (2 MiB in segments of 32 KiB) or smollm2 (360 KiB in segments of 6 KiB). "
            "Take the one whose segments are nearer in size to your model's: in "
            "bfloat16, 2 * block tokens * KV heads * head dim bytes."
        ),
    ] = "llama8b",
    runs: Runs = 11,
    as_json: AsJson = False,
) -> None:
    """Bytes to the host tier and back, start, idle cost and memory. Needs 2 GiB of free memory and half a minute.

    host.store, host.restore: 512 MiB of blocks at random places between an engine's pool and slots, through the
    connector's copying thread; limit: the same bytes between the same memories, a block in one piece.

    host.store_first_touch: into a host pool never used before, as a store goes that overtakes the pool's background
    touch after start; limit: memcpy into such memory.

    pool.start: from nothing until the first block of an 8 GiB pool can be restored; limit: 1 s.

    connector.idle_step: a step with nothing to copy in an engine with 100,000 cached blocks, nearly all of them dirty;
    limit: 50 us.

    peak_memory: growth while 512 MiB are stored and restored; limit: the pools' sizes, so that a copy held aside shows
    as 0.5.
    """
    from kvtier_connectors.bench.tiers import TierSizes, host_figures
    from kvtier_connectors.shapes import shape_layout

    if tier not in TIERS:
        raise ConfigError(f"tier {tier!r} is not one of {', '.join(TIERS)}")
    _print(host_figures(shape, shape_layout(shape), runs, TierSizes()), as_json=as_json)


@command.command("lookup")
def lookup(runs: Runs = 21, as_json: AsJson = False) -> None:
    """Finding a prompt of 131,072 tokens whose every block is held: hashing it and asking the index."""
    from kvtier_connectors.bench.lookup import NUM_TOKENS, lookup_figures

    _print(lookup_figures(runs, NUM_TOKENS), as_json=as_json)


def _print(figures: Iterator[Figure], *, as_json: bool) -> None:
    if as_json:
        for figure in figures:
            typer.echo(json.dumps(figure.as_json()))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for heading in ("figure", "value", "limit", "ratio", "good ratio", "runs"):
        table.add_column(heading, no_wrap=True)
    with Console(stderr=True).status("measuring") as status:
        for figure in figures:
            status.update(f"measured {figure.figure}")
            table.title = figure.shape
            value, limit = (f"{number:,.4g} {figure.unit}" for number in (figure.value, figure.limit))
            good = GOOD_BY_SHAPE.get((figure.figure, figure.shape), GOOD[figure.figure])
            table.add_row(figure.figure, value, limit, f"{figure.ratio:.2f}", good, str(figure.runs))
    Console().print(table)
