"""The command `kvtier selftest`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier_connectors.selftest.run import SelftestReport

__all__ = ["command"]


def command(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings, instead of KVTIER_CONFIG.")] = None,
    shape: Annotated[
        str, typer.Option(help="Layout of a known model: llama8b or smollm2. The options below change parts of it.")
    ] = "smollm2",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers that have KV.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads of one shard.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of one head.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of an element of the KV cache, such as bfloat16.")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one block of your engine.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat a run: the seed that it printed.")] = None,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip one byte of a stored block: the selftest must then fail.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove on the configured store that restored blocks are bit-equal to stored ones.

    Random blocks are written to a stand-in for the GPU pool, stored when they are about to be reused, overwritten, and
    restored into other blocks, through the connector that engines use. Host memory is used as configured; storing on
    eviction and restoring are switched on. A configured disk is tested in a directory beside each of its own, of 1 GiB
    at most, which is removed again. A configured Redis and kvtier-server are left alone. Give the layout of your model,
    so that the sizes are those of your engine.

    More blocks are stored than the pool holds (a pool too large for that is followed by a small one): those that were
    evicted must come back as misses with a reason, never as wrong bytes. Exit code 1: bytes differed, held blocks were
    not restored, or the store's books do not agree.
    """
    from kvtier.config import load_settings
    from kvtier_connectors.selftest.run import run_selftest
    from kvtier_connectors.shapes import shape_layout

    base = shape_layout(shape)
    layout = type(base)(
        num_layers=layers or base.num_layers,
        num_kv_heads=kv_heads or base.num_kv_heads,
        head_dim=head_dim or base.head_dim,
        dtype=dtype or base.dtype,
        block_tokens=block_tokens or base.block_tokens,
    )
    chosen = secrets.randbits(32) if seed is None else seed
    report = run_selftest(load_settings(config), layout, seed=chosen, corrupt=corrupt)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print_table(report)
    if not report.ok:
        raise typer.Exit(1)


def _print_table(report: SelftestReport) -> None:
    from rich.console import Console
    from rich.table import Table

    layout = report.layout
    table = Table("selftest", "", show_header=False)
    table.add_row(
        "layout",
        f"{layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim}, {layout.dtype}, "
        f"{layout.block_tokens} tokens: blocks of {layout.block_bytes / 1024:g} KiB",
    )
    table.add_row("host pool", f"{report.host_bytes / 2**20:,.0f} MiB")
    table.add_row("blocks stored", str(report.blocks_stored))
    table.add_row("blocks evicted", str(report.blocks_evicted))
    table.add_row("blocks restored", str(report.blocks_restored))
    if report.disk_modes:
        modes = ", ".join(sorted(set(report.disk_modes.values())))
        table.add_row("of them from disk", f"{report.blocks_from_disk} ({modes} I/O)")
    table.add_row("of them wrong", str(report.blocks_wrong))
    table.add_row("misses", _counts(report.misses))
    table.add_row("not stored", _counts(report.drops))
    table.add_row("seed", str(report.seed))
    console = Console()
    console.print(table)
    for problem in report.problems[:MAX_PROBLEMS]:
        console.print(problem, soft_wrap=True)
    if len(report.problems) > MAX_PROBLEMS:
        console.print(f"and {len(report.problems) - MAX_PROBLEMS} problems more")
    if report.ok:
        verdict = f"selftest passed: {report.blocks_restored} blocks restored, every byte as it was stored"
    else:
        verdict = f"selftest FAILED: {len(report.problems)} problems; --seed {report.seed} repeats it"
    console.print(f"{verdict} ({report.seconds:.1f} s)", soft_wrap=True)


MAX_PROBLEMS = 10


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"
