"""Many requests at once, of an engine that has measured nothing: it loses to neither fixed policy for that."""

from __future__ import annotations

import pytest

from benchmarks.restore_or_recompute import Clients, Latency, Load, Policy


def first_tokens(tier_s: float, prefill_s: float, policy: Policy) -> Latency:
    load = Load(tier_s, prefill_s, fixed_s=0.0, pause_s=1.0, pause_spread=0.0, rounds=1)
    return Clients(load, policy, seed=0).run()


@pytest.mark.parametrize(("tier_s", "prefill_s"), [(1.0, 0.0625), (4.0, 0.25)])
def test_a_slow_tier_costs_a_cold_herd_nothing(tier_s: float, prefill_s: float) -> None:
    cost, recompute = (first_tokens(tier_s, prefill_s, policy) for policy in (Policy.COST, Policy.RECOMPUTE))
    assert cost.p99 < 1.02 * recompute.p99
    assert cost.mean < 1.02 * recompute.mean


def test_a_fast_tier_serves_a_cold_herd() -> None:
    cost, restore = (first_tokens(0.02, 0.2, policy) for policy in (Policy.COST, Policy.RESTORE))
    assert cost.p99 < restore.p99 + 2 * 0.2  # those that were computed before anything was known
    assert cost.mean < restore.mean + 2 * 0.2


def test_where_both_are_as_fast_a_cold_herd_uses_both() -> None:
    cost, recompute = (first_tokens(0.05, 0.05, policy) for policy in (Policy.COST, Policy.RECOMPUTE))
    assert cost.p99 < 0.7 * recompute.p99
    assert cost.mean < 0.7 * recompute.mean
