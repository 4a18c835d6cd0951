"""The whole engine on the real model: text in and out, and KV that left the pool and came back. Whose outputs go where,
on the fake one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from kvtier.config import Settings, load_settings
from kvtier.errors import ConfigError
from kvtier_connectors import KVOptions
from kvtier_engine import (
    EmptyPromptError,
    EngineConfig,
    FinishReason,
    PromptTooLongError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from kvtier_engine.llm import LLM
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing import FakeRunner, expected_tokens
from kvtier_engine.tokenizer import Tokenizer
from tests.server.daemon_rig import ServerProcess, short_directory

if TYPE_CHECKING:
    from kvtier_engine.hf_runner import HFRunner

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


@pytest.mark.model
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


@pytest.mark.model
@pytest.mark.slow
def test_tokens_are_the_same_by_way_of_a_servers_memory(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    """What one engine computed another restores from the memory that both have; the reference computes it all."""
    prompts = [prompt(name) for name in "abcd"]
    with short_directory() as directory, ServerProcess(directory, {"host.size": "128MiB"}) as server:
        host = {"host.pool": "server", "host.size": "64MiB", "server.url": f"kvtier+unix://{server.socket}"}
        settings = load_settings(env={}, overrides=host)
        with open_llm(runner_bfloat16, tokenizer, 26, settings) as llm:
            first = [llm.generate([p], GREEDY)[0] for p in prompts]
        turns = [[*p, *a.token_ids, *prompt("next", 5)] for p, a in zip(prompts, first, strict=True)]
        with open_llm(runner_bfloat16, tokenizer, 26, settings) as llm:
            second = [llm.generate([turn], GREEDY)[0] for turn in turns]
            stats = llm.stats()
    assert all(a.restored_tokens >= 128 for a in second), second
    assert stats is not None
    assert set(stats.hits) == {"server"}
    with open_llm(runner_bfloat16, tokenizer, settings=None) as llm:
        assert [llm.generate([p], GREEDY)[0].token_ids for p in prompts] == [a.token_ids for a in first]
        assert [llm.generate([turn], GREEDY)[0].token_ids for turn in turns] == [a.token_ids for a in second]


@pytest.mark.model
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


@pytest.mark.model
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


@pytest.mark.model
def test_a_stop_string_ends_the_text_before_it(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm:
        stopped = llm.generate(["The capital of France is"], SamplingParams(max_tokens=20, stop=("aris",)))[0]
    assert stopped.text == " P"
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.model
def test_a_stream_left_early_is_aborted(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm:
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.engine.num_unfinished == 0


@pytest.mark.model
def test_equal_seeds_draw_alike_whoever_shares_the_batch(runner_float32: HFRunner, tokenizer: Tokenizer) -> None:
    # In bfloat16 some processors round a row of a batch otherwise than the row alone, by more than draws forgive.
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=7)
    with open_llm(runner_float32, tokenizer) as llm:
        alone = llm.generate(["Once upon a time"], params)[0]
        shared = llm.generate(["Once upon a time", "Roses are red"], params)[0]
        other = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0.8, seed=8))[0]
    assert alone.token_ids == shared.token_ids
    assert alone.token_ids != other.token_ids


@pytest.mark.model
def test_prompts_that_can_never_run_leave_nothing_behind(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer, 8) as llm:
        with pytest.raises(EmptyPromptError):
            llm.generate(["hello", []], GREEDY)
        with pytest.raises(PromptTooLongError, match="128"):
            llm.generate([prompt("a", 128)], GREEDY)
        assert llm.engine.num_unfinished == 0
        assert llm.generate([prompt("a", 127)], GREEDY)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.model
def test_a_pool_too_small_for_the_asked_length_is_refused(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="max_model_len 129"):
        LLM.from_parts(runner_bfloat16.with_pool(8), tokenizer, "test", EngineConfig(max_model_len=129), SETTINGS)


# ---- whose outputs go where ------------------------------------------------------------------------------------------


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def fake_llm(settings: Settings | None = None) -> LLM:
    """An LLM over the fake model."""
    runner = FakeRunner(64, 4)
    runner.eos_token_ids = frozenset()  # type: ignore[attr-defined]
    tokenizer = cast("Tokenizer", FakeTokenizer())
    return LLM.from_parts(cast("HFRunner", runner), tokenizer, "fake", CONFIG, settings)


@pytest.fixture
def fake() -> Iterator[LLM]:
    with fake_llm() as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.engine.pool.num_free == 64
        assert not llm._unread
        assert not llm._has_reader


def runner_of(llm: LLM) -> FakeRunner:
    return cast("FakeRunner", llm.engine._runner)


def verify_complete(prompt: Sequence[int], outputs: Sequence[RequestOutput], count: int) -> None:
    """Nothing of a request's output is lost, doubled or out of order."""
    tokens = expected_tokens(prompt, count)
    assert [token for output in outputs for token in output.new_token_ids] == tokens
    assert "".join(output.new_text for output in outputs) == "".join(f"<{token}>" for token in tokens)
    assert list(outputs[-1].token_ids) == tokens
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_interleaved_streams_lose_nothing_of_each_other(fake: LLM) -> None:
    sizes = {"abc": 9, "defgh": 4, "ij": 12}
    streams = {text: fake.stream(text, SamplingParams(max_tokens=size)) for text, size in sizes.items()}
    outputs: dict[str, list[RequestOutput]] = {text: [] for text in sizes}
    for _ in range(20):
        for text, stream in streams.items():
            outputs[text] += [output for output in [next(stream, None)] if output is not None]
    for text, size in sizes.items():
        verify_complete([ord(letter) for letter in text], outputs[text], size)


def test_a_stream_reads_what_came_while_others_stepped_the_engine(fake: LLM) -> None:
    stream = fake.stream([1, 2, 3], SamplingParams(max_tokens=6))
    outputs = [next(stream)]
    assert fake.generate([[4, 5]], SamplingParams(max_tokens=4))[0].token_ids == tuple(expected_tokens([4, 5], 4))
    assert fake.step().outputs == (), "they are the stream's"
    outputs += stream
    verify_complete([1, 2, 3], outputs, 6)


def test_generate_leaves_the_outputs_of_other_requests_to_step(fake: LLM) -> None:
    short = fake.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    long = fake.add_request([4, 5], SamplingParams(max_tokens=8))
    answers = fake.generate([[6], [7]], SamplingParams(max_tokens=4))
    assert [list(answer.token_ids) for answer in answers] == [expected_tokens([token], 4) for token in (6, 7)]
    assert answers[0].text == FakeTokenizer().decode(answers[0].token_ids)
    with pytest.raises(RequestError, match="in use"):
        fake.add_request([1], GREEDY, request_id=short)
    outputs: dict[str, list[RequestOutput]] = {short: [], long: []}
    while fake.has_work:
        for output in fake.step().outputs:
            outputs[output.request_id].append(output)
    verify_complete([1, 2, 3], outputs[short], 2)
    verify_complete([4, 5], outputs[long], 8)


def test_outputs_are_left_to_read_when_the_engine_has_no_work(fake: LLM) -> None:
    ids = [fake.add_request([token], SamplingParams(max_tokens=2)) for token in (1, 2)]
    fake.generate([[3]], SamplingParams(max_tokens=4))
    assert not fake.engine.has_work
    assert fake.has_work
    outputs = fake.step().outputs
    assert [output.request_id for output in outputs] == ids
    for token, output in enumerate(outputs, 1):
        verify_complete([token], [output], 2)
    assert not fake.has_work


def test_an_abort_gives_what_was_not_read(fake: LLM) -> None:
    live = fake.add_request([1, 2, 3], SamplingParams(max_tokens=50))
    done = fake.add_request([4], SamplingParams(max_tokens=2))
    fake.generate([[5]], SamplingParams(max_tokens=3))
    output = fake.abort(live)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert list(output.new_token_ids) == expected_tokens([1, 2, 3], 3)
    assert output.new_text == FakeTokenizer().decode(output.new_token_ids)
    output = fake.abort(done)
    assert output is not None
    verify_complete([4], [output], 2)
    assert fake.abort(live) is fake.abort(done) is fake.abort("unknown") is None


def test_an_aborted_stream_ends_with_its_last_output(fake: LLM) -> None:
    stream = fake.stream([1, 2, 3], SamplingParams(max_tokens=50))
    request_id = next(stream).request_id
    assert fake.abort(request_id) is not None
    assert [output.finish_reason for output in stream] == [FinishReason.ABORT]


def test_closing_ends_a_stream_and_drops_what_nobody_read(fake: LLM) -> None:
    fake.add_request([4], SamplingParams(max_tokens=50))
    stream = fake.stream([1, 2, 3], SamplingParams(max_tokens=50))
    next(stream)
    fake.close()
    assert list(stream) == []
    assert not fake.has_work


def test_generate_with_nothing_beside_it_waits_for_the_copies() -> None:
    with fake_llm(SETTINGS) as llm:
        llm.generate([list(range(20))], GREEDY)
        assert not llm.has_work


def test_a_stream_left_early_takes_its_outputs_along(fake: LLM) -> None:
    stream = fake.stream([1, 2, 3], SamplingParams(max_tokens=50))
    next(stream)
    fake.generate([[4]], GREEDY)
    stream.close()  # type: ignore[attr-defined]
    assert not fake.has_work


def test_generate_takes_its_requests_along_when_it_is_interrupted(fake: LLM) -> None:
    other = fake.add_request([9], SamplingParams(max_tokens=5))
    left = [3]

    def interrupt(_batch: Sequence[BatchItem]) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    runner_of(fake).fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        fake.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=50))
    assert [request.request_id for request in fake.engine.scheduler.requests()] == [other]
    outputs: list[RequestOutput] = []
    while fake.has_work:
        outputs += fake.step().outputs
    verify_complete([9], outputs, 5)


def test_a_prompt_that_is_refused_takes_the_earlier_ones_along(fake: LLM) -> None:
    with pytest.raises(EmptyPromptError):
        fake.generate([[1, 2], []], GREEDY)
    assert not fake.has_work


def test_chat_and_stream_take_options_and_the_counts_can_be_read(
    runner_bfloat16: HFRunner, tokenizer: Tokenizer
) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with open_llm(runner_bfloat16, tokenizer) as llm:
        messages = [{"role": "user", "content": "Say something of twenty words or more about the sea, please, now."}]
        llm.chat(messages, params, options=KVOptions(restore=False))
        list(llm.stream("The sea is wide", params, options=KVOptions(restore=False)))
        stats = llm.stats()
        assert stats is not None
        assert stats.lookups == 0, "who opts out is not counted"
        llm.chat(messages, params)
        stats = llm.stats()
        assert stats is not None
        assert stats.lookups == 1
        for wrong in (None, {"restore": False}):
            with pytest.raises(RequestError, match="options must be a KVOptions"):
                llm.generate(["a"], params, options=wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="list of messages"):
            llm.chat("hi", params)  # type: ignore[arg-type]
    with open_llm(runner_bfloat16, tokenizer, settings=None) as llm:
        assert llm.stats() is None


def test_one_string_is_not_a_list_of_prompts(runner_bfloat16: HFRunner, tokenizer: Tokenizer) -> None:
    with open_llm(runner_bfloat16, tokenizer) as llm, pytest.raises(RequestError, match="list"):
        llm.generate("Hi", GREEDY)
