"""Lengths are settled at start and at the door: what is let in can always finish alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier_engine.config import EngineConfig, resolve_max_model_len
from kvtier_engine.engine import Engine
from kvtier_engine.errors import EmptyPromptError, PromptTooLongError, RequestError
from kvtier_engine.request import FinishReason, RequestOutput
from kvtier_engine.sampling import SamplingParams, resolve_max_tokens
from kvtier_engine.testing import FakeRunner, FakeSampler, expected_tokens
from kvtier_engine.testing.rig import EngineRig, namespace_of

OpenRig = Callable[..., EngineRig]
GIB = 1 << 30


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def open_engine(runner: FakeRunner, **config: Any) -> Engine:
    make_sampler: Any = FakeSampler
    return Engine(runner, namespace_of(runner), EngineConfig(**config), None, make_sampler=make_sampler)


def run_alone(engine: Engine, tokens: list[int], max_tokens: int | None) -> RequestOutput:
    """The request's last output. Fails when it takes more steps than it has tokens."""
    engine.add_request("alone", tokens, SamplingParams(max_tokens=max_tokens))
    for _ in range(engine.max_model_len):
        outputs = engine.step().outputs
        engine.check_integrity()
        if outputs and outputs[-1].finished:
            return outputs[-1]
    raise AssertionError("it does not end")


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, not 0"),
        ({"max_batch_tokens": True}, "max_batch_tokens must be"),
        ({"max_model_len": 1}, "max_model_len must be None or an integer of at least 2, not 1"),
        ({"prefill_share": 0}, "prefill_share must be None or a number above 0 and below 1, not 0"),
        ({"prefill_share": 1.0}, "prefill_share must be"),
        ({"prefill_share": float("nan")}, "prefill_share must be"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, not 'lifo'"),
        ({"head_patience": -1}, "head_patience must be an integer of at least 0, not -1"),
        ({"head_patience": None}, "head_patience must be"),
        ({"max_capacity_waiters": 0}, "max_capacity_waiters must be an integer of at least 1, not 0"),
        ({"default_max_tokens": 0}, "default_max_tokens must be None or an integer of at least 1, not 0"),
        ({"default_max_tokens": 2.0}, "default_max_tokens must be"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"EngineConfig\.{message}"):
        EngineConfig(**values)


def test_the_edges_of_each_range_are_accepted() -> None:
    EngineConfig(1, 1, 2, 1e-9, "priority", head_patience=0, max_capacity_waiters=1, default_max_tokens=1)
    EngineConfig(max_num_seqs=9, max_batch_tokens=8, prefill_share=0.999)


# ---- the model length ------------------------------------------------------------------------------------------------


def test_r30_a_pinned_length_that_the_pool_cannot_hold_is_refused_and_equality_is_not(open_rig: OpenRig) -> None:
    assert open_rig(num_blocks=4, max_model_len=16, kvtier=False).engine.max_model_len == 16
    assert open_rig(num_blocks=4, max_model_len=13, kvtier=False).engine.max_model_len == 13
    with pytest.raises(ConfigError, match="max_model_len 17 needs"):
        open_rig(num_blocks=4, max_model_len=17, kvtier=False)


def test_r30_the_refusal_has_both_sizes_and_the_length_that_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_max_model_len(1025, 10_000, 10, 64, GIB // 8)
    assert str(caught.value) == (
        "one request of max_model_len 1025 needs 2.12 GiB of KV, more than the 1.25 GiB of the block pool (10 blocks "
        "of 64 tokens). The estimated maximum model length is 640. Lower max_model_len or raise num_blocks"
    )


def test_r30_a_pool_that_holds_nothing_allows_no_length_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r"needs 1\.50 GiB of KV, more than the 0\.00 GiB") as caught:
        resolve_max_model_len(33, 64, 0, 16, GIB // 2)
    assert "estimated" not in str(caught.value)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the model's 64 positions"):
        resolve_max_model_len(65, 64, 10, 16, 100)


def test_r31_a_length_that_was_not_asked_for_is_reduced_to_the_pool_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert resolve_max_model_len(None, 200, 10, 16, 100) == 160
    assert caplog.messages == ["max_model_len is reduced from 200 to 160, which is what the block pool holds"]


@pytest.mark.parametrize("derived", [160, 159, 2])
def test_r31_a_length_that_fits_is_kept_in_silence(derived: int, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_max_model_len(None, derived, 10, 16, 100) == derived
    assert resolve_max_model_len(derived, derived, 10, 16, 100) == derived
    assert caplog.messages == []


@pytest.mark.parametrize(("num_blocks", "block_tokens"), [(0, 16), (1, 1)])
def test_r31_a_pool_that_is_too_small_for_any_request_is_refused(num_blocks: int, block_tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot auto-fit max_model_len: .* not even a single token"):
        resolve_max_model_len(None, 200, num_blocks, block_tokens, 100)


# ---- what is let in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "error"), [(0, EmptyPromptError), (16, PromptTooLongError), (17, PromptTooLongError)])
@pytest.mark.parametrize("pinned", [False, True])
def test_r32_lengths_are_held_against_the_resolved_one_and_answered_as_a_bad_request(
    open_rig: OpenRig, size: int, error: type[RequestError], pinned: bool
) -> None:
    rig = open_rig(num_blocks=40 if pinned else 4, max_model_len=16 if pinned else None, kvtier=False)
    rig.add("other", prompt(5), max_tokens=3)
    with pytest.raises(error) as caught:
        rig.add("x", prompt(size))
    assert (caught.value.http_status, caught.value.code) == (400, "BadRequestError")
    assert rig.engine.num_unfinished == 1
    rig.run()
    assert set(rig.finished) == {"other"}
    assert rig.generate(prompt(15)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("asked", "default", "room", "expected"),
    [
        (None, None, 11, 11),
        (0, None, 11, 11),
        (-1, None, 11, 11),
        (-7, None, 11, 11),
        (None, 5, 11, 5),
        (0, 5, 11, 5),
        (-1, 5, 11, 5),
        (-1, 50, 11, 11),
        (3, None, 11, 3),
        (3, 5, 11, 3),
        (8, 5, 11, 8),
        (11, None, 11, 11),
        (12, None, 11, 11),
        (10**9, 5, 11, 11),
        (None, None, 1, 1),
    ],
)
def test_r33_what_is_not_set_is_the_default_or_the_room_and_what_is_set_stays(
    asked: int | None, default: int | None, room: int, expected: int
) -> None:
    assert resolve_max_tokens(asked, default, room) == expected


@pytest.mark.parametrize("asked", [None, 0, -1])
def test_r33_without_max_tokens_the_model_length_ends_it_unless_there_is_a_default(asked: int | None) -> None:
    for default, expected in ((None, 16 - 5), (3, 3), (100, 16 - 5)):
        engine = open_engine(FakeRunner(4, 4), default_max_tokens=default)
        output = run_alone(engine, prompt(5), asked)
        assert (len(output.token_ids), output.finish_reason) == (expected, FinishReason.LENGTH)
    engine = open_engine(FakeRunner(4, 4), default_max_tokens=3)
    assert len(run_alone(engine, prompt(5), 8).token_ids) == 8


@pytest.mark.parametrize("max_model_len", [None, 13, 16])
def test_r34_a_generation_that_reaches_the_length_ends_with_it_and_is_never_preempted(
    open_rig: OpenRig, max_model_len: int | None
) -> None:
    rig = open_rig(num_blocks=4, max_model_len=max_model_len, kvtier=False)
    length = rig.engine.max_model_len
    output = rig.generate(prompt(3), max_tokens=1000)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids == tuple(expected_tokens(prompt(3), length - 3))
    assert rig.engine.scheduler.num_preemptions == 0
    rig.verify_quiet()


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(1, 8), block_tokens=st.integers(1, 6), data=st.data())
def test_r35_whatever_is_let_in_runs_to_completion_alone(
    num_blocks: int, block_tokens: int, data: st.DataObject
) -> None:
    pool_tokens = num_blocks * block_tokens
    assume(pool_tokens >= 2)
    pinned = data.draw(st.none() | st.integers(2, pool_tokens), "max_model_len")
    engine = open_engine(
        FakeRunner(num_blocks, block_tokens, max_positions=data.draw(st.integers(pinned or 2, 60), "positions")),
        max_num_seqs=data.draw(st.integers(1, 3), "max_num_seqs"),
        max_batch_tokens=data.draw(st.integers(1, 9), "max_batch_tokens"),
        max_model_len=pinned,
        prefill_share=data.draw(st.none() | st.just(0.3), "prefill_share"),
    )
    tokens = prompt(data.draw(st.integers(1, engine.max_model_len - 1), "prompt"))
    max_tokens = data.draw(st.none() | st.integers(-1, pool_tokens), "max_tokens")
    output = run_alone(engine, tokens, max_tokens)
    room = engine.max_model_len - len(tokens)
    assert (output.finish_reason, output.error) == (FinishReason.LENGTH, None)
    assert output.token_ids == tuple(expected_tokens(tokens, resolve_max_tokens(max_tokens, None, room)))
    assert engine.scheduler.num_preemptions == 0
    assert engine.pool.num_free == num_blocks
    assert engine.num_unfinished == 0


@settings(max_examples=25, deadline=None)
@given(num_blocks=st.integers(2, 6), block_tokens=st.integers(1, 5), data=st.data())
def test_r35_with_kvtier_beside_it_and_its_prompt_in_host_memory(
    num_blocks: int, block_tokens: int, data: st.DataObject
) -> None:
    rig = EngineRig(
        num_blocks, block_tokens=block_tokens, max_num_seqs=2, max_batch_tokens=data.draw(st.integers(2, 9))
    )
    try:
        length = rig.engine.max_model_len
        tokens = prompt(data.draw(st.integers(1, length - 1)))
        for _ in range(2):
            rig.generate(tokens, data.draw(st.integers(1, length)))
            rig.flush_gpu()
        assert {output.error for output in rig.finished.values()} == {None}
        assert rig.engine.scheduler.num_preemptions == 0
        rig.verify_quiet()
    finally:
        rig.close()
