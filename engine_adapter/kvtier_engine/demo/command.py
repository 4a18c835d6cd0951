"""The command itself: options, progress on stderr, the table or one JSON object on stdout, the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier_engine.demo.measure import Progress
    from kvtier_engine.demo.result import BelowResult, DemoResult, DiskResult, RedisResult, ServerResult

__all__ = ["command"]

HOST_SIZE = "1GiB"
BELOW = {"disk": "disk", "redis": "Redis", "server": "a kvtier-server"}
MANUAL_TOKENS = 1380
MAX_BATCH_TOKENS = 512
ANSWERS_AND_QUESTIONS = 256  # tokens that three turns add to the manual, at most
SMALL_POOL_SESSIONS = 2  # that fit the pool beside kvtier: whoever returns has been evicted


def command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face directory of a causal LM with a chat template. Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    sessions: Annotated[int, typer.Option(min=5, max=8, help="Conversations; each returns twice and is measured.")] = 6,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Where the disk tier gets a directory for this run, removed at its end. Default: the system's "
            "temporary directory."
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            help="A Redis server, redis://host:port, to be used in place of a disk, under a prefix of this run's own "
            "that is emptied at its end. User and password come from the settings: KVTIER_REDIS__USERNAME, "
            "KVTIER_REDIS__PASSWORD."
        ),
    ] = None,
    server: Annotated[
        bool,
        typer.Option(
            "--server",
            help="Keep the KV in the memory of a kvtier-server, which the demo starts and ends, in place of host "
            "memory of each process's own and a disk.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip one byte in host memory: the demo must notice and exit with 1.")
    ] = False,
) -> int:
    """Chat sessions on a real model, whose contexts together outgrow its block pool, return one after the other.

    Each returning turn is run recomputed, from the GPU prefix cache, and restored: the second turns from host memory,
    the third from disk, from Redis or from a kvtier-server, in a new process with nothing in memory, once the first
    engine is closed. With --server host memory is the server's, for both. Times are medians; those recomputed and from
    the GPU prefix cache are over second and third turns. The new process is warmed up by an unrelated prompt that
    shares no block with the conversations. Exits with 1 unless the restored KV is bit-equal to what was there before
    and the tokens equal those of an engine that evicts nothing.
    """
    import logging

    from rich.console import Console

    from kvtier_engine.demo.process import ReturningError

    logging.getLogger("kvtier").setLevel(logging.ERROR)  # the sizes are the demo's own; its progress says what matters
    stderr = Console(stderr=True)
    try:
        with stderr.status("starting") as status:

            def progress(text: str) -> None:
                status.update(text)
                if not stderr.is_terminal:
                    stderr.print(text, highlight=False, soft_wrap=True)

            result = _run(model, sessions, progress, disk=disk, redis=redis, server=server, corrupt=corrupt)
    except ReturningError as error:
        stderr.print(f"FAILED: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 1
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _print_table(result)
    if result.kv_bit_equal and result.tokens_equal:
        return 0
    stderr.print("FAILED: restored KV or tokens differ from those of before", style="bold red")
    return 1


def _run(
    model_dir: Path | None,
    num_sessions: int,
    progress: Progress,
    *,
    disk: Path | None,
    redis: str | None,
    server: bool,
    corrupt: bool,
) -> DemoResult:
    import torch

    from kvtier.errors import ConfigError
    from kvtier_connectors.fingerprint import model_fingerprint
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.demo.below import disk_below, redis_below, server_below
    from kvtier_engine.demo.measure import Measurement, Model
    from kvtier_engine.demo.sessions import make_sessions
    from kvtier_engine.hf_runner import HFRunner
    from kvtier_engine.tokenizer import Tokenizer
    from kvtier_engine.weights import ensure_default_model

    if (disk is not None) + (redis is not None) + server > 1:
        raise ConfigError("--disk, --redis and --server: name one of them")
    if server and corrupt:
        raise ConfigError("--corrupt damages host memory of the engine's own; with --server that is the server's")
    torch.set_num_threads(1)  # bf16 sums come out alike only on one thread
    shared = server_below() if server else disk_below(disk) if redis is None else redis_below(redis)
    with shared as below:
        directory = model_dir or ensure_default_model(progress)
        progress(f"loading {directory}")
        loaded = Model(
            directory,
            HFRunner.load(directory, num_blocks=1),
            Tokenizer.load(directory),
            model_fingerprint(directory),
        )
        conversations = make_sessions(num_sessions, loaded.tokenizer, MANUAL_TOKENS)
        longest = MANUAL_TOKENS + ANSWERS_AND_QUESTIONS
        config = EngineConfig(max_num_seqs=4, max_batch_tokens=MAX_BATCH_TOKENS, max_model_len=longest)
        layout = loaded.runner.layout
        session_blocks = -(-longest // layout.block_tokens)
        overrides = below.overrides(num_sessions * session_blocks, layout.block_bytes)
        overrides["host"] = {"size": HOST_SIZE, **overrides.get("host", {})}
        measurement = Measurement(loaded, conversations, overrides, config, progress, below.name)
        return measurement.run(
            small_blocks=SMALL_POOL_SESSIONS * session_blocks,
            session_blocks=session_blocks,
            corrupt=corrupt,
        )


def _print_table(result: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("KV of the conversation so far", "time to first token", "of recompute")
    recompute = result.ttft_s["recompute"]
    names = {
        "recompute": "recomputed",
        "gpu_hit": "in the GPU prefix cache",
        "host": "restored from host memory" + (", the server's" if result.below_name == "server" else ""),
        result.below_name: f"restored from {BELOW[result.below_name]}, in a new process",
    }
    for key, name in names.items():
        seconds = result.ttft_s[key]
        table.add_row(name, f"{seconds:.3f} s", f"{seconds / recompute:.0%}")
    console = Console()
    console.print(f"{result.model}, returning turns of about {result.prompt_tokens} prompt tokens", highlight=False)
    console.print(table)
    ledger, share = result.ledger, result.memcpy_share
    dropped = ", ".join(f"{count} {reason.value}" for reason, count in ledger.dropped.items()) or "none"
    console.print(
        f"restored KV bit-equal to KV as it was computed: {_mark(result.kv_bit_equal)} "
        f"({result.num_blocks_compared} blocks compared)\n"
        f"tokens equal to an engine that evicts nothing: {_mark(result.tokens_equal)}\n"
        f"blocks due {ledger.due} = stored {ledger.stored} + dropped {sum(ledger.dropped.values())} ({dropped}) "
        f"+ pending {ledger.pending}\n"
        f"copying thread, share of an idle machine's memcpy: stores {share['store']:.2f}, beside the computing model; "
        f"restores {share['restore']:.2f}\n"
        f"{_describe(result.below)}",
        highlight=False,
        soft_wrap=True,
    )


def _describe(below: BelowResult) -> str:
    from kvtier_engine.demo.result import RedisResult, ServerResult

    if isinstance(below, ServerResult):
        return _describe_server(below)
    return _describe_redis(below) if isinstance(below, RedisResult) else _describe_disk(below)


def _describe_server(server: ServerResult) -> str:
    return (
        f"kvtier-server: {server.blocks_written} blocks, {server.bytes_written / 1e6:.0f} MB, at {server.url}, since "
        f"ended; {server.unstored_blocks} not stored, {server.damaged_blocks} damaged"
    )


def _describe_redis(redis: RedisResult) -> str:
    return (
        f"Redis: {redis.blocks_written} blocks, {redis.bytes_written / 1e6:.0f} MB, at {redis.url}, under keys that "
        f"began with {redis.prefix}, since removed; {redis.unstored_blocks} not stored, {redis.damaged_blocks} damaged"
    )


def _describe_disk(disk: DiskResult) -> str:
    through = "direct I/O" if disk.mode == "direct" else "no direct I/O there, so reads may have come from memory"
    if disk.file_system == "tmpfs":
        through = "which is memory: name a directory on a disk by --disk"
    return (
        f"disk: {disk.blocks_written} blocks, {disk.bytes_written / 1e6:.0f} MB, in {disk.directory}, since removed "
        f"({disk.file_system}, {through}); {disk.recovered_blocks} found by the new process, "
        f"{disk.unstored_blocks} not stored, {disk.damaged_blocks} damaged"
    )


def _mark(holds: object) -> str:
    return "yes" if holds else "NO"
