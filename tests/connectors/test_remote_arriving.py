"""Blocks that only a tier of another machine has: asked for at arrival, waited for within bounds, misses explained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.executor import Executor
from kvtier.keys import BlockDigest
from kvtier.opened import OpenedTier, TierLimits
from kvtier.testing import InlineExecutor, ManualExecutor, RemoteDictTier
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.contract import KVOptions, StepDemand, StepWork
from kvtier_engine.testing.disk import DiskRig
from kvtier_engine.verdict import Verdict

TIMEOUT_S = 0.5
LIMITS = TierLimits(writers=2, timeout_s=TIMEOUT_S, max_cooldown_s=5.0)

OpenRemote = Callable[..., DiskRig]


class SharedTier(RemoteDictTier):
    """As a server that outlives the processes that use it."""

    def close(self) -> None: ...


def prompt(size: int = 17, start: int = 0) -> list[int]:
    return list(range(start, start + size))


@pytest.fixture
def remote() -> SharedTier:
    return SharedTier()


@pytest.fixture
def open_remote(tmp_path: Path, remote: SharedTier) -> Iterator[OpenRemote]:
    """Opens engines on machines of their own, each with an empty disk, over one remote tier; that is the last tier."""
    with ExitStack() as stack:
        opened: list[DiskRig] = []

        def make(*, jobs: Executor | None = None, **kwargs: Any) -> DiskRig:
            """jobs: the remote tier's; those of the disk unless given."""
            rig = DiskRig(tmp_path / f"disk-{len(opened)}", **kwargs)
            opened.append(rig)
            stack.callback(rig.close)
            rig.opened._below.add(OpenedTier(remote, LIMITS), rig.disk_jobs if jobs is None else jobs)
            return rig

        yield make


@pytest.fixture
def fill(open_remote: OpenRemote) -> Callable[..., None]:
    """Have another machine store prompts of 17 tokens, which are four blocks and a token, and close."""

    def store(*starts: int) -> None:
        rig = open_remote()
        for start in starts or (0,):
            rig.generate(prompt(start=start))
        rig.close()

    return store


def counted(rig: DiskRig) -> tuple[dict[str, int], dict[str, int]]:
    stats = rig.opened.stats()
    assert sum(stats.hits.values()) == stats.hit_blocks
    assert sum(stats.misses.values()) + stats.hit_blocks == stats.asked_blocks
    return dict(stats.hits), dict(stats.misses)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kvtier.restore" and r.levelno >= logging.WARNING]


def compute_slowly(rig: DiskRig) -> None:
    """Let a token take a second: a request may then wait as long as it says."""
    assert rig.engine.connector is not None
    rig.engine.connector.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 1000.0, 0)))


def test_another_machine_finds_what_one_stored(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier
) -> None:
    fill()
    rig = open_remote()
    rig.add("a", prompt())
    asked = remote.num_asked
    assert rig.engine.step().verdict is Verdict.WAIT, "it waits for the answer"
    assert remote.num_asked == asked, "which the engine's thread does not fetch"
    rig.run()
    assert (rig.finished["a"].restored_tokens, rig.computed_tokens) == (16, 1)
    assert counted(rig) == ({"remote": 4}, {})
    rig.verify_quiet()
    rig.flush_gpu()
    asked = remote.num_asked
    assert rig.generate(prompt()).restored_tokens == 16
    assert counted(rig)[0] == {"remote": 4, "host": 4}
    assert remote.num_asked == asked, "what host memory has nobody asks for"
    rig.verify_quiet()


def test_a_prompt_that_two_machines_and_the_disk_have_comes_from_each(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier
) -> None:
    rig = open_remote()
    rig.generate(prompt(9))
    rig.forget_host()
    rig.flush_gpu()
    rig.forget_host()
    fill()
    (lower,) = [lower for lower in rig.opened.lower if lower.name == "remote"]
    lower._known.clear()  # type: ignore[union-attr]
    assert rig.generate(prompt()).restored_tokens == 16
    hits = counted(rig)[0]
    assert hits == {"disk": 2, "remote": 2}
    rig.verify_quiet()


def test_a_prompt_that_nobody_has_is_computed_after_the_answer(open_remote: OpenRemote, remote: SharedTier) -> None:
    rig = open_remote()
    assert rig.generate(prompt()).restored_tokens == 0
    assert remote.num_asked == 4
    assert counted(rig) == ({}, {"absent": 4})
    assert rig.opened.stats().fallbacks == {}
    rig.verify_quiet()


def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_computing_takes(
    open_remote: OpenRemote, fill: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    rig = open_remote(restore__max_wait_s=2.0)
    rig.add("a", prompt(), options=KVOptions(max_wait_s=0.25))
    assert rig.step().verdict is Verdict.WAIT
    rig.clock.advance(0.06)
    assert rig.step().verdict is Verdict.WAIT
    rig.clock.advance(0.01)  # a quarter of its wait: the rest is for what others have
    assert rig.step().num_tokens == 17
    assert counted(rig) == ({}, {"timeout": 4})
    assert rig.opened.stats().fallbacks == {"timeout": 1}
    (message,) = warnings_of(caplog)
    for word in ("a", "timeout", "limit 0.250 s", "4 blocks"):
        assert word in message, message
    rig.settle()
    rig.run()
    rig.verify_quiet()


def test_what_is_known_without_the_answer_lands(open_remote: OpenRemote) -> None:
    jobs = InlineExecutor()
    rig = open_remote(jobs=jobs)
    rig.generate(prompt(9))
    rig.forget_host()
    rig.flush_gpu()
    rig.forget_host()
    lower = rig.opened.lower[-1]
    lower._known.clear()  # type: ignore[union-attr]
    lower.asking = ManualExecutor()  # which nobody runs
    try:
        compute_slowly(rig)
        rig.add("a", prompt())
        assert rig.step().verdict is Verdict.WAIT
        rig.clock.advance(4.1)  # a quarter of what computing takes
        rig.run()
        assert rig.finished["a"].restored_tokens == 8
        hits, misses = counted(rig)
        assert hits == {"disk": 2}
        assert misses["timeout"] == 2
    finally:
        lower.asking = lower.executor
    rig.verify_quiet()


@pytest.mark.bug("HS14", "HS16")
def test_a_tier_that_is_sick_costs_no_wait_at_all(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier
) -> None:
    fill()
    rig = open_remote()
    remote.is_sick = True
    for number in range(3):
        rig.generate(prompt(start=1000 + 100 * number))
    (lower,) = [lower for lower in rig.opened.lower if lower.name == "remote"]
    assert not lower.is_available
    rig.add("a", prompt())
    assert rig.step().num_tokens == 17, "the step it came in"
    assert counted(rig)[1]["tier_down"] >= 4
    remote.is_sick = False
    rig.run()
    rig.clock.advance(5.0)
    rig.generate(prompt(start=2000))
    rig.settle()
    assert lower.is_available, "found well by its probe, which traffic asks for"
    assert rig.generate(prompt(start=0)).gpu_hit_tokens + rig.finished["a"].restored_tokens >= 0
    rig.verify_quiet()


def test_a_tier_that_falls_sick_ends_the_wait_for_its_answer(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier, caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    rig = open_remote()
    rig.add("a", prompt())
    assert rig.step().verdict is Verdict.WAIT
    (lower,) = [lower for lower in rig.opened.lower if lower.name == "remote"]
    lower._guard.breaker.trip()
    assert rig.step().num_tokens == 17
    assert counted(rig) == ({}, {"tier_down": 4})
    (message,) = warnings_of(caplog)
    assert "tier_down" in message
    rig.run()
    rig.verify_quiet()


def test_who_does_not_wait_asks_nobody(open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier) -> None:
    fill()
    asked = remote.num_asked
    rig = open_remote()
    rig.add("a", prompt(), options=KVOptions(max_wait_s=0.0))
    assert len(rig.disk_jobs) == 0
    assert rig.step().num_tokens == 17
    rig.run()
    rig.verify_quiet()
    assert remote.num_asked == asked


def test_a_wrong_yes_costs_a_shorter_prefix(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier
) -> None:
    fill()
    rig = open_remote()
    rig.add("a", prompt())
    rig.disk_jobs.run_next()  # the answer: all four
    with remote._lock:
        gone = list(remote._blocks)[2]
        remote._used_bytes -= len(remote._blocks.pop(gone))
    rig.run()
    assert rig.finished["a"].restored_tokens == 8
    hits, misses = counted(rig)
    assert hits == {"remote": 2}
    assert sum(misses.values()) == 2
    rig.verify_quiet()


@pytest.mark.parametrize("way", ["abort", "close"])
def test_whoever_goes_while_it_asks_leaves_nothing(
    open_remote: OpenRemote, fill: Callable[..., None], way: str
) -> None:
    fill()
    rig = open_remote()
    rig.add("a", prompt())
    assert rig.step().verdict is Verdict.WAIT
    if way == "abort":
        rig.abort("a")
    else:
        rig.close()
        return
    rig.settle()
    rig.verify_quiet()
    assert rig.generate(prompt(start=300)).restored_tokens == 0


@pytest.mark.bug("WR23")
def test_after_a_reset_no_machine_finds_what_was_before(
    open_remote: OpenRemote, fill: Callable[..., None], remote: SharedTier
) -> None:
    fill()
    rig = open_remote()
    rig.reset()
    assert remote.epoch == 1
    assert rig.generate(prompt()).restored_tokens == 0
    rig.close()
    later = open_remote()
    later.opened._epoch = remote.epoch  # as a store does that opens over it
    assert later.generate(prompt()).restored_tokens == 16, "stored since"


@pytest.mark.bug("LK05")
def test_once_it_is_written_every_block_can_be_evicted(open_remote: OpenRemote, remote: SharedTier) -> None:
    rig = open_remote(num_blocks=32, host_blocks=16)
    for number in range(10):
        rig.generate(prompt(start=100 * number))
    assert rig.flush() == 0
    host = rig.opened.host
    with rig.opened.pool.owner("all") as owner:
        taken = 0
        while isinstance(host.reserve(b"n" * 16, BlockDigest(bytes([taken]) * 32), None, 64, owner), Reservation):
            taken += 1
        assert taken == 16, "nobody kept a reference"
    remote.is_sick = True
    rig.generate(prompt(start=5000))
    rig.settle()
    rig.verify_quiet()


def test_a_request_says_how_long_its_blocks_are_worth_keeping_and_whose_they_are(
    open_remote: OpenRemote, remote: SharedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_remote()
    asked: list[float | None] = []
    tenants: list[str] = []
    write, reserve, reserve_all = remote.write, rig.opened.host.reserve, rig.opened.host.reserve_all

    def note_write(requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        asked.extend(request.ttl_s for request in requests)
        return write(requests)

    def note_reserve(*args: Any, tenant: str = "", **kwargs: Any) -> Any:
        tenants.append(tenant)
        return reserve(*args, tenant=tenant, **kwargs)

    def note_all(namespace: bytes, blocks: Sequence[Any], *args: Any, tenant: str = "", **kwargs: Any) -> Any:
        tenants.extend([tenant] * len(blocks))
        return reserve_all(namespace, blocks, *args, tenant=tenant, **kwargs)

    monkeypatch.setattr(remote, "write", note_write)
    monkeypatch.setattr(rig.opened.host, "reserve", note_reserve)
    monkeypatch.setattr(rig.opened.host, "reserve_all", note_all)
    rig.add("a", prompt(), options=KVOptions(ttl_s=90.0, tenant="alpha"))
    rig.run()
    assert rig.flush() == 0
    assert asked == [90.0] * 4
    assert tenants == ["alpha"] * 4
    rig.forget_host()
    rig.flush_gpu()
    rig.forget_host()
    tenants.clear()
    rig.add("b", prompt(), options=KVOptions(tenant="beta"))
    rig.run()
    assert rig.finished["b"].restored_tokens == 16
    assert tenants[:4] == ["beta"] * 4, "whoever has them brought pays for the room"


@pytest.mark.parametrize(
    "options", [{"ttl_s": 0}, {"ttl_s": True}, {"ttl_s": float("inf")}, {"tenant": 3}, {"tenant": "t" * 65}]
)
def test_terms_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="KVOptions"):
        KVOptions(**options)
