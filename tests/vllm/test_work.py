"""What prompts cost, as the plug-in tells it to the decision."""

from __future__ import annotations

from kvtier.testing import FakeClock
from kvtier_connectors.contract import StepWork
from kvtier_connectors.vllm.work import MIN_TOKENS, PromptWork


def warmed_up(clock: FakeClock) -> PromptWork:
    """One whose first step of many tokens is over, and told nothing."""
    work = PromptWork(clock)
    for serial, num_tokens in ((-2, 1), (-1, 1000)):
        work.begin(serial)
        work.add(serial, 0, num_tokens)
        clock.advance(5.0)
        work.end(serial)
        assert work.take(0) == StepWork(0, 0.0, 5.0, 0)
    return work


def test_a_step_is_told_once_when_it_has_ended() -> None:
    clock = FakeClock()
    work = warmed_up(clock)
    work.begin(1)
    work.add(1, 0, 100)
    work.add(1, 1000, 50)
    assert work.take(7) == StepWork(0, 0.0, 0.0, 7)
    clock.advance(0.5)
    work.end(1)
    assert work.take(7) == StepWork(150, 100 * 50.0 + 50 * 1025.0, 0.5, 7)
    assert work.take(0) == StepWork(0, 0.0, 0.0, 0)


def test_the_rest_of_a_restored_prompt_says_nothing_of_tokens() -> None:
    clock = FakeClock()
    work = warmed_up(clock)
    for serial, num_tokens in ((1, MIN_TOKENS - 1), (2, MIN_TOKENS)):
        work.begin(serial)
        work.add(serial, 992, num_tokens)
        clock.advance(0.06)
        work.end(serial)
        told = work.take(0)
        assert (told.num_tokens, told.seconds > 0.05) == (num_tokens if num_tokens >= MIN_TOKENS else 0, True)


def test_an_end_that_was_not_begun_is_nothing() -> None:
    work = PromptWork(FakeClock())
    work.end(9)
    assert work.take(0).num_tokens == 0
