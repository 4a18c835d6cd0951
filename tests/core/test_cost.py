"""What computing and reading cost: learnt exactly from exact measurements, roughly from rough ones, never absurd."""

from __future__ import annotations

import itertools
import random
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost import MAX_AGE_S, PrefillCost, TierCost
from kvtier.testing import FakeClock

PER_TOKEN_S, PER_PAIR_S = 2e-5, 3e-10
LATENCY_S, RATE = 0.002, 4e9


def pairs(position: int, num_tokens: int) -> float:
    return num_tokens * (position + num_tokens / 2)


def prefill_s(position: int, num_tokens: int) -> float:
    return PER_TOKEN_S * num_tokens + PER_PAIR_S * pairs(position, num_tokens)


def measure(cost: PrefillCost, position: int, num_tokens: int, factor: float = 1.0) -> None:
    cost.observe(num_tokens, pairs(position, num_tokens), factor * prefill_s(position, num_tokens))


def read(cost: TierCost, nbytes: int, queued_bytes: int = 0, factor: float = 1.0) -> None:
    cost.observe(nbytes, queued_bytes, factor * (LATENCY_S + (nbytes + queued_bytes) / RATE))


# ---- computing -------------------------------------------------------------------------------------------------------


def test_nothing_is_known_of_computing_before_the_first_measurement() -> None:
    cost = PrefillCost()
    assert (cost.estimate(0, 100), cost.backlog(100)) == (None, None)
    measure(cost, 0, 100)
    assert cost.estimate(0, 100) == pytest.approx(prefill_s(0, 100))


def test_two_sizes_tell_both_coefficients() -> None:
    cost = PrefillCost()
    for position in (0, 60_000, 0, 60_000):
        measure(cost, position, 512)
    for position, num_tokens in itertools.product((0, 1000, 500_000), (1, 4096, 100_000)):
        assert cost.estimate(position, num_tokens) == pytest.approx(prefill_s(position, num_tokens), rel=1e-3)


def test_one_size_again_and_again_is_all_tokens() -> None:
    cost = PrefillCost()
    for _ in range(50):
        measure(cost, 0, 512)
    assert cost.estimate(0, 1024) == pytest.approx(2 * prefill_s(0, 512))
    assert cost.estimate(10_000, 1024) == cost.estimate(0, 1024)


def test_a_chunk_later_in_its_prompt_costs_more() -> None:
    cost = PrefillCost()
    for position in (0, 8192):
        measure(cost, position, 512)
    early, late = cost.estimate(0, 512), cost.estimate(100_000, 512)
    assert early is not None
    assert late is not None
    assert late > 1.5 * early


def test_a_backlog_is_of_prompts_like_those_measured() -> None:
    cost = PrefillCost()
    for _ in range(5):
        for position in (0, 1024):
            measure(cost, position, 1024)
    one_prompt = prefill_s(0, 1024) + prefill_s(1024, 1024)
    assert cost.backlog(20 * 2048) == pytest.approx(20 * one_prompt, rel=0.02)
    whole = cost.estimate(0, 20 * 2048)
    assert whole is not None
    assert whole > 20.5 * one_prompt  # one prompt of that length costs more than twenty


def test_computing_that_gets_slower_is_noticed() -> None:
    cost = PrefillCost()
    for _ in range(100):
        measure(cost, 0, 512)
    for _ in range(100):
        measure(cost, 0, 512, factor=3)
    assert cost.estimate(0, 512) == pytest.approx(3 * prefill_s(0, 512), rel=0.02)


@pytest.mark.parametrize("factor", [1000.0, 0.0001])
def test_one_outlier_moves_the_estimate_by_a_little_and_not_for_long(factor: float) -> None:
    cost = PrefillCost()
    for _ in range(100):
        measure(cost, 0, 512)
    measure(cost, 0, 512, factor=factor)
    estimate = cost.estimate(0, 512)
    assert estimate is not None
    assert 0.9 < estimate / prefill_s(0, 512) < 1.5
    for _ in range(60):
        measure(cost, 0, 512)
    assert cost.estimate(0, 512) == pytest.approx(prefill_s(0, 512), rel=0.05)


def test_a_first_step_that_was_a_thousand_times_too_slow_is_forgotten() -> None:
    cost = PrefillCost()
    measure(cost, 0, 512, factor=1000)
    for _ in range(250):
        measure(cost, 0, 512)
    assert cost.estimate(0, 512) == pytest.approx(prefill_s(0, 512), rel=0.1)


@pytest.mark.parametrize(
    ("num_tokens", "num_pairs", "seconds"),
    [
        (0, 0.0, 1.0),
        (-5, 1.0, 1.0),
        (5, 1.0, 0.0),
        (5, 1.0, -1.0),
        (5, 1.0, nan),
        (5, 1.0, inf),
        (5, nan, 1.0),
        (5, inf, 1.0),
        (5, -1.0, 1.0),
    ],
)
def test_a_step_that_cannot_be_teaches_nothing(num_tokens: int, num_pairs: float, seconds: float) -> None:
    cost = PrefillCost()
    cost.observe(num_tokens, num_pairs, seconds)
    assert cost.estimate(0, 10) is None
    measure(cost, 0, 512)
    cost.observe(num_tokens, num_pairs, seconds)
    assert cost.estimate(0, 512) == pytest.approx(prefill_s(0, 512))


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.floats(1e-6, 1e4)),
        min_size=1,
        max_size=40,
    ),
    st.integers(-10, 10**7),
    st.integers(-10, 10**7),
)
def test_whatever_was_measured_more_tokens_cost_no_less_and_nothing_is_negative(
    steps: list[tuple[int, int, float]], position: int, num_tokens: int
) -> None:
    cost = PrefillCost()
    for start, length, seconds in steps:
        cost.observe(length, pairs(start, length), seconds)
    fewer, more, later = (
        cost.estimate(position, num_tokens),
        cost.estimate(position, num_tokens + 100),
        cost.estimate(position + 100, num_tokens),
    )
    assert fewer is not None
    assert more is not None
    assert later is not None
    assert 0 <= fewer <= more < inf
    assert fewer <= later < inf
    backlog = cost.backlog(num_tokens)
    assert backlog is not None
    assert 0 <= backlog < inf


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_tier_has_a_latency_and_a_rate_and_a_queue() -> None:
    cost = TierCost(FakeClock())
    assert cost.estimate(1, 0) is None
    assert cost.num_bytes_per_s == 0.0
    for size in (1 << 20, 64 << 20, 1 << 20, 64 << 20):
        read(cost, size)
    assert cost.num_bytes_per_s == pytest.approx(RATE, rel=1e-3)
    assert cost.estimate(0, 0) == pytest.approx(LATENCY_S, rel=1e-2)
    assert cost.estimate(256 << 20, 0) == pytest.approx(LATENCY_S + (256 << 20) / RATE, rel=1e-3)
    assert cost.estimate(1 << 20, 255 << 20) == cost.estimate(256 << 20, 0)


def test_the_first_measurements_are_taken_as_they_are() -> None:
    cost = TierCost(FakeClock())
    read(cost, 64 << 20)
    read(cost, 4096)  # far more than its bytes would take: the latency
    assert cost.estimate(0, 0) == pytest.approx(LATENCY_S, rel=1e-3)


def test_what_was_queued_before_counts_as_read() -> None:
    with_queue, alone = TierCost(FakeClock()), TierCost(FakeClock())
    for _ in range(3):
        read(with_queue, 1 << 20, queued_bytes=31 << 20)
        read(alone, 32 << 20)
    assert with_queue.estimate(32 << 20, 0) == pytest.approx(alone.estimate(32 << 20, 0))


def test_a_tier_that_was_not_measured_for_long_is_unknown_and_its_next_measurement_is_all_that_counts() -> None:
    clock = FakeClock()
    cost = TierCost(clock)
    for _ in range(50):
        read(cost, 32 << 20, factor=100)
    clock.advance(MAX_AGE_S)
    assert cost.estimate(32 << 20, 0) is not None
    clock.advance(0.001)
    assert cost.estimate(32 << 20, 0) is None
    assert cost.last_estimate(32 << 20, 0) == pytest.approx(100 * (LATENCY_S + (32 << 20) / RATE))
    read(cost, 32 << 20)
    assert cost.estimate(32 << 20, 0) == pytest.approx(LATENCY_S + (32 << 20) / RATE)


def test_a_tier_in_use_stays_known() -> None:
    clock = FakeClock()
    cost = TierCost(clock)
    for _ in range(20):
        clock.advance(0.9 * MAX_AGE_S)
        read(cost, 32 << 20)
        assert cost.estimate(1, 0) is not None


def test_a_clock_that_goes_back_keeps_a_tier_known_no_longer_than_ever() -> None:
    clock = FakeClock()
    cost = TierCost(clock)
    read(cost, 32 << 20)
    clock.advance(-500)
    assert cost.estimate(1, 0) is not None
    clock.advance(MAX_AGE_S + 1)
    assert cost.estimate(1, 0) is None


def test_one_slow_read_does_not_make_a_tier_slow() -> None:
    cost = TierCost(FakeClock())
    for _ in range(50):
        read(cost, 32 << 20)
    read(cost, 32 << 20, factor=10_000)
    estimate = cost.estimate(32 << 20, 0)
    assert estimate is not None
    assert estimate < 2 * (LATENCY_S + (32 << 20) / RATE)
    for _ in range(24):
        read(cost, 32 << 20, factor=10_000)
    estimate = cost.estimate(32 << 20, 0)
    assert estimate is not None
    assert estimate > 1000 * (LATENCY_S + (32 << 20) / RATE)


@pytest.mark.parametrize(
    ("nbytes", "queued_bytes", "seconds"),
    [(0, 0, 1.0), (-1, 0, 1.0), (1, -1, 1.0), (1, 0, 0.0), (1, 0, -1.0), (1, 0, nan), (1, 0, inf)],
)
def test_a_read_that_cannot_be_teaches_nothing(nbytes: int, queued_bytes: int, seconds: float) -> None:
    cost = TierCost(FakeClock())
    cost.observe(nbytes, queued_bytes, seconds)
    assert cost.estimate(1, 0) is None


def test_noise_averages_out() -> None:
    noise = random.Random(1)
    cost = TierCost(FakeClock())
    estimates = []
    for _ in range(400):
        read(cost, noise.randrange(1 << 20, 128 << 20), factor=noise.uniform(0.7, 1.3))
        estimates.append(cost.estimate(64 << 20, 0) or nan)
    settled = estimates[50:]
    assert sum(settled) / len(settled) == pytest.approx(LATENCY_S + (64 << 20) / RATE, rel=0.05)
    assert max(settled) < 2 * min(settled)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.floats(1e-6, 1e4), st.floats(-100, 100)),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 1 << 40),
)
def test_whatever_was_read_more_bytes_take_no_less_and_nothing_is_negative(
    reads: list[tuple[int, int, float, float]], nbytes: int
) -> None:
    clock = FakeClock()
    cost = TierCost(clock)
    for size, queued, seconds, later in reads:
        clock.advance(later)
        cost.observe(size, queued, seconds)
    fewer, more = cost.estimate(nbytes, 0), cost.estimate(nbytes, 1 << 30)
    assert fewer is not None
    assert more is not None
    assert 0 <= fewer <= more < inf
    assert isfinite(cost.num_bytes_per_s)
    assert cost.num_bytes_per_s >= 0
