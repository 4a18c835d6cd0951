"""The engine around the scheduler: what it refuses, how requests end, and what the cache below it may share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ClosedError, LayoutError, TokenError
from kvtier.keys import Extras, MediaItem, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason
from kvtier.testing import FakeClock, InlineExecutor
from kvtier_connectors.contract import CopyResult, KVOptions
from kvtier_engine.config import EngineConfig
from kvtier_engine.engine import NO_EXTRAS, Engine, TextStream
from kvtier_engine.errors import EmptyPromptError, PromptTooLongError, RequestError
from kvtier_engine.request import FinishReason, Request, RequestOutput, RequestState
from kvtier_engine.runner import BatchItem
from kvtier_engine.sampling import Sampler, SamplingParams
from kvtier_engine.testing import FakeRunner, expected_tokens
from kvtier_engine.testing.rig import EngineRig, namespace_of, tiny_settings, tiny_store
from kvtier_engine.verdict import Verdict

OpenRig = Callable[..., EngineRig]


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def extras(adapter: str | None = None, salt: str | None = None, media: tuple[MediaItem, ...] = ()) -> Extras:
    return Extras(adapter=adapter, salt=salt, media=media)


def image(content: bytes, start: int, length: int) -> MediaItem:
    return MediaItem(content, start, length)


# ---- what is refused at start ----------------------------------------------------------------------------------------


@pytest.mark.bug("WR25")
@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=4),
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float16", block_tokens=4),
        KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32", block_tokens=4),
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_tokens=8),
    ],
    ids=["other size", "other type", "other layers", "other block"],
)
def test_a_namespace_of_another_layout_is_refused(layout: KVLayout) -> None:
    namespace = Namespace("fake", "", layout, "all", Shard(0, 1))
    with pytest.raises(LayoutError, match="layout"):
        Engine(FakeRunner(4, 4), namespace, EngineConfig(), tiny_settings(8))


def test_a_host_pool_smaller_than_the_gpu_pool_with_nothing_below_is_warned_of_once(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rig = open_rig(num_blocks=8, host_blocks=7)
    rig.generate(prompt(20))
    (said,) = [message for message in caplog.messages if "host.size" in message]
    assert said.startswith("host.size holds 7 blocks, fewer than the GPU pool's 8: ")
    assert said.endswith("raise host.size to several times the GPU pool")
    caplog.clear()
    open_rig(num_blocks=8, host_blocks=8)
    open_rig(num_blocks=8, host_blocks=7, disk__path=[str(tmp_path)], disk__size="64MiB", disk__min_free=1)
    assert not [m for m in caplog.messages if "host.size" in m]


# ---- what is refused later -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], EmptyPromptError, "request 'x' has an empty prompt"),
        (prompt(16), PromptTooLongError, "a prompt of 16 tokens, which plus the number of requested output tokens"),
        (prompt(40), PromptTooLongError, "a prompt of 40 tokens"),
        ([1, -1], TokenError, "has token -1; this model's are 0..49999"),
        ([1, 50_000], TokenError, "has token 50000"),
        ([1, 2.0], TokenError, r"has token 2\.0"),
        ([True], TokenError, "has token True"),
    ],
)
def test_r32_a_request_that_can_never_run_is_refused_before_anything_is_scheduled(
    open_rig: OpenRig, bad: list[Any], error: type[Exception], message: str
) -> None:
    rig = open_rig(num_blocks=4)
    rig.add("other", prompt(5), max_tokens=3)
    rig.step()
    before = (list(rig.engine.pool.free_queue()), rig.engine.num_unfinished, rig.stats)
    with pytest.raises(error, match=message):
        rig.engine.add_request("x", bad, SamplingParams(max_tokens=1))
    assert (list(rig.engine.pool.free_queue()), rig.engine.num_unfinished, rig.stats) == before
    rig.run()
    assert rig.finished["other"].finish_reason is FinishReason.LENGTH


def test_a_live_id_is_refused_and_a_finished_one_is_not(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.add("x", prompt(5))
    with pytest.raises(RequestError, match="request id 'x' is in use"):
        rig.engine.add_request("x", prompt(5), SamplingParams())
    rig.run()
    rig.add("x", prompt(6))
    rig.run()


# ---- how requests end ------------------------------------------------------------------------------------------------


def test_max_tokens_ends_a_request(open_rig: OpenRig) -> None:
    output = open_rig().generate(prompt(5), max_tokens=3)
    assert (output.finish_reason, output.token_ids) == (FinishReason.LENGTH, tuple(expected_tokens(prompt(5), 3)))


def test_a_stop_token_ends_it_and_is_in_the_output(open_rig: OpenRig) -> None:
    third = expected_tokens(prompt(5), 3)[2]
    output = open_rig().generate(prompt(5), max_tokens=9, stop_token_ids=(third,))
    assert (output.finish_reason, output.token_ids[-1]) == (FinishReason.STOP, third)
    assert len(output.token_ids) == 3


def test_an_end_token_ends_it_unless_ignored(open_rig: OpenRig) -> None:
    second = expected_tokens(prompt(5), 2)[1]
    rig = open_rig(eos_token_ids=[second])
    assert rig.generate(prompt(5), max_tokens=4).finish_reason is FinishReason.STOP
    assert len(rig.generate(prompt(5), max_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_stop_string_ends_it(open_rig: OpenRig) -> None:
    class Stream(TextStream):
        stopped = True

        def push(self, token: int) -> str:
            return f"<{token}>"

        def finish(self) -> str:
            return "!"

    rig = open_rig()
    rig.engine.add_request("a", prompt(5), SamplingParams(max_tokens=9), stream=Stream())
    rig.prompts["a"] = prompt(5)
    rig.run()
    output = rig.finished["a"]
    assert output.finish_reason is FinishReason.STOP
    assert output.new_text == f"<{output.token_ids[0]}>!"


def test_the_time_to_the_first_token_is_the_clocks(open_rig: OpenRig) -> None:
    clock = FakeClock()
    rig = open_rig(clock=clock, max_num_seqs=2, max_batch_tokens=4)
    rig.add("a", prompt(8), max_tokens=2)
    clock.advance(1.5)
    rig.step()
    clock.advance(2.0)
    (output,) = rig.step().outputs
    assert output.ttft_s == 3.5
    rig.run()
    assert rig.finished["a"].ttft_s == 3.5


@pytest.mark.bug("CR01", "CR03")
@pytest.mark.parametrize("stage", ["waiting", "restoring", "prefill", "decode", "preempted"])
def test_an_abort_at_any_stage_and_its_id_used_again_at_once(open_rig: OpenRig, stage: str) -> None:
    rig = open_rig(num_blocks=6, max_num_seqs=2, max_batch_tokens=8)
    stored = prompt(17)
    rig.generate(stored)
    rig.flush_gpu()
    rig.add("other", prompt(5, 500), max_tokens=2 if stage != "preempted" else 12)
    request_prompt = stored if stage == "restoring" else prompt(9 if stage == "preempted" else 17, 1000)
    if stage == "waiting":
        rig.add("first", prompt(9, 700), max_tokens=3)
    rig.add("x", request_prompt, max_tokens=6)
    tests: dict[str, Callable[[Request], bool]] = {
        "waiting": lambda r: r.state is RequestState.WAITING,
        "restoring": lambda r: r.state is RequestState.RESTORING,
        "prefill": lambda r: r.state is RequestState.RUNNING and 0 < r.num_computed < 17,
        "decode": lambda r: r.is_decoding,
        "preempted": lambda r: r.num_preemptions > 0 and r.state is RequestState.WAITING,
    }
    reached = tests[stage]
    live: list[Request] = []
    for _ in range(60):
        rig.step()
        if stage in ("decode", "preempted"):
            rig.executor.run_all()
        live = [r for r in rig.engine.scheduler.requests() if r.request_id == "x"]
        if not live or reached(live[0]):
            break
    assert live, "it ended before it got there"
    assert reached(live[0])
    output = rig.abort("x")
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert rig.abort("x") is None
    rig.add("x", prompt(9, 2000), max_tokens=3)
    rig.run()
    assert list(rig.finished["x"].token_ids) == expected_tokens(prompt(9, 2000), 3)
    assert rig.finished["other"].finish_reason is FinishReason.LENGTH
    rig.verify_quiet()


@pytest.mark.bug("CR01")
def test_an_abort_with_a_store_under_way(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, policy="write_through")
    rig.add("x", prompt(9), max_tokens=8)
    rig.step()
    rig.step()
    assert len(rig.executor) == 1
    rig.abort("x")
    assert rig.engine.has_work
    rig.add("x", prompt(9), max_tokens=2)
    rig.run()
    rig.verify_quiet()
    assert rig.ledger.stored == 2


def test_closing_ends_what_is_left(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    rig.add("a", prompt(9), max_tokens=8)
    rig.step()
    rig.step()
    rig.engine.close()
    rig.engine.close()
    assert rig.engine.num_unfinished == 0
    assert rig.ledger.dropped == {DropReason.CLOSED: 2}
    assert rig.store is not None
    assert rig.store.stats().leases == 0


def test_the_engine_works_without_kvtier(open_rig: OpenRig) -> None:
    rig = open_rig(kvtier=False)
    rig.generate(prompt(9), 3)
    assert rig.generate(prompt(9), 3).gpu_hit_tokens == 8
    rig.engine.reset_cache()
    rig.engine.wait(60.0)
    assert rig.generate(prompt(9), 3).gpu_hit_tokens == 0


def test_r76_a_reset_from_within_a_step_is_refused_and_changes_nothing(open_rig: OpenRig) -> None:
    class Resetting(TextStream):
        def push(self, token: int) -> str:
            with pytest.raises(RequestError, match="within a step"):
                rig.engine.reset_cache(preempt_running=True)
            return ""

    rig = open_rig()
    params = SamplingParams(max_tokens=3)
    rig.engine.add_request("a", prompt(9), params, stream=Resetting())
    rig.prompts["a"] = prompt(9)
    rig.run()
    assert rig.finished["a"].finish_reason is FinishReason.LENGTH


# ---- failing forwards ------------------------------------------------------------------------------------------------


def failing(rig: EngineRig, times: int) -> None:
    left = [times]

    def fail(_batch: Sequence[BatchItem]) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("device lost")

    rig.runner.fail = fail


@pytest.mark.bug("WR16")
def test_r16_a_failed_forward_publishes_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    failing(rig, 1)
    rig.add("a", prompt(12))
    rig.add("b", prompt(12, 100))
    rig.step()
    assert rig.finished["a"].error == rig.finished["b"].error == "the forward failed: RuntimeError('device lost')"
    assert not any(map(rig.engine.pool.is_published, range(8)))
    again = rig.generate(prompt(12))
    assert (again.gpu_hit_tokens, again.restored_tokens) == (0, 0)
    rig.verify_quiet()


def test_r16_what_earlier_steps_published_stays_right(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8, max_num_seqs=2, max_batch_tokens=8)
    rig.add("a", prompt(20))
    rig.step()
    failing(rig, 1)
    rig.step()
    assert rig.finished["a"].finish_reason is FinishReason.ERROR
    again = rig.generate(prompt(20), max_tokens=3)
    assert again.gpu_hit_tokens == 8
    assert again.error is None


def test_r16_a_failed_forward_during_decoding_ends_its_batch_alone(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8, max_num_seqs=1)
    rig.add("a", prompt(6), max_tokens=9)
    rig.add("b", prompt(6), max_tokens=9)
    rig.step()
    rig.step()
    failing(rig, 1)
    rig.step()
    assert rig.finished["a"].finish_reason is FinishReason.ERROR
    rig.run()
    assert rig.finished["b"].finish_reason is FinishReason.LENGTH
    rig.verify_quiet()


@pytest.mark.bug("WR16")
def test_two_equal_prompts_in_a_step_the_first_aborted(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    rig.add("a", prompt(9))
    rig.add("b", prompt(9))
    rig.engine.scheduler.schedule([], copies_in_flight=0)  # both have their blocks, and nothing has run
    rig.abort("a")
    (request,) = rig.engine.scheduler.requests()
    assert request.num_computed == 0
    assert rig.store is not None
    assert rig.store.stats().host_blocks == 0
    rig.run()
    assert rig.finished["b"].gpu_hit_tokens == 0


def test_r23_two_equal_prompts_in_a_step_share_from_then_on(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.add("a", prompt(9), max_tokens=3)
    rig.add("b", prompt(9), max_tokens=6)
    rig.step()
    a, b = rig.engine.scheduler.requests()
    assert a.block_table[:2] == b.block_table[:2]
    assert a.block_table[2] != b.block_table[2]
    assert [rig.engine.pool.refs(block) for block in a.block_table] == [2, 2, 1]
    rig.run()
    assert rig.generate(prompt(9)).gpu_hit_tokens == 8
    rig.verify_quiet()


# ---- what a runner, a sampler or a stream gets wrong -----------------------------------------------------------------


def lying(rig: EngineRig, lie: Callable[[list[int | None]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward's result goes through `lie`; later ones are the truth."""
    honest = rig.runner.execute
    lies = [lie]

    def execute(batch: Sequence[BatchItem]) -> Any:
        tokens = honest(batch)
        return lies.pop()(tokens) if lies else tokens

    monkeypatch.setattr(rig.runner, "execute", execute)


@pytest.mark.parametrize("token", [-1, 50_000, 1 << 32, 2.0, True, "7", None])
def test_a_token_that_cannot_be_fails_its_request_alone(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, token: object
) -> None:
    rig = open_rig(policy="write_through")
    lying(rig, lambda tokens: [token, *tokens[1:]], monkeypatch)
    rig.add("a", prompt(12), max_tokens=3)
    rig.add("b", prompt(12, 100), max_tokens=3)
    rig.run()
    assert (rig.finished["a"].finish_reason, rig.finished["a"].token_ids) == (FinishReason.ERROR, ())
    assert rig.finished["a"].error == f"the model sampled {token!r}; its tokens are 0..49999"
    assert rig.finished["b"].finish_reason is FinishReason.LENGTH
    again = rig.generate(prompt(12), max_tokens=3)
    assert (again.gpu_hit_tokens, again.restored_tokens, again.error) == (0, 0, None)
    rig.verify_quiet()


def test_a_token_before_the_prompts_end_fails_the_request(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(max_batch_tokens=8)
    lying(rig, lambda _tokens: [7], monkeypatch)
    output = rig.generate(prompt(12))
    assert output.error == "the model sampled 7 before the prompt's end"
    assert rig.generate(prompt(12)).gpu_hit_tokens == 0


@pytest.mark.parametrize("lie", [lambda t: t[:1], lambda t: [*t, 7], lambda _t: [], lambda _t: None])
def test_a_result_of_another_length_fails_the_batch(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, lie: Callable[[list[int | None]], Any]
) -> None:
    rig = open_rig(policy="write_through")
    lying(rig, lie, monkeypatch)
    rig.add("a", prompt(12), max_tokens=3)
    rig.add("b", prompt(12, 100), max_tokens=3)
    rig.step()
    for name in "ab":
        assert (rig.finished[name].finish_reason, rig.finished[name].token_ids) == (FinishReason.ERROR, ())
        assert str(rig.finished[name].error).startswith("the forward failed: ")
    assert not any(map(rig.engine.pool.is_published, range(8)))
    assert rig.generate(prompt(12), max_tokens=3).error is None
    rig.verify_quiet()


class FailingStream(TextStream):
    """Raises from its `num_good`-th use of one method on."""

    def __init__(self, method: str, num_good: int) -> None:
        self.method = method
        self.left = num_good

    def use(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    @property
    def stopped(self) -> bool:
        self.use("stopped")
        return False

    def push(self, token: int) -> str:
        self.use("push")
        return f"<{token}>"

    def finish(self) -> str:
        self.use("finish")
        return "!"


def add_with_stream(rig: EngineRig, request_id: str, stream: TextStream, max_tokens: int = 4) -> None:
    rig.prompts[request_id] = prompt(9, 1000)
    rig.engine.add_request(request_id, prompt(9, 1000), SamplingParams(max_tokens=max_tokens), stream=stream)


@pytest.mark.parametrize(
    ("method", "num_good", "num_tokens"), [("push", 0, 1), ("push", 2, 3), ("stopped", 1, 2), ("finish", 0, 4)]
)
def test_a_stream_that_raises_ends_its_request_alone(
    open_rig: OpenRig, method: str, num_good: int, num_tokens: int
) -> None:
    rig = open_rig()
    add_with_stream(rig, "a", FailingStream(method, num_good))
    rig.add("b", prompt(9, 100), max_tokens=6)
    rig.run()
    output = rig.finished["a"]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.ERROR, num_tokens)
    assert output.new_token_ids == output.token_ids[-1:], "the token it failed at is put out"
    assert str(output.error).startswith("the text stream failed: UnicodeDecodeError(")
    assert (rig.finished["b"].finish_reason, len(rig.finished["b"].token_ids)) == (FinishReason.LENGTH, 6)
    rig.verify_quiet()


def test_a_stream_that_gives_no_text_ends_its_request_alone(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig()
    stream = TextStream()
    monkeypatch.setattr(stream, "push", lambda _token: None)
    add_with_stream(rig, "a", stream)
    rig.run()
    assert str(rig.finished["a"].error).startswith("the text stream failed: TypeError(")
    assert len(rig.finished["a"].token_ids) == 1


def test_a_stream_that_raises_does_not_hinder_an_abort_a_failure_or_closing(open_rig: OpenRig) -> None:
    rig = open_rig()
    add_with_stream(rig, "aborted", FailingStream("finish", 0))
    output = rig.abort("aborted")
    assert output is not None
    assert (output.finish_reason, output.new_text) == (FinishReason.ABORT, "")
    failing(rig, 1)
    add_with_stream(rig, "failed", FailingStream("finish", 0))
    rig.run()
    assert str(rig.finished["failed"].error).startswith("the forward failed: RuntimeError(")
    add_with_stream(rig, "closed", FailingStream("finish", 0))
    add_with_stream(rig, "closed too", TextStream())
    rig.engine.close()
    rig.verify_quiet()


def test_a_stream_that_aborts_another_request_of_its_step(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig()
    stream = TextStream()
    monkeypatch.setattr(stream, "push", lambda _token: str(rig.engine.abort("b"))[:0])
    add_with_stream(rig, "a", stream)
    rig.add("b", prompt(9, 100), max_tokens=6)
    rig.run()
    assert rig.finished["a"].finish_reason is FinishReason.LENGTH
    assert "b" not in rig.finished
    rig.verify_quiet()


class SamplingRunner(FakeRunner):
    """Draws by each item's sampler, of logits that name the fake model's token."""

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        tokens: Sequence[Any] = super().execute(batch)
        return [
            None if item.sampler is None else item.sampler.draw(token)
            for item, token in zip(batch, tokens, strict=True)
        ]


class NamedTokenSampler(Sampler):
    """Takes the token that `SamplingRunner` names; a seed says at which draw it raises."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.num_draws = 0

    def draw(self, logits: Any) -> int:
        self.num_draws += 1
        if self.num_draws == self.params.seed:
            raise ArithmeticError("no probability is left")
        token: int = logits
        return token


def test_a_sampler_that_raises_ends_its_request_alone() -> None:
    runner = SamplingRunner(8, 4)
    outputs: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    with Engine(runner, namespace_of(runner), EngineConfig(4, 64), None, make_sampler=NamedTokenSampler) as engine:
        engine.add_request("a", prompt(9), SamplingParams(max_tokens=5, seed=3))
        engine.add_request("b", prompt(9, 100), SamplingParams(max_tokens=5))
        while engine.has_work:
            for output in engine.step().outputs:
                outputs[output.request_id].append(output)
            engine.check_integrity()
        assert engine.pool.num_free == 8
    assert outputs["a"][-1].error == "sampling failed: ArithmeticError('no probability is left')"
    assert list(outputs["a"][-1].token_ids) == expected_tokens(prompt(9), 2)
    assert list(outputs["b"][-1].token_ids) == expected_tokens(prompt(9, 100), 5)


def test_a_token_that_cannot_be_hashed_leaves_a_request_as_it_was() -> None:
    params = SamplingParams()
    request = Request("a", prompt(7), params, NamedTokenSampler(params), NO_EXTRAS, 4, 0.0, max_tokens=1)
    with pytest.raises(TokenError):
        request.append(-1, 1.0)
    assert (request.tokens, request.chain.num_tokens, request.first_token_at) == (prompt(7), 7, None)


# ---- out and back ----------------------------------------------------------------------------------------------------


def test_what_left_the_gpu_comes_back_from_the_host(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.generate(prompt(12), max_tokens=4)
    rig.flush_gpu()
    output = rig.generate(prompt(12), max_tokens=4)
    assert (output.gpu_hit_tokens, output.restored_tokens) == (0, 8)
    rig.verify_quiet()


def test_the_oracle_sees_a_flipped_byte_in_a_slot(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.generate(prompt(12))
    rig.flush_gpu()
    assert rig.store is not None
    rig.store.pool.buffer[::4096] ^= 1
    with pytest.raises(AssertionError, match="other tokens than a cold run"):
        rig.generate(prompt(12))


@pytest.mark.bug("WR18")
def test_only_whole_blocks_are_stored_and_local_ones_are_not_overwritten(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=20, policy="write_through", block_tokens=16)
    rig.generate(prompt(150))
    assert rig.ledger.stored == 150 // 16
    rig.generate(prompt(144), max_tokens=1)
    held = [block for block in range(20) if rig.engine.pool.is_published(block)]
    before = rig.runner.pool[:, held].copy()
    output = rig.generate(prompt(150))
    assert (output.gpu_hit_tokens, output.restored_tokens) == (144, 0)
    assert (rig.runner.pool[:, held] == before).all()
    assert rig.ledger.stored == 150 // 16


@pytest.mark.bug("CR11")
def test_what_is_stored_of_a_chunked_prompt_adds_up(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=70, policy="write_through", block_tokens=16, max_batch_tokens=256, host_blocks=100)
    rig.add("a", prompt(1000))
    stored = []
    while rig.engine.has_work:
        rig.step()
        rig.executor.run_all()
        stored.append(rig.ledger.due)
    assert stored == [0, 16, 32, 48, 62, 62] or stored[-1] == 62
    assert (rig.ledger.due, rig.ledger.stored) == (62, 62)


@pytest.mark.bug("PF05")
@pytest.mark.parametrize("at_once", [False, True])
def test_the_same_prompt_ten_times_is_stored_once(open_rig: OpenRig, at_once: bool) -> None:
    rig = open_rig(num_blocks=60, policy="write_through", max_num_seqs=10, max_batch_tokens=200, host_blocks=64)
    for i in range(10):
        rig.add(f"r{i}", prompt(17))
        if not at_once:
            rig.run()
    rig.run()
    assert rig.store is not None
    assert rig.store.stats().stored_bytes == 4 * 64
    assert rig.ledger.due == 4


@pytest.mark.bug("PF11")
def test_when_nothing_is_ever_found_nothing_is_reserved_for_it(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, policy="off")
    assert rig.store is not None
    for i in range(10):
        rig.generate(prompt(17, 1000 * i))
        assert rig.store.stats().host_used_bytes == rig.store.stats().leases == 0
    assert rig.stats.landed_blocks == rig.stats.failed_landings == 0
    assert rig.store.stats().hit_rate == 0.0


@pytest.mark.bug("WR23")
def test_a_reset_reaches_the_pool_and_every_tier(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    rig.add("a", prompt(12))
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        rig.engine.reset_cache()
    rig.run()
    rig.engine.reset_cache()
    rig.engine.check_integrity()
    output = rig.generate(prompt(12))
    assert (output.gpu_hit_tokens, output.restored_tokens) == (0, 0)
    rig.flush_gpu()
    assert rig.generate(prompt(12)).restored_tokens == 8, "and what came after it is kept"


@pytest.mark.bug("WR23")
def test_a_reset_while_copies_are_under_way(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    rig.add("a", prompt(12))
    rig.step()
    rig.step()
    assert rig.engine.has_work
    rig.engine.reset_cache()
    rig.run()
    assert rig.ledger.dropped == {DropReason.RESET: 3}
    assert rig.generate(prompt(12)).restored_tokens == 0
    rig.verify_quiet()


def test_a_request_that_opts_out_is_not_restored(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.generate(prompt(12))
    rig.flush_gpu()
    assert rig.generate(prompt(12), options=KVOptions(restore=False)).restored_tokens == 0


def test_with_an_executor_that_copies_at_once(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, executor=InlineExecutor())
    rig.generate(prompt(12))
    rig.flush_gpu()
    rig.add("a", prompt(12))
    while rig.engine.num_unfinished:
        assert rig.step().verdict in (Verdict.OK, Verdict.WAIT)
    assert rig.finished["a"].restored_tokens == 8


# ---- what never shares -----------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": NO_EXTRAS,
    "adapter A": extras(adapter="A"),
    "adapter B": extras(adapter="B"),
    "adapter with no name": extras(adapter=""),
    "salt X": extras(salt="X"),
    "salt Y": extras(salt="Y"),
    "salt with no letters": extras(salt=""),
    "adapter and salt": extras(adapter="A", salt="X"),
    "image one": extras(media=(image(b"one", 0, 3),)),
    "image two": extras(media=(image(b"two", 0, 3),)),
    "image one elsewhere": extras(media=(image(b"one", 1, 3),)),
}


@pytest.mark.bug("WR03", "WR05", "SE09")
@pytest.mark.parametrize("stored", VARIANTS)
def test_r25_equal_tokens_are_shared_by_equal_extras_only(open_rig: OpenRig, stored: str) -> None:
    rig = open_rig(num_blocks=40, policy="write_through", host_blocks=200)
    rig.generate(prompt(13), extras=VARIANTS[stored])
    for name, other in VARIANTS.items():
        if name != stored:
            assert rig.generate(prompt(13), extras=other).gpu_hit_tokens == 0, f"{name} found what {stored} stored"
    assert rig.generate(prompt(13), extras=VARIANTS[stored]).gpu_hit_tokens == 12, "the positive control"
    rig.flush_gpu()
    # Below the GPU: every variant is there by now, and each finds its own bytes, which the oracle cannot tell apart;
    # so the store is asked which keys it holds.
    assert rig.store is not None
    before = rig.store.stats().host_blocks
    rig.flush_gpu()
    assert rig.generate(prompt(13), extras=VARIANTS[stored]).restored_tokens == 12
    unknown = extras(adapter="never", salt="seen")
    assert rig.generate(prompt(13), extras=unknown).restored_tokens == 0
    assert rig.store.stats().host_blocks > before >= 3 * len(VARIANTS)


@pytest.mark.bug("WR03", "WR05", "SE09")
@pytest.mark.parametrize("asked", VARIANTS)
def test_r25_nothing_is_restored_across_extras(open_rig: OpenRig, asked: str) -> None:
    rig = open_rig(num_blocks=8, host_blocks=200)
    stored = "salt Y" if asked != "salt Y" else "salt X"
    rig.generate(prompt(13), extras=VARIANTS[stored])
    rig.flush_gpu()
    assert rig.generate(prompt(13), extras=VARIANTS[asked]).restored_tokens == 0
    rig.flush_gpu()
    assert rig.generate(prompt(13), extras=VARIANTS[stored]).restored_tokens == 12, "the positive control"


@pytest.mark.bug("WR05")
@pytest.mark.parametrize("restored", [False, True])
def test_media_part_the_chain_at_the_first_block_they_touch(open_rig: OpenRig, restored: bool) -> None:
    def cached(media: MediaItem) -> int:
        output = rig.generate(prompt(64), extras=extras(media=(media,)))
        return output.restored_tokens if restored else output.gpu_hit_tokens

    rig = open_rig(num_blocks=6 if restored else 40, block_tokens=16, host_blocks=100, max_batch_tokens=96)
    rig.generate(prompt(64), extras=extras(media=(image(b"one", 20, 20),)))
    if restored:
        rig.flush_gpu()
    assert cached(image(b"two", 20, 20)) == 16
    if restored:
        rig.flush_gpu()
    assert cached(image(b"one", 21, 20)) == 16
    if restored:
        rig.flush_gpu()
    assert cached(image(b"one", 20, 20)) == 48, "the positive control"


@pytest.mark.bug("SE09")
def test_r25_engines_of_one_store_share_within_a_namespace_only(open_rig: OpenRig) -> None:
    store = tiny_store(tiny_settings(64))
    try:
        first = open_rig(num_blocks=6, store=store)
        first.generate(prompt(13))
        first.flush_gpu()
        other = open_rig(num_blocks=6, store=store, model="another")
        same = open_rig(num_blocks=6, store=store)
        assert other.generate(prompt(13)).restored_tokens == 0
        assert same.generate(prompt(13)).restored_tokens == 12, "the positive control"
        for rig in (first, other, same):
            rig.engine.close()
    finally:
        store.close()


def test_the_rigs_namespace_is_its_runners(open_rig: OpenRig) -> None:
    assert namespace_of(FakeRunner(2, 4)).layout == open_rig().runner.layout


def test_a_closed_engine_says_so(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.engine.close()
    with pytest.raises(ClosedError, match="closed"):
        rig.add("late", prompt(4))
    assert rig.engine.num_unfinished == 0


def test_numpy_tokens_are_tokens(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.engine.add_request("a", np.arange(8, dtype=np.int32), SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    rig.prompts["a"] = prompt(8)
    rig.run()
    assert len(rig.finished["a"].token_ids) == 2


# ---- each request ends once ------------------------------------------------------------------------------------------


class Calling(TextStream):
    """A stream that does something at each token."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def push(self, token: int) -> str:
        self._call()
        return ""


def ends(rig: EngineRig, steps: int = 30) -> list[tuple[str, str | None]]:
    """Every last output of the next steps."""
    outputs: list[RequestOutput] = []
    for _ in range(steps):
        outputs += rig.engine.step().outputs
        rig.engine.check_integrity()
        rig.executor.run_all()
    return [(output.request_id, output.finish_reason) for output in outputs if output.finished]


def add(rig: EngineRig, request_id: str, max_tokens: int, stream: TextStream | None = None) -> None:
    rig.engine.add_request(request_id, prompt(5), SamplingParams(max_tokens=max_tokens), stream=stream)
    rig.prompts[request_id] = prompt(5)


@pytest.mark.parametrize("again", [False, True])
def test_r74_a_request_aborted_by_its_own_stream_ends_once(open_rig: OpenRig, again: bool) -> None:
    rig = open_rig()

    def abort() -> None:
        assert rig.engine.abort("a") is not None
        if again:
            add(rig, "a", 2)

    add(rig, "a", 1, Calling(abort))
    assert ends(rig) == ([("a", FinishReason.LENGTH)] if again else [])
    rig.verify_quiet()


@pytest.mark.parametrize("again", [False, True])
def test_r74_a_request_aborted_during_a_forward_that_fails_ends_once(open_rig: OpenRig, again: bool) -> None:
    rig = open_rig()

    def fail(_batch: Sequence[BatchItem]) -> None:
        rig.runner.fail = lambda _: None
        assert rig.engine.abort("a") is not None
        if again:
            add(rig, "a", 2)
        raise RuntimeError("device lost")

    rig.runner.fail = fail
    add(rig, "a", 3)
    add(rig, "b", 3)
    expected = [("b", FinishReason.ERROR), *([("a", FinishReason.LENGTH)] if again else [])]
    assert ends(rig) == expected
    rig.verify_quiet()


@pytest.mark.parametrize("call", ["step", "flush", "close", "reset_cache"])
def test_what_belongs_between_steps_is_refused_within_one(open_rig: OpenRig, call: str) -> None:
    rig = open_rig()
    calls: dict[str, Callable[[], object]] = {
        "step": rig.engine.step,
        "flush": lambda: rig.engine.flush(1.0),
        "close": rig.engine.close,
        "reset_cache": lambda: rig.engine.reset_cache(preempt_running=True),
    }
    refused: list[str] = []

    def nest() -> None:
        with pytest.raises(RequestError) as caught:
            calls[call]()
        refused.append(str(caught.value))

    add(rig, "a", 2, Calling(nest))
    assert ends(rig) == [("a", FinishReason.LENGTH)]
    assert [message.split()[0] for message in refused] == [call, call]
    rig.verify_quiet()


@pytest.mark.parametrize(
    ("request_id", "tokens", "params"),
    [
        (None, [1], SamplingParams()),
        ("", [1], SamplingParams()),
        ([], [1], SamplingParams()),
        ("a", None, SamplingParams()),
        ("a", "text", SamplingParams()),
        ("a", [1], None),
    ],
)
def test_r32_what_is_no_request_gets_one_clear_error(
    open_rig: OpenRig, request_id: Any, tokens: Any, params: Any
) -> None:
    rig = open_rig()
    with pytest.raises(RequestError) as caught:
        rig.engine.add_request(request_id, tokens, params)
    assert caught.value.http_status == 400
    assert not rig.engine.has_work


def test_wait_returns_at_once_while_there_are_results_to_look_at(open_rig: OpenRig) -> None:
    rig = open_rig(executor=InlineExecutor(), policy="write_through")
    rig.generate(prompt(9))
    add(rig, "a", 3)
    rig.engine.step()
    rig.engine._results = [CopyResult(10**9, ())]
    begun = time.monotonic()
    rig.engine.wait(30.0)
    assert time.monotonic() - begun < 10.0
    rig.run()
