"""Eight conversations of the real model in a pool that holds two of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.config import Settings, load_settings
from kvtier_engine import EngineConfig, FinishReason, SamplingParams
from kvtier_engine.llm import LLM
from kvtier_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvtier_engine.hf_runner import HFRunner

NUM_SESSIONS, NUM_TURNS = 8, 2
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 90, 6, 16
SUBJECTS = ("tea", "rain", "gold", "moss", "salt", "snow", "jazz", "bees")


def blocks_of(num_sessions: int) -> int:
    longest = NUM_TURNS * (PROMPT_TOKENS + OUTPUT_TOKENS) + 1
    return num_sessions * -(-longest // BLOCK_TOKENS)


def converse(llm: LLM) -> list[tuple[int, ...]]:
    """Every session's turns, all sessions side by side; what each put out."""
    answers: list[tuple[int, ...]] = []
    contexts: list[list[int]] = [[] for _ in SUBJECTS]
    for turn in range(NUM_TURNS):
        for context, subject in zip(contexts, SUBJECTS, strict=True):
            text = f"Turn {turn}. Tell me all that you know of {subject}, and of what became of it. " * 8
            context.extend(llm.tokenizer.encode(text)[:PROMPT_TOKENS])
        done = llm.generate(contexts, SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
        assert all(answer.finish_reason is FinishReason.LENGTH for answer in done)
        for context, answer in zip(contexts, done, strict=True):
            context.extend(answer.token_ids)
            answers.append(answer.token_ids)
    return answers


@pytest.mark.model
@pytest.mark.parametrize("prefill_share", [None, 0.4])
def test_eight_sessions_in_a_pool_for_two_give_the_tokens_of_a_pool_for_all(
    prefill_share: float | None, runner_bfloat16: HFRunner, real_model_dir: Path
) -> None:
    """Preempted, evicted, restored and recomputed; in the real model's own bfloat16, on one thread."""
    tokenizer = Tokenizer.load(real_model_dir)
    settings = load_settings(env={}, overrides={"host.size": "128MiB", "host.slab": "8MiB"})
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=64, prefill_share=prefill_share)

    def run(num_blocks: int, settings: Settings | None) -> tuple[list[tuple[int, ...]], LLM]:
        with LLM.from_parts(runner_bfloat16.with_pool(num_blocks), tokenizer, "test", config, settings) as llm:
            answers = converse(llm)
            llm.engine.check_integrity()
            assert llm.engine.pool.num_free == num_blocks
            return answers, llm

    roomy, _ = run(blocks_of(NUM_SESSIONS), None)
    tight, llm = run(blocks_of(2), settings)
    assert tight == roomy
    assert llm.engine.connector is not None
    assert llm.engine.connector.scheduler.stats().landed_blocks, "nothing was restored: the pool was no constraint"
