"""Engines whose host pool is a kvtier-server's memory: stored by one, restored by another, with a daemon that dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import MonotonicClock
from kvtier.decisions import ADMITTED, Decision
from kvtier.executor import ThreadExecutor
from kvtier.metrics import LedgerSnapshot, ServerStats
from kvtier.protocol.admin import AskDecisions, DecisionRow
from kvtier.server.admin_client import AdminClient
from kvtier.store import Store
from kvtier_connectors import KVOptions
from kvtier_engine.request import RequestOutput
from kvtier_engine.testing.fake_model import FakeRunner, linear_cost
from kvtier_engine.testing.rig import ENOUGH_MEMORY, EngineRig
from kvtier_engine.verdict import Verdict
from tests.server.daemon_rig import ServerProcess, short_directory
from tests.server_tier.rig import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BOUND_S = 30.0
TIMEOUT_S = 1.0
LATE_S = 3.0  # a bound that was kept, on a machine that is busy
ROOT = Path(__file__).parents[2]
DISK = {"disk.size": "64MiB", "disk.min_free": 0}

OpenEngine = Callable[..., "PoolRig"]


def prompt(size: int = 17, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def add_up(ledger: LedgerSnapshot) -> bool:
    return ledger.due == ledger.stored + sum(ledger.dropped.values()) + ledger.pending


class ModelClock(MonotonicClock):
    """The engine's: real, but that its model takes a second a token, so that restoring is always worth it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds

    def end_step(self) -> None:
        self._ahead_s = 0.0


class PoolRig(EngineRig):
    """An engine over the fake model, with copies and tier on threads of their own, in real time. After each step, all
    books are held against each other."""

    def __init__(self, url: str, *, num_blocks: int = 8, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> None:
        self.longest_step_s = 0.0
        self._model_clock = ModelClock()
        settings: dict[str, Any] = {"host__pool": "server", "server__url": url, "server__timeout_s": timeout_s}
        super().__init__(
            num_blocks,
            make_store=lambda settings: Store(settings, memory=ENOUGH_MEMORY),
            executor=ThreadExecutor("copies", 64),
            clock=self._model_clock,
            runner=FakeRunner(num_blocks, 4, clock=self._model_clock, seconds=linear_cost(per_token=1.0)),
            **(settings | kwargs),
        )

    @property
    def opened(self) -> Store:
        assert self.store is not None
        return self.store

    @property
    def server(self) -> ServerStats:
        stats = self.opened.stats().server
        assert stats is not None
        return stats

    @property
    def num_free(self) -> int:
        """Slots at hand."""
        classes = self.opened.pool.classes()  # type: ignore[attr-defined]
        return sum(stock.num_free for stock in classes.values())

    def wait_ready(self) -> None:
        """Until the server is there, and slots are."""
        until("the server is used", lambda: self.opened.tier("server").is_available and self.num_free > 0)

    def settle(self) -> None:
        """Until nothing is on its way, and nothing is kept here that the server has."""
        until("all is written", lambda: not self.opened.is_writing)
        until("host memory is empty", lambda: not self.opened.host.num_blocks)

    def run(self, max_steps: int = 100_000) -> None:
        deadline = time.monotonic() + BOUND_S
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            assert time.monotonic() < deadline, f"{self.engine.num_unfinished} requests are left"
            self.one_step()
        raise AssertionError(f"{self.engine.num_unfinished} requests are left after {max_steps} steps")

    def one_step(self) -> None:
        began = time.monotonic()
        result = self.engine.step()
        self._model_clock.end_step()
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)
        self.check()
        for output in result.outputs:
            self._take(output)
        if result.verdict is not Verdict.OK:
            self.engine.wait(0.1)

    def check(self) -> None:
        self.engine.check_integrity()
        assert add_up(self.ledger), self.ledger
        assert add_up(self.opened.tier("server").write_behind.ledger.snapshot())
        stats = self.opened.stats()
        assert stats.asked_blocks == stats.hit_blocks + sum(stats.misses.values())

    def ask(self, tokens: list[int], max_tokens: int = 1, **kwargs: Any) -> RequestOutput:
        """As `generate`, and what that came to is with the server."""
        output = self.generate(tokens, max_tokens, **kwargs)
        self.settle()
        return output

    def verify_quiet(self) -> None:
        self.settle()
        super().verify_quiet()
        usage = self.opened.pool.usage()
        assert usage.used_bytes == usage.num_leases == 0


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def server(directory: Path) -> Iterator[ServerProcess]:
    """With a disk, so that what was written there outlives a kill."""
    with ServerProcess(directory, DISK | {"disk.path": directory / "disk"}) as server:
        yield server


@pytest.fixture
def open_engine(server: ServerProcess) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def make(**kwargs: Any) -> PoolRig:
            rig = PoolRig(f"kvtier+unix://{server.socket}", **kwargs)
            stack.callback(rig.close)
            rig.wait_ready()
            return rig

        yield make


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- down and up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_a_conversation_that_one_engine_stored_another_restores(open_engine: OpenEngine, policy: str) -> None:
    first = open_engine(policy=policy)
    answer = first.ask(prompt(), 8)
    first.engine.flush(BOUND_S)
    first.verify_quiet()
    assert first.server.writes == {"stored": first.ledger.stored} == {"stored": 6}
    second = open_engine(policy=policy)
    turn = [*prompt(), *answer.token_ids]
    assert second.ask([*turn, 7, 7]).restored_tokens == 24
    stats = second.opened.stats()
    assert (stats.hits, stats.host_blocks) == ({"server": 6}, 0)
    assert second.server.reads == {"ok": 6}
    second.verify_quiet()
    assert second.generate([*turn, 7, 7]).gpu_hit_tokens == 24
    second.flush_gpu()
    assert second.ask([*turn, 7, 7]).restored_tokens >= 24, "it comes again, though nothing was kept here"


STORES = """
import sys
from tests.connectors.test_server_pool import *
rig = PoolRig(sys.argv[1], policy="on_evict")
rig.wait_ready()
print(*rig.generate(prompt(21), 6).token_ids)
rig.close()
"""


def test_a_process_restores_what_another_stored_before_it_ended(server: ServerProcess, open_engine: OpenEngine) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STORES, f"kvtier+unix://{server.socket}"]
    child = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=BOUND_S, check=False)
    assert child.returncode == 0, child.stderr
    tokens = [int(word) for word in child.stdout.split()]
    rig = open_engine()
    output = rig.ask([*prompt(21), *tokens], 3)
    assert output.restored_tokens == 24, "a block that was full, and stored as that process left"
    rig.verify_quiet()


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_no_block_is_copied_twice(open_engine: OpenEngine, policy: str) -> None:
    """Turn for turn, from a GPU pool that forgets, blocks that the server has are clean, and so are their ancestors."""
    rig = open_engine(num_blocks=12, policy=policy)
    turns = {name: prompt(9, 1000 * name) for name in range(3)}
    for _ in range(4):
        for name, turn in turns.items():
            answer = rig.ask(turn, 3)
            turns[name] = [*turn, *answer.token_ids, 5, 6]
    assert rig.engine.flush(BOUND_S) == 0
    rig.settle()
    stored = rig.server.writes
    assert stored == {"stored": rig.ledger.stored}, "none was there already"
    assert rig.ledger.stored == sum((len(turn) - 2) // 4 for turn in turns.values())
    assert set(rig.ledger.dropped) == set()
    assert rig.engine.flush(BOUND_S) == 0
    assert rig.server.writes == stored, "what was flushed is not flushed again"
    rig.verify_quiet()


def test_blocks_of_two_engines_that_store_the_same_are_there_once(open_engine: OpenEngine) -> None:
    rigs = [open_engine(policy="write_through") for _ in range(2)]
    for rig in rigs:
        rig.add("same", prompt(30))
    while any(rig.engine.has_work for rig in rigs):
        for rig in rigs:
            rig.one_step()
    for rig in rigs:
        rig.verify_quiet()
    counted = [rig.server.writes for rig in rigs]
    assert sum(each.get("stored", 0) for each in counted) == 7
    assert sum(sum(each.values()) for each in counted) <= 14


@pytest.mark.parametrize("host_blocks", [8, 16, 64])
@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_a_burst_larger_than_the_stock_of_slots_is_stored_whole(
    open_engine: OpenEngine, policy: str, host_blocks: int
) -> None:
    """A quarter of the pool is at hand; the rest comes while blocks are stored."""
    rig = open_engine(num_blocks=256, host_blocks=host_blocks, policy=policy, max_batch_tokens=1024)
    assert rig.num_free == host_blocks // 4
    rig.ask(prompt(801))
    rig.ask(prompt(801, 2000))
    assert rig.engine.flush(BOUND_S) == 0
    assert (rig.ledger.stored, dict(rig.ledger.dropped)) == (400, {})
    rig.verify_quiet()
    assert rig.server.writes == {"stored": 400}
    assert rig.opened.tier("server").write_behind.ledger.snapshot().dropped == {}


def test_a_prompt_larger_than_half_of_the_pool_comes_as_far_as_that(open_engine: OpenEngine) -> None:
    rig = open_engine(num_blocks=16, host_blocks=64, policy="write_through")
    rig.ask(prompt(49))
    assert rig.ledger.stored == 12
    small = open_engine(num_blocks=16, host_blocks=8)
    assert small.ask(prompt(49)).restored_tokens == 16
    small.flush_gpu()
    small.settle()
    assert small.engine.flush(BOUND_S) == 0
    assert small.ask(prompt(49)).restored_tokens == 16
    small.verify_quiet()


def test_a_flush_by_way_of_a_pool_much_smaller_than_the_gpus(open_engine: OpenEngine) -> None:
    rig = open_engine(num_blocks=32, host_blocks=8)
    for start in (0, 1000, 2000):
        rig.generate(prompt(33, start))
    assert rig.engine.flush(BOUND_S) == 0
    rig.settle()
    assert rig.server.writes == {"stored": 24}
    rig.close()
    again = open_engine(num_blocks=32)
    for start in (0, 1000, 2000):
        assert again.ask(prompt(33, start)).restored_tokens == 32
    again.verify_quiet()


def test_a_reset_forgets_what_both_engines_stored(open_engine: OpenEngine) -> None:
    rig, other = open_engine(policy="write_through"), open_engine(policy="write_through")
    rig.ask(prompt())
    assert other.ask(prompt()).restored_tokens == 16
    rig.engine.reset_cache()
    assert (rig.opened.epoch, rig.ask(prompt()).restored_tokens) == (1, 0)
    rig.flush_gpu()
    assert rig.ask(prompt()).restored_tokens == 16, "stored anew, under the new epoch"
    rig.verify_quiet()
    other.flush_gpu()
    other.settle()
    third = open_engine()
    assert (third.opened.epoch, third.ask(prompt()).restored_tokens) == (1, 16)


def test_what_was_decided_is_told_as_of_any_tier(server: ServerProcess, open_engine: OpenEngine) -> None:
    open_engine(policy="write_through").ask(prompt())
    rig = open_engine()
    rig.add("limited", prompt(), options=KVOptions(max_restore_tokens=8))
    rig.run()
    rig.flush_gpu()
    rig.settle()  # what was restored is in host memory until it was given back
    rig.add("longer", prompt(29))
    rig.run()
    told = {name: rig.opened.decisions.find(name)[-1].decision for name in ("limited", "longer")}
    assert told["limited"] == Decision("limited", ADMITTED, 4, {"server": 2}, "limit")
    assert told["longer"] == Decision("longer", ADMITTED, 7, {"server": 4}, "absent")
    with AdminClient(f"{server.socket}.admin", "test") as admin:

        def heard() -> list[DecisionRow]:
            answers = list(admin.ask(AskDecisions(admin.next_id(), "longer")))
            return [answer for answer in answers if isinstance(answer, DecisionRow)]

        until("the daemon was told", lambda: bool(heard()))
        assert heard()[0].fate == ADMITTED
    stats = rig.opened.stats()
    assert stats.hits == {"server": 6}
    assert stats.host_reserved_bytes == 64 * 4096
    rig.settle()
    assert (rig.opened.stats().host_used_bytes, rig.opened.stats().host_blocks) == (0, 0)
    assert rig.server.mapped_bytes == 32 << 20


# ---- a daemon that dies ----------------------------------------------------------------------------------------------


def talk(rig: PoolRig, rounds: int, between: Callable[[int], None], tag: int = 0) -> None:
    """Conversations that come back turn after turn, two at a time; each answer is held against the oracle."""
    turns = {name: prompt(13, 1000 * name) for name in range(1, 7)}
    for number in range(rounds):
        for name, turn in turns.items():
            rig.add(f"{tag} {number} {name}", turn, 2)
            for _ in range(3):
                rig.one_step()
                between(number)
        rig.run()
        for name, turn in list(turns.items()):
            turns[name] = [*turn, *rig.finished[f"{tag} {number} {name}"].token_ids, 9]


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_dies_amid_stores_and_restores_costs_computing_alone(
    server: ServerProcess, open_engine: OpenEngine, policy: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    rig = open_engine(num_blocks=16, policy=policy, restore__max_wait_s=2.0, timeout_s=TIMEOUT_S)
    talk(rig, 2, lambda _: None)
    restored = rig.opened.stats().hit_blocks
    assert restored > 0
    gone: list[int] = []

    def end(number: int) -> None:
        busy = rig.stats.in_flight_blocks > 0 or rig.opened.stats().staging_bytes > 0
        if number == 1 and busy and not gone:
            server.kill() if how == "kill" else server.signal(signal.SIGSTOP)
            gone.append(number)

    talk(rig, 4, end, tag=1)
    assert gone, "it never was busy"
    assert rig.longest_step_s < TIMEOUT_S, "a step waited for the server"
    said = warnings_of(caplog)
    assert sum("the server tier fails" in line for line in said) == 1, said
    assert rig.opened.stats().errors == {}
    if how == "kill":
        server.start()
    else:
        server.signal(signal.SIGCONT)
    until("it is used again", lambda: rig.opened.tier("server").is_available and rig.num_free > 0)
    hits = rig.opened.stats().hits["server"]
    talk(rig, 3, lambda _: None, tag=2)
    assert rig.opened.stats().hits["server"] > hits
    assert rig.engine.flush(BOUND_S) == 0
    rig.verify_quiet()
    assert not [line for line in warnings_of(caplog) if "failed" in line or "kept" in line]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_flush_and_close_keep_their_bounds_without_the_daemon(
    server: ServerProcess, open_engine: OpenEngine, how: str
) -> None:
    rig = open_engine(num_blocks=16, timeout_s=5.0)
    rig.generate(prompt(49))
    server.kill() if how == "kill" else server.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert rig.engine.flush(1.0) + rig.server.writes.get("stored", 0) == 12
    assert time.monotonic() - began < 1.0 + LATE_S
    rig.check()
    began = time.monotonic()
    rig.engine.close(1.0)
    rig.opened.close(1.0)
    assert time.monotonic() - began < 2.0 + LATE_S


def test_an_engine_that_starts_before_the_daemon_joins_it(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = ServerProcess(directory)
    rig = PoolRig(f"kvtier+unix://{server.socket}", policy="write_through")
    try:
        assert rig.generate(prompt()).restored_tokens == 0
        assert rig.opened.stats().errors == {}
        with server:
            rig.wait_ready()
            rig.flush_gpu()
            rig.ask(prompt())
            rig.flush_gpu()
            assert rig.ask(prompt()).restored_tokens == 16
            rig.verify_quiet()
    finally:
        rig.close()
    assert sum("of no use yet" in line for line in warnings_of(caplog)) == 1
