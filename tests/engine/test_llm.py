"""The whole engine on the real model: text in and out, and KV that left the pool and came back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.config import Settings, load_settings
from kvtier.errors import ConfigError
from kvtier_engine import EmptyPromptError, EngineConfig, FinishReason, PromptTooLongError, SamplingParams
from kvtier_engine.llm import LLM
from kvtier_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvtier_engine.hf_runner import HFRunner

pytestmark = pytest.mark.model

CONFIG = EngineConfig(max_num_seqs=4, max_batch_tokens=64)
SETTINGS = load_settings(env={}, overrides={"host.size": "64MiB", "host.slab": "8MiB"})
GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture(scope="session")
def tokenizer(real_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(real_model_dir)


@contextmanager
def open_llm(
    runner: HFRunner, tokenizer: Tokenizer, num_blocks: int = 64, settings: Settings | None = SETTINGS
) -> Iterator[LLM]:
    with LLM.from_parts(runner.with_pool(num_blocks), tokenizer, "test", CONFIG, settings) as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.engine.pool.num_free == num_blocks


def prompt(name: str, count: int = 160) -> list[int]:
    return [2 + hash_ % 40000 for hash_ in (int.from_bytes(f"{name}{i}".encode(), "big") for i in range(count))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_the_same_from_a_pool_that_evicts(
    dtype: str, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    """Four conversations return to a pool of two; the reference keeps all of them in its pool."""
    runner = request.getfixturevalue(f"runner_{dtype}")
    prompts = [prompt(name) for name in "abcd"]
    answers = {}
    for num_blocks, settings in ((26, SETTINGS), (64, None)):
        with open_llm(runner, tokenizer, num_blocks, settings) as llm:
            first = [llm.generate([p], GREEDY)[0] for p in prompts]
            turns = [[*p, *a.token_ids, *prompt("next", 5)] for p, a in zip(prompts, first, strict=True)]
            second = [llm.generate([turn], GREEDY)[0] for turn in turns]
            answers[num_blocks] = [a.token_ids for a in [*first, *second]]
            if settings is not None:
                assert all(a.restored_tokens >= 128 for a in second), second
    assert answers[26] == answers[64]


def test_a_batch_over_a_tight_pool_equals_one_by_one(runner_float32: HFRunner, tokenizer: Tokenizer) -> None:
    """Chunked, preempted, evicted and restored; in float32, where the last bit does not decide a sensible next word."""
    subjects = ("France", "Japan", "Egypt", "Peru", "Kenya", "Norway")
    prompts = [f"{'The atlas has a page for every country. ' * 6}The capital of {name} is" for name in subjects]
    with open_llm(runner_float32, tokenizer, 9) as llm:
        together = [a.text for _ in range(2) for a in llm.generate(prompts, GREEDY)]
        assert llm.engine.scheduler.num_preemptions > 0
    with open_llm(runner_float32, tokenizer, settings=None) as llm:
        alone = [llm.generate([p], GREEDY)[0].text for p in prompts]
    assert "Paris" in alone[0]
    assert together == alone * 2


def test_text_prompts_chat_and_stream(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm:
        answer = llm.generate(["The capital of France is"], GREEDY)[0]
        assert "Paris" in answer.text
        chat = llm.chat([{"role": "user", "content": "What is a cache? One sentence."}], SamplingParams(max_tokens=24))
        assert "cache" in chat.text.lower()
        outputs = list(llm.stream("The capital of France is", GREEDY))
        assert "".join(output.new_text for output in outputs) == answer.text
        assert [t for output in outputs for t in output.new_token_ids] == list(answer.token_ids)
        assert outputs[-1].finished


def test_a_stop_string_ends_the_text_before_it(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm:
        stopped = llm.generate(["The capital of France is"], SamplingParams(max_tokens=20, stop=("aris",)))[0]
    assert stopped.text == " P"
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stream_left_early_is_aborted(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm:
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.engine.num_unfinished == 0


def test_equal_seeds_draw_alike_whoever_shares_the_batch(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=7)
    with open_llm(runner_bfloat16, tokenizer) as llm:
        alone = llm.generate(["Once upon a time"], params)[0]
        shared = llm.generate(["Once upon a time", "Roses are red"], params)[0]
        other = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0.8, seed=8))[0]
    assert alone.token_ids == shared.token_ids
    assert alone.token_ids != other.token_ids


def test_prompts_that_can_never_run_leave_nothing_behind(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer, 8) as llm:
        with pytest.raises(EmptyPromptError):
            llm.generate(["hello", []], GREEDY)
        with pytest.raises(PromptTooLongError, match="128"):
            llm.generate([prompt("a", 128)], GREEDY)
        assert llm.engine.num_unfinished == 0
        assert llm.generate([prompt("a", 127)], GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_a_pool_too_small_for_the_asked_length_is_refused(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="max_model_len 129"):
        LLM.from_parts(runner_bfloat16.with_pool(8), tokenizer, "test", EngineConfig(max_model_len=129), SETTINGS)
