"""`kvtier ls` and `kvtier verify` of a directory: what a disk tier left there, while no process uses it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.tiers.disk import FrameInfo

__all__ = ["ls", "verify"]

Disk = Annotated[
    Path, typer.Option("--disk", metavar="DIR", help="A directory of `disk.path`. No process may be using it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


def ls(disk: Disk, as_json: AsJson = False) -> None:
    """List what a disk tier's directory holds: segments, or with --json every block. Changes nothing."""
    from kvtier.tiers.disk import list_directory

    frames = list_directory(disk)
    if as_json:
        for frame in frames:
            typer.echo(json.dumps(_row(frame)))
        return
    _print_segments(frames)


def verify(disk: Disk, as_json: AsJson = False) -> None:
    """Read every block of a disk tier's directory and check it: whole header, key, place, checksums. Changes nothing.

    Exits with 1 when something is damaged. A damaged block harms nobody: it is a miss when it is read, and forgotten.
    """
    from kvtier.tiers.disk import verify_directory

    report = verify_directory(disk)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "frames": report.frames,
                    "checked_bytes": report.checked_bytes,
                    "damaged": [{"file": bad.file, "page": bad.page, "problem": bad.problem} for bad in report.damaged],
                    "unreadable": [{"file": bad.file, "problem": bad.problem} for bad in report.unreadable],
                    "foreign": list(report.foreign),
                }
            )
        )
    else:
        for damaged in report.damaged:
            typer.echo(f"damaged: {damaged.file}, page {damaged.page}: {damaged.problem}")
        for unreadable in report.unreadable:
            typer.echo(f"unreadable: {unreadable.file}: {unreadable.problem}")
        for name in report.foreign:
            typer.echo(f"not kvtier's: {name}")
        typer.echo(
            f"{report.frames} blocks checked, {report.checked_bytes / 2**20:.1f} MiB: {len(report.damaged)} damaged, "
            f"{len(report.unreadable)} unreadable files"
        )
    if not report.is_whole:
        raise typer.Exit(1)


def _row(frame: FrameInfo) -> dict[str, object]:
    header = frame.header
    return {
        "file": frame.file,
        "sequence": frame.sequence,
        "page": frame.page,
        "key": header.key.hex(),
        "parent": header.parent.hex() if header.parent is not None else None,
        "depth": header.depth,
        "tenant": header.tenant,
        "raw_bytes": header.raw_bytes,
        "stored_bytes": header.stored_bytes,
        "codec": header.codec,
    }


def _print_segments(frames: Iterable[FrameInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    blocks: Counter[tuple[int, str]] = Counter()
    raw_bytes: Counter[tuple[int, str]] = Counter()
    stored_bytes: Counter[tuple[int, str]] = Counter()
    namespaces: set[bytes] = set()
    for frame in frames:
        place = (frame.sequence, frame.file)
        blocks[place] += 1
        raw_bytes[place] += frame.header.raw_bytes
        stored_bytes[place] += frame.header.frame_bytes
        namespaces.add(frame.header.key[:16])
    table = Table("segment, oldest first", "blocks", "MiB of blocks", "MiB on disk")
    for place in sorted(blocks):
        table.add_row(
            place[1], str(blocks[place]), f"{raw_bytes[place] / 2**20:.1f}", f"{stored_bytes[place] / 2**20:.1f}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"{sum(blocks.values())} blocks in {len(blocks)} segments, of {len(namespaces)} models, layouts or shards",
        highlight=False,
        soft_wrap=True,
    )
