"""The tier that fails on order: by its seed, in every way it says, and never with the wrong bytes."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.keys import Key, make_key
from kvtier.testing import DictTier, FakeClock, FaultyTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest

SOON_S = 30.0


def key_of(name: object) -> Key:
    return make_key(bytes(16), hashlib.sha256(str(name).encode()).digest())


def block_of(name: object) -> bytes:
    return hashlib.sha512(str(name).encode()).digest()


def put(tier: FaultyTier, name: object) -> object:
    try:
        return tier.write([WriteRequest(key_of(name), None, memoryview(block_of(name)))])[0]
    except BaseException as error:  # noqa: BLE001 - whatever was injected
        return repr(error)


def get(tier: FaultyTier, name: object) -> object:
    buffer = bytearray(64)
    try:
        outcome = tier.read([ReadRequest(key_of(name), memoryview(buffer))])[0]
    except BaseException as error:  # noqa: BLE001 - whatever was injected
        return repr(error)
    return bytes(buffer) if outcome is ReadOutcome.OK else outcome


def run(seed: int, turns: int = 200) -> tuple[list[object], FaultyTier]:
    clock = FakeClock()
    tier = FaultyTier(
        DictTier(), seed, raise_rate=0.2, error_rate=0.2, damage_rate=0.2, latency_s=0.1, wait=clock.advance
    )
    return [answer for turn in range(turns) for answer in (put(tier, turn), get(tier, turn), clock.now())], tier


def test_a_seed_fails_the_same_way_each_time() -> None:
    assert run(7)[0] == run(7)[0]
    assert run(7)[0] != run(8)[0]


def test_everything_is_injected_and_counted() -> None:
    answers, tier = run(seed=1)
    kinds = {"OSError", "ConnectionResetError", "TimeoutError", "MemoryError", "RuntimeError", "KeyError"}
    assert set(tier.injected) == kinds | {"CancelledError", "latency", "error", "damage"}
    assert tier.injected["latency"] == 400
    assert 0 < answers.count(ReadOutcome.DAMAGED) <= tier.injected["damage"]  # less where the call raised after all
    raised = sum(n for kind, n in tier.injected.items() if kind not in ("latency", "error", "damage"))
    assert sum(isinstance(answer, str) and "injected" in answer for answer in answers) == raised
    assert "seed=1" in repr(tier)
    assert "'damage'" in repr(tier)


@given(st.integers(0, 2**32))
def test_no_fault_gives_the_wrong_bytes(seed: int) -> None:
    answers, tier = run(seed, turns=30)
    for turn in range(30):
        answer = answers[3 * turn + 1]
        assert not isinstance(answer, bytes) or answer == block_of(turn), tier


def test_what_failed_may_be_kept_or_not_and_an_error_leaves_rubbish() -> None:
    inner = DictTier()
    tier = FaultyTier(inner, seed=2, error_rate=1.0)
    keys = [key_of(name) for name in range(50)]
    assert {put(FaultyTier(inner, seed=name, error_rate=1.0), name) for name in range(50)} <= {
        WriteOutcome.ERROR,
        WriteOutcome.STORED,
    }
    assert set(inner.contains(keys)) == {True, False}
    buffer = bytearray(64)
    assert tier.read([ReadRequest(keys[0], memoryview(buffer))]) == [ReadOutcome.ERROR]
    assert buffer != bytes(64)


def test_a_damaged_block_is_forgotten() -> None:
    tier = FaultyTier(DictTier(), seed=3, damage_rate=1.0)
    assert put(tier, "a") is WriteOutcome.STORED
    assert get(tier, "a") is ReadOutcome.DAMAGED
    assert get(tier, "a") is ReadOutcome.MISS
    assert tier.injected == {"damage": 1}


@pytest.mark.parametrize("closing", [False, True])
def test_calls_stall_until_they_are_let_go(closing: bool) -> None:
    tier = FaultyTier(DictTier(), seed=4)
    tier.read_gate.clear()
    assert put(tier, "a") is WriteOutcome.STORED
    assert not tier.wait_until_stalled(timeout=0)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(get, tier, "a") for _ in range(2)]
        assert tier.wait_until_stalled(2)
        assert not any(call.done() for call in calls)
        tier.close() if closing else tier.read_gate.set()
        answers = [call.result(SOON_S) for call in calls]
    assert tier.injected == {"stall": 2}
    assert closing or answers == [block_of("a")] * 2
    tier.close()


def test_writes_stall_by_their_own_gate() -> None:
    tier = FaultyTier(DictTier(), seed=5)
    tier.write_gate.clear()
    assert get(tier, "a") is ReadOutcome.MISS
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(put(tier, "a")))
    thread.start()
    assert tier.wait_until_stalled()
    tier.write_gate.set()
    thread.join(SOON_S)
    assert answers == [WriteOutcome.STORED]


def test_a_stall_that_nobody_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.testing.faults.STALL_BOUND_S", 0.0)
    tier = FaultyTier(DictTier(), seed=6)
    tier.read_gate.clear()
    assert "nobody let a stalled call" in str(get(tier, "a"))


def test_latency_needs_something_to_wait_by() -> None:
    with pytest.raises(ConfigError):
        FaultyTier(DictTier(), seed=0, latency_s=1.0)
