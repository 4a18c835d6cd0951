"""The commands `kvtier bench tiers`, `lookup`, `server`, `codecs` and `faults`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.errors import ConfigError
from kvtier_connectors.bench.good import good_ratio

if TYPE_CHECKING:
    from kvtier_connectors.bench.faults import FaultRow
    from kvtier_connectors.bench.figures import Figure

__all__ = ["command"]

TIERS = ("host", "disk", "redis")
HARMED = ("disk", "redis", "server", "all")

command = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    help="""Measure storing, restoring and lookup against what the machine can do.

    Every figure has a value and a limit: what plain memory copies, plain hashing, plain reads and writes, or plain
    sockets reach for the same bytes in the same process, measured in turn with it. Compare ratios (value / limit), also
    between machines; values move with the machine and with what else it runs. Value and limit are medians of the runs,
    and the ratio is theirs. Where a limit is called a bar it is a number that was chosen, not measured.
    """,
)

Runs = Annotated[
    int,
    typer.Option(
        min=1, help="Measured pairs a figure; figures that take long are measured at most 5 times. More: steadier."
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where the disk tier's files go for the time, in a fresh directory. [default: here]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a figure and line, as it is measured.")]


@command.command("tiers")
def tiers(
    tier: Annotated[str, typer.Option(help="The tier to measure: host, disk or redis.")] = "host",
    shape: Annotated[
        str,
        typer.Option(
            help="Block layout: llama8b (2 MiB in segments of 32 KiB) or smollm2 (360 KiB in segments of 6 KiB). "
            "Take the one whose segments are nearer in size to your model's: in "
            "bfloat16, 2 * block tokens * KV heads * head dim bytes."
        ),
    ] = "llama8b",
    directory: Directory = None,
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis",
            help="For --tier redis: measure at this server, redis://host:port, instead of servers that the benchmark "
            "starts. User and password come from the settings redis.username and redis.password.",
        ),
    ] = None,
    runs: Runs = 11,
    as_json: AsJson = False,
) -> None:
    """Bytes to a tier and back, start, idle cost and memory.

    **The host tier** needs 2 GiB of free memory and half a minute. One thread copies.

    host.store, host.restore: 512 MiB of blocks at random places between an engine's pool and slots, through the
    connector's copying thread; limit: the same bytes between the same memories, a block in one piece.

    host.store_first_touch: into a host pool never used before, as a store goes that overtakes the pool's background
    touch after start; limit: memcpy into such memory.

    pool.start: from nothing until the first block of an 8 GiB pool can be restored; limit: 1 s, a bar.

    connector.idle_step: a step with nothing to copy in an engine with 100,000 cached blocks, nearly all of them dirty;
    limit: 50 us, a bar.

    peak_memory: growth while 512 MiB are stored and restored; limit: the pools' sizes, so that a copy held aside shows
    as 0.5.

    **The disk tier** needs 6 GiB of free space, 2 GiB of free memory and some minutes, and writes some 100 GB. Each run
    moves 1 GiB. Both sides use direct I/O, the same memory, files that were preallocated and have been written before,
    as a full cache's have, jobs of 8 MiB and as many threads, in the order of the chain.

    disk.store: from the commit of blocks to host memory until the last one is written, through write-behind and the
    tier's threads, guard and meter; limit: the same blocks, without headers and checksums, each job one pwritev.

    disk.restore: from the request for staging until the last block is verified and findable in host memory; limit: the
    same blocks into the same slots, each job one preadv.

    disk.store.c1 and so on: the same with 1, 4 and 16 threads, and for reads one more, as the tier has; disk.store
    itself has the default, 4.

    disk.restore.p50_ms, p99_ms: one block at a time, at random, by one thread; limit: one preadv. Median and 99th
    percentile.

    disk.restore_buffered: disk.restore where the file system refuses direct I/O, nothing in the page cache; limit: a
    buffered plain file, as cold.

    disk.warm_restart: from nothing until a tier is open that holds 4 GiB and whose process was killed; limit: 2 s, a
    bar.

    disk.write_amplification: bytes written to the device for each byte of blocks that was accepted, headers, footers
    and what eviction copies included, by a tier of 2 GiB, 90 % full at the start, of whose keys (four times what fits)
    requests come by Zipf's law, exponent 0.9; limit: 1.1, a bar.

    disk.hit_rate: of those requests; limit: that of exact LRU over as many blocks as fit the same bytes.

    **The Redis tier** needs redis-server, 2 GiB of free memory and a minute or two. It starts servers of its own on
    free ports of 127.0.0.1, which share the CPUs with what is measured: one, then a cluster of three, whose figures
    begin with redis.cluster. With --redis it uses the server that you name, which needs 1.25 GiB of free memory and no
    cluster, under a prefix of its own that it empties at the end. Each run moves 256 MiB of noise. The limit is the
    least client: plain sockets, as many connections as the tier has, commands made before, one at a time on each,
    values sent and received by one system call each, without headers and checksums.

    redis.store.c1 and so on: with 1, 4 and 16 threads, which write jobs of 8 MiB; limit: a SET for each block.

    redis.restore.c1 and so on: the same blocks, read and verified; limit: a GET for each block.

    redis.restore.p50_ms, p99_ms: one block at a time, at random, by one thread.

    redis.mixed.c4: 4 threads read four blocks of five, and write the fifth, one at a time; with the time of a block,
    p50_ms and p99_ms.

    redis.lookup.hits, holes, none: which of 8,192 keys the servers hold, where they hold all, every second or none;
    limit: the same commands, packed before, sent ahead of their replies, to all servers at once.
    """
    from kvtier_connectors.shapes import shape_layout

    if tier not in TIERS:
        raise ConfigError(f"tier {tier!r} is not one of {', '.join(TIERS)}")
    layout = shape_layout(shape)
    if directory is not None and tier != "disk":
        raise ConfigError("--dir is for --tier disk")
    if redis is not None and tier != "redis":
        raise ConfigError("--redis is for --tier redis")
    if tier == "redis":
        from kvtier_connectors.bench.redis_figures import RedisSizes, redis_figures

        if redis is None:
            typer.echo("Redis servers of its own, on free ports of 127.0.0.1: one, then a cluster of three", err=True)
        _print(redis_figures(redis, shape, layout, runs, RedisSizes()), as_json=as_json)
        return
    if tier == "host":
        from kvtier_connectors.bench.tiers import TierSizes, host_figures

        _print(host_figures(shape, layout, runs, TierSizes()), as_json=as_json)
        return
    from kvtier_connectors.bench.disk_figures import disk_figures
    from kvtier_connectors.bench.faults import quiet

    with quiet():
        _print(disk_figures(directory, shape, layout, runs), as_json=as_json)


@command.command("lookup")
def lookup(runs: Runs = 21, as_json: AsJson = False) -> None:
    """Finding a prompt of 131,072 tokens whose every block is held: hashing it and asking the index."""
    from kvtier_connectors.bench.lookup import NUM_TOKENS, lookup_figures

    _print(lookup_figures(runs, NUM_TOKENS), as_json=as_json)


@command.command("server")
def server(
    shape: Annotated[str, typer.Option(help="Block layout: llama8b (2 MiB) or smollm2 (360 KiB).")] = "llama8b",
    runs: Runs = 11,
    as_json: AsJson = False,
) -> None:
    """Bytes of several processes to a kvtier-server and back. Needs 6 GiB of free memory and two minutes.

    Starts servers and clients of its own, on sockets in a directory of its own and free ports of 127.0.0.1, which share
    the CPUs. Each run moves 512 MiB of noise, of all clients together; c1 and c4: one client process, and four.

    server.unix.store, server.unix.restore: through the server's memory, which the clients map; limit: as many
    processes that each keep the same blocks in host memory of their own, reserved, copied and committed one by one.

    server.place.store, server.place.restore: with host.pool = "server", where the slots are the server's: reserved,
    copied, committed, and all published; staged and copied out; the same limit.

    server.unix.unchecked, server.place.unchecked: the same with daemon.checksums = false.

    server.tcp.store, server.tcp.restore: through a TCP connection; limit: the same bytes through plain sockets, from
    and to touched memory of another process.

    server.lookup: which of 8,192 blocks are held, all of them being held; limit: 3 ms, a bar.

    server.ping: there and back; limit: as many bytes echoed by a plain Unix socket of another Python process.

    server.start: from the start of the process with a pool of 8 GiB until a client was welcomed and had an answer;
    limit: 1.5 s, a bar.
    """
    from kvtier_connectors.shapes import shape_layout

    try:
        from kvtier_connectors.bench.server_figures import ServerSizes, server_figures
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise ConfigError("kvtier bench server needs msgspec: pip install 'kvtier[server]'") from error

    _print(server_figures(shape, shape_layout(shape), runs, ServerSizes()), as_json=as_json)


@command.command("codecs")
def codecs(runs: Runs = 11, as_json: AsJson = False) -> None:
    """Codecs on KV of a real model, computed here over real text: SmolLM2-135M with kvtier's engine. A minute.

    codec.lz4.ratio: raw bytes over stored ones; limit: 1, which is raw. Blocks that do not shrink by a sixteenth are
    stored raw.

    codec.lz4.down, codec.lz4.up: raw bytes a second compressed, decompressed, by one thread; limit: memcpy of the
    blocks. A codec pays where the device is slower than that.

    codec.shuffle_lz4: the same with the bytes of each element apart.
    """
    from kvtier_connectors.bench.codecs import codec_figures, load_samples

    for shape, blocks in load_samples().items():
        _print(codec_figures(shape, blocks, runs), as_json=as_json)


@command.command("faults")
def faults(
    tier: Annotated[
        str, typer.Option(help="The tier to harm: disk, redis, server, or all: disk and Redis, one below the other.")
    ] = "disk",
    seeded: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="For --tier all: how many faults are drawn at random, after the list. 0: none; 10,000 take some "
            "eight minutes. [default: 10000]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of what is drawn: one that was printed draws the same again.")
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Harm a tier under traffic, one fault after the other: what is lost, and how soon all is well. Some minutes.

    Conversations of 8 blocks of 32 KiB go through store and connector beside a toy engine; half are in the lower tiers
    when the fault comes, half come with it. Afterwards host memory is emptied and all are asked for again, so that only
    what is below it counts. Time limits are shorter than the defaults: the tiers' `timeout_s` and `restore.max_wait_s`
    are 0.5 s. Redis servers are started on free ports of 127.0.0.1: alone, behind a proxy, with Sentinel, as a cluster;
    kvtier-servers on sockets of their own.

    lost: blocks that were asked for again and had to be recomputed, of how many. recomputed: requests with such a
    block. noticed: seconds until a counter told of it; a dash where there was nothing to tell. back: seconds from the
    end of the fault until a new conversation went to the harmed tier and came back; a dash where it does not end.
    wrong: blocks with other bytes than they should have; must be 0. step: 99th percentile of the connector's time a
    step, less that of the run without a fault. waited: the longest that one request waited, in seconds.

    faults.step_time: an engine whose disk hangs for good steps in turn with one whose disk is well; 99.9th percentile
    of the connector's time a step, the difference; limit: 1 ms, a bar. 20,000 steps of each, less those in which the
    kernel gave the thread's CPU to another.

    faults.redis.step_time.stopped, killed, failing_over: the same where a Redis server is stopped by SIGSTOP, killed,
    or a master whose replica Sentinel names.

    faults.redis.waited: meanwhile, with the default time limits, the longest that one request waited, in units of
    redis.timeout_s and its longest step; limit: one, a bar.

    faults.redis.unhindered: the share of requests that did not wait, for more than two steps, for a server already
    found sick; limit: all.

    faults.redis.back: from the end of the fault until a new conversation went there and came back, in units of the
    time for which the server was left alone at a time, at most 5 s; limit: 2, a bar.

    faults.server.step_time.stopped, killed, restarting; waited, unhindered, back: the same of a kvtier-server, also one
    that is killed and started every second or two.

    faults.server.warm: of the blocks that were on a kvtier-server's disk when it was killed, the share that was had
    from it after its restart; limit: all.

    faults.seeded: faults a minute of the random ones: of host, disk and Redis at once, under load of blocks of 360 KiB
    and 2 MiB. Ends with an error at the first wrong byte, leak or count that does not add up. No limit.
    """
    from kvtier_connectors.bench.disk_figures import fault_report

    if tier not in HARMED:
        raise ConfigError(f"tier {tier!r} is not one of {', '.join(HARMED)}")
    if tier != "all" and (seeded, seed) != (None, None):
        raise ConfigError("--seeded and --seed are for --tier all")
    if tier == "disk":
        rows, figures = fault_report(directory)
        _print_faults(rows, as_json=as_json)
        _print(figures, as_json=as_json)
        return
    from kvtier_connectors.bench.faults import FaultSizes
    from kvtier_connectors.bench.remote_fault_figures import remote_fault_report

    if seed is None:
        rows, figures = remote_fault_report(directory, tier, FaultSizes())
        _print_faults(rows, as_json=as_json)
        _print(figures, as_json=as_json)
    if tier == "all" and seeded != 0:
        from kvtier_connectors.bench.seeded import NUM_FAULTS, seeded_figures

        _print(seeded_figures(directory, seeded or NUM_FAULTS, seed), as_json=as_json)


def _print_faults(rows: Iterator[FaultRow], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row.as_json()))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("fault", min_width=24)
    for heading in ("lost", "recomputed", "noticed", "back", "wrong", "step", "waited"):
        table.add_column(heading, no_wrap=True)
    with Console(stderr=True).status("harming") as status:
        for row in rows:
            status.update(f"survived {row.fault}")
            noticed, back = ("-" if seconds is None else f"{seconds:.3f}" for seconds in (row.noticed_s, row.back_s))
            lost = f"{row.lost_blocks}/{row.asked_blocks}"
            recomputed = f"{row.recomputed_requests}/{row.asked_requests}"
            name = f"{row.fault}: {row.injected}"
            step, waited = f"{row.step_effect_ms:+.2f}", f"{row.waited_s:.3f}"
            table.add_row(name, lost, recomputed, noticed, back, str(row.wrong_blocks), step, waited)
    Console().print(table)


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
            value, limit = (f"{number:,.4g} {figure.unit}".rstrip() for number in (figure.value, figure.limit))
            good = good_ratio(figure.figure, figure.shape)
            table.add_row(figure.figure, value, limit, f"{figure.ratio:.2f}", good, str(figure.runs))
    Console().print(table)
