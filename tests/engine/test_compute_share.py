"""Prompts get their share of the contended compute time, exactly over time, and nobody runs up credit or debt."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier_engine.compute_share import ComputeShare, WorkClass

PREFILL, DECODE = WorkClass.PREFILL, WorkClass.DECODE


def select_both(share: ComputeShare) -> WorkClass | None:
    return share.select(decode_runnable=True, prefill_runnable=True)


def turn(share: ComputeShare, prefill_s: float, decode_s: float) -> WorkClass:
    """One contended step, measured at once."""
    work = select_both(share)
    assert work is not None
    share.dispatch(work, contended=True)
    share.record(work, prefill_s if work is PREFILL else decode_s, contended=True)
    return work


def measured(prefill_s: float, decode_s: float, share: float = 0.5) -> ComputeShare:
    """Both classes were measured in two contended turns, and no credit is left."""
    controller = ComputeShare(share)
    assert [turn(controller, prefill_s, decode_s) for _ in range(2)] == [DECODE, PREFILL]
    controller.select(decode_runnable=True, prefill_runnable=False)
    return controller


def runtimes(share: ComputeShare) -> tuple[float, float]:
    return share.runtime(PREFILL), share.runtime(DECODE)


# ---- the share -------------------------------------------------------------------------------------------------------


def steady(prefill_s: float, decode_s: float) -> Iterator[tuple[float, float]]:
    return itertools.repeat((prefill_s, decode_s))


def varying() -> Iterator[tuple[float, float]]:
    rng = random.Random(7)
    while True:
        yield rng.uniform(0.005, 0.3), rng.expovariate(100.0)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.75, 0.9])
@pytest.mark.parametrize(
    "costs",
    [lambda: steady(0.25, 0.01), lambda: steady(0.003, 0.2), varying],
    ids=["slow prompts", "slow decodes", "varying"],
)
def test_r38_the_measured_share_is_the_one_that_was_set(
    costs: Callable[[], Iterator[tuple[float, float]]], share: float
) -> None:
    controller = ComputeShare(share)
    spent, longest = {PREFILL: 0.0, DECODE: 0.0}, 0.0
    for prefill_s, decode_s in itertools.islice(costs(), 10_000):
        work = turn(controller, prefill_s, decode_s)
        spent[work] += prefill_s if work is PREFILL else decode_s
        longest = max(longest, prefill_s, decode_s)
    total = sum(spent.values())
    assert spent[PREFILL] / total == pytest.approx(share, abs=0.01)
    assert abs(spent[PREFILL] - share * total) <= longest, "it is never off by more than one quantum, however many ran"


def test_r38_with_a_step_in_flight_while_the_next_is_chosen() -> None:
    rng = random.Random(11)
    controller = ComputeShare(0.3)
    spent = {PREFILL: 0.0, DECODE: 0.0}
    in_flight: deque[tuple[WorkClass, float]] = deque()
    for _ in range(10_000):
        work = select_both(controller)
        if work is not None:
            controller.dispatch(work, contended=True)
            in_flight.append((work, rng.uniform(0.08, 0.12) if work is PREFILL else rng.uniform(0.01, 0.03)))
        if len(in_flight) == 2 or work is None:
            done, seconds = in_flight.popleft()
            controller.record(done, seconds, contended=True)
            spent[done] += seconds
    assert spent[PREFILL] / sum(spent.values()) == pytest.approx(0.3, rel=0.01)


def test_equal_runtimes_are_the_decodes_turn() -> None:
    assert select_both(ComputeShare(0.9)) is DECODE
    controller = measured(1.0, 1.0)
    assert [turn(controller, 1.0, 1.0) for _ in range(4)] == [DECODE, PREFILL, DECODE, PREFILL]


@pytest.mark.parametrize(("decode", "prefill", "expected"), [(True, False, DECODE), (False, True, PREFILL)])
def test_what_runs_alone_runs(decode: bool, prefill: bool, expected: WorkClass) -> None:
    controller = ComputeShare(0.5)
    assert controller.select(decode, prefill) is expected
    assert controller.select(decode_runnable=False, prefill_runnable=False) is None


def test_until_it_was_measured_a_class_has_one_quantum_in_flight() -> None:
    controller = ComputeShare(0.5)
    assert select_both(controller) is DECODE
    controller.dispatch(DECODE, contended=True)
    assert select_both(controller) is PREFILL, "a second decode would weigh nothing"
    controller.dispatch(PREFILL, contended=True)
    assert select_both(controller) is None
    controller.record(DECODE, 1.0, contended=True)
    assert select_both(controller) is DECODE, "its runtime is the higher, but the prompt's cost is unknown"
    controller.record(PREFILL, 1.0, contended=True)
    assert select_both(controller) is DECODE


def test_a_quantum_in_flight_weighs_what_the_last_one_took() -> None:
    controller = measured(3.0, 1.0, share=0.25)
    select_both(controller)
    controller.dispatch(PREFILL, contended=True)
    assert runtimes(controller) == (12.0, 0.0)
    controller.dispatch(DECODE, contended=True)
    assert runtimes(controller) == (12.0, 1 / 0.75)
    controller.record(PREFILL, 2.0, contended=True)
    assert runtimes(controller) == (8.0, 1 / 0.75), "charged for what it took"
    controller.dispatch(PREFILL, contended=True)
    assert controller.runtime(PREFILL) == 16.0, "which is what the next is expected to take"


# ---- no credit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [DECODE, PREFILL])
def test_r39_uncontended_time_of_any_length_gives_no_credit(alone: WorkClass) -> None:
    controller = measured(1.0, 1.0)
    turn(controller, 1.0, 1.0)
    for _ in range(1000):
        assert controller.select(alone is DECODE, alone is PREFILL) is alone
        controller.dispatch(alone, contended=False)
        controller.record(alone, 60.0, contended=False)
        assert runtimes(controller) == (0.0, 0.0)
    assert [turn(controller, 1.0, 1.0) for _ in range(6)] == [DECODE, PREFILL] * 3


def test_r39_a_class_whose_own_step_is_in_flight_has_not_left() -> None:
    controller = measured(2.0, 1.0)
    assert turn(controller, 2.0, 1.0) is DECODE
    assert select_both(controller) is PREFILL
    controller.dispatch(PREFILL, contended=True)
    assert controller.select(decode_runnable=True, prefill_runnable=False) is DECODE
    controller.dispatch(DECODE, contended=False)
    controller.record(PREFILL, 3.0, contended=True)
    assert select_both(controller) is DECODE
    assert runtimes(controller) == (6.0, 2.0), "what both were charged stands"
    controller.select(decode_runnable=True, prefill_runnable=False)
    assert runtimes(controller) == (0.0, 0.0), "and is gone once nothing is in flight"


def test_r39_uncontended_steps_neither_reserve_nor_settle() -> None:
    controller = measured(2.0, 1.0)
    select_both(controller)
    controller.dispatch(PREFILL, contended=True)
    before = runtimes(controller)
    controller.dispatch(DECODE, contended=False)
    controller.dispatch(PREFILL, contended=False)
    controller.record(PREFILL, 50.0, contended=False)
    assert runtimes(controller) == before
    controller.record(DECODE, 50.0, contended=True)
    assert runtimes(controller) == before, "nothing of the decodes' is in flight"
    controller.record(PREFILL, 2.0, contended=True)
    controller.dispatch(PREFILL, contended=True)
    assert controller.runtime(PREFILL) == 8.0, "and an uncontended time is not taken for the last cost"


# ---- outliers --------------------------------------------------------------------------------------------------------


def test_r40_after_an_outlier_the_other_class_trails_by_one_charge_at_most() -> None:
    controller = measured(1.0, 1.0)
    select_both(controller)
    for _ in range(3):
        controller.dispatch(PREFILL, contended=True)
    for _ in range(3):
        controller.record(PREFILL, 100.0, contended=True)
    assert runtimes(controller) == (600.0, 400.0)
    turns = list(itertools.takewhile(lambda work: work is DECODE, (turn(controller, 1.0, 1.0) for _ in range(500))))
    assert len(turns) == 101, "one outlier's worth of decodes and the tie, not three"


def test_r40_the_clamp_gives_a_trailing_class_time_and_takes_none_from_a_leading_one() -> None:
    controller = measured(1.0, 1.0)
    select_both(controller)
    controller.dispatch(DECODE, contended=True)
    controller.dispatch(PREFILL, contended=True)
    controller.record(DECODE, 100.0, contended=True)
    controller.record(PREFILL, 1.0, contended=True)
    assert runtimes(controller) == (2.0, 200.0)


@pytest.mark.parametrize("seconds", [0.0, -3.0, math.nan, math.inf])
def test_a_time_that_cannot_be_only_returns_the_reservation(seconds: float) -> None:
    controller = measured(2.0, 1.0)
    select_both(controller)
    controller.dispatch(PREFILL, contended=True)
    controller.record(PREFILL, seconds, contended=True)
    assert runtimes(controller) == (0.0, 0.0)
    controller.dispatch(PREFILL, contended=True)
    assert controller.runtime(PREFILL) == 4.0, "the last cost is the last that was one"


# ---- empty steps and reconfiguration ---------------------------------------------------------------------------------


def test_r44_an_empty_step_charges_nobody() -> None:
    controller = measured(3.0, 1.0)
    select_both(controller)
    controller.dispatch(PREFILL, contended=True)
    controller.reconfigure(0.25)
    controller.dispatch(PREFILL, contended=True)
    controller.withdraw(PREFILL)
    assert runtimes(controller) == (6.0, 0.0), "the empty step is the one dispatched last"
    controller.withdraw(PREFILL)
    controller.withdraw(PREFILL)
    controller.withdraw(DECODE)
    assert runtimes(controller) == (0.0, 0.0)
    assert select_both(controller) is DECODE


def test_r44_a_reservation_settles_with_the_share_at_dispatch() -> None:
    controller = measured(1.0, 1.0, share=0.5)
    turn(controller, 1.0, 1.0)
    controller.dispatch(PREFILL, contended=True)
    controller.reconfigure(0.1)
    assert runtimes(controller) == (2.0, 0.0), "other debt is dropped"
    controller.dispatch(PREFILL, contended=True)
    assert controller.runtime(PREFILL) == 12.0
    controller.record(PREFILL, 3.0, contended=True)
    assert controller.runtime(PREFILL) == 16.0, "3 s at a half, and 1 s expected at a tenth"
    controller.record(PREFILL, 2.0, contended=True)
    assert controller.runtime(PREFILL) == 26.0


def test_r44_turned_off_what_is_in_flight_settles_and_nothing_else_is_charged() -> None:
    controller = measured(1.0, 1.0)
    select_both(controller)
    controller.dispatch(DECODE, contended=True)
    controller.reconfigure(None)
    assert not controller.is_on
    controller.dispatch(DECODE, contended=True)
    controller.record(DECODE, 4.0, contended=True)
    controller.record(DECODE, 4.0, contended=True)
    assert controller.runtime(DECODE) == 8.0


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, -0.1, 1.5, math.nan, math.inf, True, "0.5"])
def test_a_share_out_of_range_is_refused_and_changes_nothing(share: float) -> None:
    with pytest.raises(ConfigError, match="share must be None or a number above 0 and below 1, not "):
        ComputeShare(share)
    controller = measured(1.0, 1.0)
    turn(controller, 1.0, 1.0)
    before = runtimes(controller)
    with pytest.raises(ConfigError):
        controller.reconfigure(share)
    assert runtimes(controller) == before


# ---- whatever happens ------------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.booleans(), st.booleans()),
        st.tuples(st.just("settle"), st.integers(0, 3), st.floats(-1.0, 100.0)),
        st.tuples(st.just("withdraw"), st.none(), st.none()),
        st.tuples(st.just("reconfigure"), st.none(), st.floats(0.01, 0.99)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 0.99), OPERATIONS)
def test_r38_r39_r40_r44_whatever_happens(share: float, operations: list[tuple[str, object, object]]) -> None:
    """Against a second count: every runtime is what was charged since contention began, clamped, and what is expected;
    nobody is left out; whoever trails does so by one charge."""
    controller = ComputeShare(share)
    in_flight: dict[WorkClass, list[tuple[bool, float]]] = {PREFILL: [], DECODE: []}
    last: WorkClass | None = None
    for name, first, second in operations:
        if name == "turn":
            assert isinstance(first, bool)
            assert isinstance(second, bool)
            work = controller.select(first, second)
            assert verify_selected(work, first, second, in_flight)
            if not (first and second) and not any(is_contended for q in in_flight.values() for is_contended, _ in q):
                assert runtimes(controller) == (0.0, 0.0)
            if work is not None:
                controller.dispatch(work, first and second)
                in_flight[work].append((first and second, share))
            last = work
        elif name == "settle":
            assert isinstance(first, int)
            assert isinstance(second, float)
            verify_settled(controller, PREFILL if first % 2 else DECODE, second, in_flight)
            last = None
        elif name == "withdraw" and last is not None and in_flight[last][-1][0]:
            controller.withdraw(last)
            in_flight[last].pop()
            last = None
        elif name == "reconfigure":
            assert isinstance(second, float)
            share = second
            controller.reconfigure(share)
    for work, quanta in in_flight.items():
        while quanta:
            verify_settled(controller, work, 1.0, in_flight)
    assert select_both(controller) is not None
    controller.select(decode_runnable=True, prefill_runnable=False)
    assert runtimes(controller) == (0.0, 0.0)


def verify_selected(
    work: WorkClass | None, decode: bool, prefill: bool, in_flight: dict[WorkClass, list[tuple[bool, float]]]
) -> bool:
    if work is None:
        return not (decode or prefill) or all(in_flight.values())
    return prefill if work is PREFILL else decode


def verify_settled(
    controller: ComputeShare, work: WorkClass, seconds: float, in_flight: dict[WorkClass, list[tuple[bool, float]]]
) -> None:
    if not in_flight[work]:
        return
    is_contended, share = in_flight[work].pop(0)
    other = DECODE if work is PREFILL else PREFILL
    before = controller.runtime(other)
    controller.record(work, seconds, is_contended)
    assert controller.runtime(other) >= before, "time is never taken from the other class"
    if is_contended and seconds > 0:
        charge = seconds / (share if work is PREFILL else 1 - share)
        trails_by = controller.runtime(work) - controller.runtime(other)
        assert trails_by <= charge * (1 + 1e-9) + 1e-9
        if not any(contended for contended, _ in in_flight[work]):
            assert controller.runtime(work) >= charge * (1 - 1e-9)
    else:
        assert controller.runtime(other) == before
