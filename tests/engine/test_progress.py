"""The log of prompts on their way says each beginning and end once, and the heartbeat tells a stuck engine from an
idle one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvtier.testing import FakeClock
from kvtier_engine.progress import EngineState, Heartbeat, PrefillProgress, StepCounts

IDLE, WORKING, WAITING, STALLED = EngineState


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines since it was last asked: all of them at INFO, but that of a stall, which is a warning."""
    caplog.set_level(logging.DEBUG, "kvtier.progress")

    def take() -> list[str]:
        assert all(
            record.levelno == (logging.WARNING if "is stalled" in record.getMessage() else logging.INFO)
            for record in caplog.records
        )
        lines = list(caplog.messages)
        caplog.clear()
        return lines

    return take


Said = Callable[[], list[str]]


def progress_of(clock: FakeClock, live: set[str] | None = None) -> PrefillProgress:
    return PrefillProgress(clock, lambda request_id: live is None or request_id in live)


# ---- one prompt ------------------------------------------------------------------------------------------------------


def test_r82_a_prompt_begins_before_its_step_and_runs_and_ends_after_one(clock: FakeClock, said: Said) -> None:
    progress = progress_of(clock)
    progress.begin("a", 1000, 200, 400, is_chunked=True)
    assert said() == [
        "prefill of a begins: 1000 prompt tokens, 200 computed already, 800 remaining, 400 scheduled (chunked)"
    ]
    clock.advance(2.0)
    progress.computed("a", 600)
    assert said() == ["prefill of a runs: 600 of 1000 prompt tokens, 2.0 s so far, eta 2.0 s"]
    progress.begin("a", 1000, 600, 300, is_chunked=True)
    clock.advance(1.0)
    progress.computed("a", 900)
    progress.begin("a", 1000, 900, 100, is_chunked=False)
    clock.advance(0.5)
    progress.computed("a", 1000)
    assert said() == [
        "prefill of a runs: 900 of 1000 prompt tokens, 3.0 s so far, eta 0.4 s",
        "prefill of a is done: 800 tokens computed in 3.500 s",
    ]


def test_r82_a_prompt_of_one_step_has_a_begin_and_a_done(clock: FakeClock, said: Said) -> None:
    progress = progress_of(clock)
    progress.begin("a", 20, 0, 20, is_chunked=False)
    clock.advance(0.25)
    progress.computed("a", 20)
    assert said() == [
        "prefill of a begins: 20 prompt tokens, 0 computed already, 20 remaining, 20 scheduled",
        "prefill of a is done: 20 tokens computed in 0.250 s",
    ]


def test_r82_begin_and_done_are_said_once(clock: FakeClock, said: Said) -> None:
    progress = progress_of(clock)
    for _ in range(3):
        progress.begin("a", 8, 0, 8, is_chunked=False)
    for num_computed in (8, 8, 9, 400):
        clock.advance(1.0)
        progress.computed("a", num_computed)
        progress.begin("a", 8, num_computed, 1, is_chunked=False)
    assert [line.split(":")[0] for line in said()] == ["prefill of a begins", "prefill of a is done"]


@pytest.mark.parametrize(
    ("seconds", "tokens", "lines"), [(0.399, 255, 0), (0.4, 1, 1), (0.0, 256, 1), (0.399, 0, 0), (5.0, 300, 1)]
)
def test_r82_a_line_is_left_out_when_little_time_and_few_tokens_have_passed(
    said: Said, seconds: float, tokens: int, lines: int
) -> None:
    clock = FakeClock(0.0)  # where 0.4 s are exact
    progress = progress_of(clock)
    progress.begin("a", 10_000, 0, 300, is_chunked=True)
    said()
    clock.advance(seconds)
    progress.computed("a", tokens)
    assert len(said()) == lines


def test_r82_the_limit_counts_from_the_last_line(clock: FakeClock, said: Said) -> None:
    progress = progress_of(clock)
    progress.begin("a", 10_000, 0, 100, is_chunked=True)
    said()
    lines = []
    for step in range(1, 31):
        clock.advance(0.001)
        progress.computed("a", 100 * step)
        lines.append(len(said()))
    assert lines == [0, 0, 1] * 10
    for _ in range(4):
        clock.advance(0.25)
        progress.computed("a", 3010)
        lines.append(len(said()))
    assert lines[30:] == [0, 1, 0, 1]


def test_r82_a_rate_that_cannot_be_told_gives_no_eta(clock: FakeClock, said: Said) -> None:
    progress = progress_of(clock)
    progress.begin("a", 1000, 0, 512, is_chunked=True)
    progress.computed("a", 512)
    progress.begin("b", 1000, 100, 512, is_chunked=True)
    clock.advance(3.0)
    progress.computed("b", 100)
    clock.advance(-60.0)
    progress.computed("b", 500)
    assert [line.split(", ", 1)[1] for line in said() if "runs" in line] == [
        "0.0 s so far, eta unknown",
        "3.0 s so far, eta unknown",
        "0.0 s so far, eta unknown",
    ]


def test_r82_a_request_that_was_preempted_begins_anew_and_an_aborted_one_says_no_more(
    clock: FakeClock, said: Said
) -> None:
    progress = progress_of(clock)
    progress.begin("a", 1000, 0, 500, is_chunked=True)
    progress.computed("a", 500)
    clock.advance(60.0)
    progress.forget("a")
    progress.forget("a")
    progress.computed("a", 1000)
    said()
    progress.begin("a", 1000, 16, 984, is_chunked=False)
    clock.advance(1.0)
    progress.computed("a", 1000)
    assert said() == [
        "prefill of a begins: 1000 prompt tokens, 16 computed already, 984 remaining, 984 scheduled",
        "prefill of a is done: 984 tokens computed in 1.000 s",
    ]
    progress.forget("a")
    assert len(progress) == 0


# ---- many ------------------------------------------------------------------------------------------------------------


def test_r82_above_64_prompts_those_done_or_gone_are_dropped(clock: FakeClock, said: Said) -> None:
    live = {f"r{index}" for index in range(64)}
    progress = progress_of(clock, live)
    for index in range(64):
        progress.begin(f"r{index}", 8, 0, 4, is_chunked=True)
        if index < 20:
            progress.computed(f"r{index}", 8)
    live -= {f"r{index}" for index in range(10, 50)}
    assert len(progress) == 64
    live.add("one more")
    said()
    progress.begin("one more", 8, 0, 4, is_chunked=True)
    assert len(progress) == 64 - 50 + 1
    progress.computed("r63", 8)
    progress.computed("one more", 8)
    progress.computed("r0", 8)
    assert [line.split(":")[0] for line in said()] == [
        "prefill of one more begins",
        "prefill of r63 is done",
        "prefill of one more is done",
    ]


def test_r82_requests_that_never_end_their_prompt_do_not_pile_up(clock: FakeClock) -> None:
    live: set[str] = set()
    progress = progress_of(clock, live)
    for index in range(10_000):
        live.clear()
        live.add(f"r{index}")
        progress.begin(f"r{index}", 8, 0, 4, is_chunked=True)
        assert len(progress) <= 64


# ---- the heartbeat ---------------------------------------------------------------------------------------------------


def counts(state: EngineState, tokens: int = 10) -> StepCounts:
    idle = state is IDLE
    return StepCounts(
        num_unfinished=0 if idle else 3,
        num_running=0 if idle else 1,
        num_waiting=0 if idle else 2,
        num_staging=0 if idle else 1,
        num_tokens=tokens if state is WORKING else 0,
        is_event_due=state is WAITING,
    )


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("before", EngineState)
def test_r82_a_change_of_state_is_said_once(
    clock: FakeClock, said: Said, before: EngineState, state: EngineState
) -> None:
    heartbeat = Heartbeat(clock)
    assert heartbeat.state is IDLE
    heartbeat.beat(counts(before))
    clock.advance(1.0)
    said()
    for _ in range(3):
        heartbeat.beat(counts(state))
        assert heartbeat.state is state
    lines = said()
    assert len(lines) == (before is not state)
    assert all(line.startswith(f"engine is {state.value}: ") for line in lines)


def test_r82_the_line_has_the_counts(clock: FakeClock, said: Said) -> None:
    heartbeat = Heartbeat(clock)
    clock.advance(5.0)
    heartbeat.beat(counts(WORKING, tokens=12))
    assert said() == [
        (
            "engine is working: 3 unfinished, 1 running, 2 waiting, 1 of them staging; since the last line 1 steps, "
            "1 with the model, 12 tokens, 5.0 s"
        )
    ]
    for state, tokens in ((WORKING, 7), (WORKING, 8), (WAITING, 0)):
        clock.advance(2.0)
        heartbeat.beat(counts(state, tokens))
    assert said() == [
        (
            "engine is waiting: 3 unfinished, 1 running, 2 waiting, 1 of them staging; since the last line 3 steps, "
            "2 with the model, 15 tokens, 6.0 s"
        )
    ]


@pytest.mark.parametrize("state", [WORKING, WAITING, STALLED])
def test_r82_within_a_state_a_line_comes_every_30_seconds_at_most(
    clock: FakeClock, said: Said, state: EngineState
) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.beat(counts(state))
    said()
    lines = []
    for _ in range(100):
        clock.advance(1.0)
        heartbeat.beat(counts(state))
        lines.append(len(said()))
    assert [second for second, count in enumerate(lines, 1) if count] == [30, 60, 90]


def test_r82_the_last_request_s_own_step_leaves_the_engine_idle(clock: FakeClock) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.beat(counts(WORKING))
    heartbeat.beat(StepCounts(0, 0, 0, 0, num_tokens=5, is_event_due=True))
    assert heartbeat.state is IDLE


def test_r82_work_and_waits_in_turn_do_not_flood_the_log_and_a_stall_is_said_at_once(
    clock: FakeClock, said: Said
) -> None:
    heartbeat = Heartbeat(clock)
    for _ in range(1000):
        clock.advance(0.01)
        heartbeat.beat(counts(WORKING))
        heartbeat.beat(counts(WAITING))
    assert 5 <= len(said()) <= 12
    heartbeat.beat(counts(WORKING))
    heartbeat.beat(counts(STALLED))
    assert said()[-1].startswith("engine is stalled: ")
    heartbeat.beat(counts(WORKING))
    assert said()[-1].startswith("engine is working: ")


def test_r82_a_change_held_back_is_said_when_the_second_is_over(clock: FakeClock, said: Said) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.beat(counts(WORKING))
    said()
    for seconds, lines in ((0.5, 0), (0.4, 0), (0.2, 1), (0.1, 0)):
        clock.advance(seconds)
        heartbeat.beat(counts(WAITING))
        assert heartbeat.state is WAITING
        assert len(said()) == lines
