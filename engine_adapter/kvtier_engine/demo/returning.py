"""The process of the third turns: an engine with nothing in memory, over the tier that another process filled.

`python -m kvtier_engine.demo.returning` speaks `kvtier_engine.demo.protocol` over stdin and stdout, logs to stderr, and
ends at the end of stdin. It computes nothing but what it was asked for: between turns it waits for stdin.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

from kvtier.errors import KVTierError
from kvtier_engine.demo.protocol import Ask, Ready, Start, Turn

if TYPE_CHECKING:
    from kvtier.metrics import StatsSnapshot
    from kvtier_engine.llm import LLM

__all__ = ["main"]

WARM_UP_MODULE = "inspect"  # whose manual no session is about
TOUCH_LIMIT_S = 20.0


def main() -> int:
    """Serve turns until stdin ends. The exit code."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints is no answer
        try:
            _serve(sys.stdin.buffer, answers)
        except KVTierError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return 1
        except BrokenPipeError:  # the demo is gone
            return 1
    return 0


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    line = requests.readline()
    if not line:
        return
    start = Start.from_line(line)
    import torch

    from kvtier.config import load_settings
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.llm import LLM

    torch.set_num_threads(1)  # as in the demo: bf16 sums come out alike only on one thread
    settings = load_settings(overrides=start.overrides)
    config = EngineConfig(**start.config)  # type: ignore[arg-type]
    with LLM(start.model_dir, num_blocks=start.num_blocks, config=config, settings=settings) as llm:
        _warm_up(llm, start.warm_up_tokens, owns_pool=settings.host.pool == "own")
        disk = _stats(llm).disk
        _send(answers, Ready(disk.recovered_blocks if disk is not None else 0))
        for line in iter(requests.readline, b""):
            _send(answers, _turn(llm, Ask.from_line(line).messages))


def _send(answers: BinaryIO, message: Ready | Turn) -> None:
    answers.write(message.to_line())
    answers.flush()


def _warm_up(llm: LLM, num_tokens: int, *, owns_pool: bool) -> None:
    """Compute one prompt that shares no block with the sessions, and let the pages of a host pool of our own come.

    A process's first forward pays for what a server pays once: libraries loaded at first use, memory without pages.
    """
    from kvtier_engine.demo.sessions import manual
    from kvtier_engine.sampling import SamplingParams

    tokens = llm.tokenizer.encode(manual(WARM_UP_MODULE))[:num_tokens]
    llm.generate([tokens], SamplingParams(max_tokens=2, ignore_eos=True))
    deadline = time.monotonic() + TOUCH_LIMIT_S
    while owns_pool and time.monotonic() < deadline:
        stats = _stats(llm)
        if stats.host_touched_bytes >= stats.host_reserved_bytes:
            break
        time.sleep(0.01)


def _turn(llm: LLM, messages: list[dict[str, str]]) -> Turn:
    from kvtier_engine.demo.check import restored_blocks
    from kvtier_engine.demo.sessions import ANSWER

    before = _stats(llm)
    answer = llm.chat(messages, ANSWER)
    after = _stats(llm)
    return Turn(
        token_ids=answer.token_ids,
        ttft_s=answer.ttft_s,
        gpu_hit_tokens=answer.gpu_hit_tokens,
        restored_tokens=answer.restored_tokens,
        hits=_difference(after.hits, before.hits),
        misses=_difference(after.misses, before.misses),
        damaged_blocks=_damaged(after) - _damaged(before),
        blocks={digest.hex(): kv.hex() for digest, _, kv in restored_blocks(llm, messages, answer)},
        error=answer.error,
    )


def _stats(llm: LLM) -> StatsSnapshot:
    stats = llm.stats()
    assert stats is not None
    return stats


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(after) - Counter(before))


def _damaged(stats: StatsSnapshot) -> int:
    below = stats.disk or stats.redis or stats.server
    return below.damaged_blocks if below is not None else 0


if __name__ == "__main__":
    sys.exit(main())
