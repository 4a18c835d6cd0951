"""The command itself: options, progress on stderr, the table or one JSON object on stdout, the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier_engine.demo.measure import DemoResult, Progress

__all__ = ["command"]

HOST_SIZE = "1GiB"
MANUAL_TOKENS = 1380
MAX_BATCH_TOKENS = 512
SMALL_POOL_SESSIONS = 2  # that fit the pool beside kvtier: whoever returns has been evicted


def command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face directory of a causal LM with a chat template. Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    sessions: Annotated[int, typer.Option(min=5, max=8, help="Conversations; each returns once and is measured.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip one stored byte: the demo must notice and exit with 1.")
    ] = False,
) -> int:
    """Chat sessions on a real model, whose contexts together outgrow its block pool, return one after the other.

    Each returning turn is run recomputed, from the GPU prefix cache, and restored from host memory. Exits with 1 unless
    the restored KV is bit-equal to what was evicted and the tokens equal those of an engine that evicts nothing.
    """
    import logging

    from rich.console import Console

    logging.getLogger("kvtier").setLevel(logging.ERROR)  # the sizes are the demo's own; its progress says what matters
    stderr = Console(stderr=True)
    with stderr.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not stderr.is_terminal:
                stderr.print(text, highlight=False, soft_wrap=True)

        result = _run(model, sessions, progress, corrupt=corrupt)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _print_table(result)
    if result.kv_bit_equal and result.tokens_equal:
        return 0
    stderr.print("FAILED: restored KV or tokens differ from those of before", style="bold red")
    return 1


def _run(model_dir: Path | None, num_sessions: int, progress: Progress, *, corrupt: bool) -> DemoResult:
    import torch

    from kvtier.config import load_settings
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.demo.measure import Measurement, Model
    from kvtier_engine.demo.sessions import make_sessions
    from kvtier_engine.hf_runner import HFRunner
    from kvtier_engine.tokenizer import Tokenizer
    from kvtier_engine.weights import ensure_default_model, model_fingerprint

    torch.set_num_threads(1)  # bf16 sums come out alike only on one thread
    directory = model_dir or ensure_default_model(progress)
    progress(f"loading {directory}")
    loaded = Model(
        directory.name,
        HFRunner.load(directory, num_blocks=1),
        Tokenizer.load(directory),
        model_fingerprint(directory),
    )
    conversations = make_sessions(num_sessions, loaded.tokenizer, MANUAL_TOKENS)
    settings = load_settings(overrides={"host": {"size": HOST_SIZE}})
    longest = MANUAL_TOKENS + 256
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=MAX_BATCH_TOKENS, max_model_len=longest)
    session_blocks = -(-longest // loaded.runner.layout.block_tokens)
    measurement = Measurement(loaded, conversations, settings, config, progress)
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
    names = {"recompute": "recomputed", "gpu_hit": "in the GPU prefix cache", "host": "restored from host memory"}
    for key, name in names.items():
        seconds = result.ttft_s[key]
        table.add_row(name, f"{seconds:.3f} s", f"{seconds / recompute:.0%}")
    console = Console()
    console.print(f"{result.model}, returning turns of about {result.prompt_tokens} prompt tokens", highlight=False)
    console.print(table)
    ledger, share = result.ledger, result.memcpy_share
    dropped = ", ".join(f"{count} {reason.value}" for reason, count in ledger.dropped.items()) or "none"
    console.print(
        f"restored KV bit-equal to evicted KV: {_mark(result.kv_bit_equal)} "
        f"({result.num_blocks_compared} blocks compared)\n"
        f"tokens equal to an engine that evicts nothing: {_mark(result.tokens_equal)}\n"
        f"blocks due {ledger.due} = stored {ledger.stored} + dropped {sum(ledger.dropped.values())} ({dropped}) "
        f"+ pending {ledger.pending}\n"
        f"copying thread, share of an idle machine's memcpy: stores {share['store']:.2f}, beside the computing model; "
        f"restores {share['restore']:.2f}",
        highlight=False,
        soft_wrap=True,
    )


def _mark(holds: object) -> str:
    return "yes" if holds else "NO"
