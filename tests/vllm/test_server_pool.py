"""The plug-in over the memory of a kvtier-server: blocks outlive engines there, and the daemon may end any moment."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvtier.reasons import DropReason
from kvtier_connectors.vllm import memory
from kvtier_connectors.vllm.messages import HostAddress, StepPlan
from tests.server.daemon_rig import ServerProcess, short_directory, wait_for
from tests.vllm.plugin import OpenRig, fill, half, prompt, stats, verify_quiet, worker
from tests.vllm.scheduler_rig import SchedulerRig
from tests.vllm.test_plugin_llm import NUM_FULL, OTHERS, PROMPT, ask, with_kvtier

MAX_STEPS = 100_000
LLM_SIZES = {"num_gpu_blocks_override": 48, "max_model_len": 1408}


@pytest.fixture(autouse=True)
def slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the rig, which has no model, teach nothing of what prompts cost: a restore is always worth it."""
    monkeypatch.setattr("kvtier_connectors.vllm.work.MIN_TOKENS", 1 << 30)


@pytest.fixture
def daemon() -> Iterator[ServerProcess]:
    with short_directory() as directory, ServerProcess(directory, {"host.size": "64MiB"}) as server:
        yield server


def over(server: ServerProcess, size: str = "16MiB") -> dict[str, Any]:
    """Settings of an engine whose host pool is the daemon's memory."""
    url = f"kvtier+unix://{server.socket}"
    return {"host.pool": "server", "host.size": size, "server.url": url, "server.timeout_s": 5.0}


def restart(server: ServerProcess) -> None:
    server.kill()
    server.socket.unlink(missing_ok=True)
    server.start()


def num_hits(rig: SchedulerRig) -> int:
    return sum(stats(rig).hits.values())


def step_until(rig: SchedulerRig, what: str, ask_it: Callable[[], bool]) -> None:
    """Short prompts that nobody asked before, until something is so."""
    numbers = iter(range(1 << 30))

    def step() -> bool:
        number = next(numbers)
        rig.add_request(f"{what} {number}", prompt(200_000 + 100 * number, 1), 2)
        rig.run(MAX_STEPS)
        return ask_it()

    wait_for(what, step)


def has_run(rig: SchedulerRig, run: int) -> bool:
    """Whether the worker has this run's memory mapped, once its thread has come to an end with it."""
    taking = worker(rig)._known_memory._taking
    return taking is not None and taking.is_over.wait(10) and taking.error is None and taking.host.run == run


def compute_again(rig: SchedulerRig, name: str) -> int:
    """Ask the prompt of `fill` again; how many of its tokens were computed."""
    rig.add_request(name, prompt(100, 16), 2)
    return sum(step.scheduled.get(name, 0) for step in rig.run(MAX_STEPS))


def test_what_one_engine_stored_the_next_one_loads(daemon: ServerProcess, open_rig: OpenRig) -> None:
    first = open_rig(over(daemon), num_blocks=24)
    wait_for("slots", lambda: first.connector.scheduler_side.store.host_memory)
    fill(first)
    assert half(first).stats().ledger.dropped == {}
    verify_quiet(first)
    first.close()
    rig = open_rig(over(daemon), num_blocks=24)
    assert compute_again(rig, "again") == 8 + 1
    assert stats(rig).hits == {"server": 16}
    verify_quiet(rig)


def test_where_the_pool_is_is_told_until_the_worker_has_begun_a_step_and_then_no_more(
    daemon: ServerProcess, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(over(daemon), num_blocks=24)
    side = rig.connector.scheduler_side
    wait_for("memory", lambda: side.store.host_memory)
    told: list[StepPlan] = []
    begin_step = worker(rig).begin_step

    def begin(plan: StepPlan) -> None:
        told.append(plan)
        begin_step(plan)

    monkeypatch.setattr(worker(rig), "begin_step", begin)
    fill(rig)
    hosts = [plan.host for plan in told]
    serials = {plan.serial for plan in told if plan.host is not None}
    assert serials == {1}
    assert hosts[0] == HostAddress(os.getpid(), *side.store.host_memory)
    verify_quiet(rig)


def test_a_daemon_that_comes_after_the_engine_is_used_from_then_on(open_rig: OpenRig) -> None:
    with short_directory() as directory:
        server = ServerProcess(directory, {"host.size": "64MiB"})
        rig = open_rig(over(server), num_blocks=24)
        fill(rig)
        assert (num_hits(rig), half(rig).stats().ledger.stored) == (0, 0)
        assert worker(rig)._known_memory.host is None
        with server.start():
            step_until(rig, "memory", lambda: has_run(rig, 1))
            fill(rig, "later ")
            assert compute_again(rig, "again") == 8 + 1
            assert num_hits(rig) == 16
            verify_quiet(rig)
            rig.close()


def test_a_daemon_that_is_killed_costs_what_it_had_and_its_next_run_is_used(
    daemon: ServerProcess, open_rig: OpenRig
) -> None:
    rig = open_rig(over(daemon), num_blocks=24)
    wait_for("memory", lambda: rig.connector.scheduler_side.store.host_memory)
    fill(rig)
    assert compute_again(rig, "first") == 8 + 1
    buffer = worker(rig)._known_memory.buffer
    for number in range(2, 4):
        daemon.kill()
        fill(rig, f"without {number} ")
        restart(daemon)
        step_until(rig, f"run {number}", partial(has_run, rig, number))
        assert worker(rig)._known_memory.buffer is buffer
        fill(rig, f"with {number} ")
        before = num_hits(rig)
        assert compute_again(rig, f"again {number}") == 8 + 1
        assert num_hits(rig) == before + 16
    verify_quiet(rig)


@pytest.mark.parametrize("seed", range(3))
def test_any_traffic_while_the_daemon_is_killed_and_comes_again(seed: int, open_rig: OpenRig) -> None:
    chance = random.Random(seed)
    with short_directory() as directory, ServerProcess(directory, {"host.size": "64MiB"}) as server:
        rig = open_rig(over(server, "4MiB"), num_blocks=chance.choice([14, 24]), max_num_seqs=4)
        wait_for("memory", lambda: rig.connector.scheduler_side.store.host_memory)
        for number in range(60):
            tokens = prompt(10_000 * chance.randrange(4), chance.randrange(1, 10), chance.randrange(1, 32))
            rig.add_request(f"r{number}", tokens, chance.choice([1, 3, 40]))
            for _ in range(chance.randrange(12)):
                if rig.scheduler.has_requests():
                    rig.step()
            if number % 20 == 10:
                server.kill()
            elif number % 20 == 15:
                restart(server)
        rig.run(MAX_STEPS)
        assert set(rig.finished.values()) == {"length"}
        verify_quiet(rig)
        rig.close()


def test_a_worker_that_cannot_map_fails_its_copies_with_one_reason_and_tries_again(
    daemon: ServerProcess, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "RETRY_S", 0.0)
    may_open, opened = threading.Event(), memory._open

    def refusing(host: HostAddress) -> int:
        if not may_open.is_set():
            raise PermissionError("not for you")
        return opened(host)

    monkeypatch.setattr(memory, "_open", refusing)
    rig = open_rig(over(daemon), num_blocks=24)
    wait_for("memory", lambda: rig.connector.scheduler_side.store.host_memory)
    step_until(rig, "refusal", lambda: worker(rig)._known_memory.error is not None)
    fill(rig)
    ledger = half(rig).stats().ledger
    assert (ledger.stored, ledger.dropped[DropReason.COPY_FAILED] > 0) == (0, True)
    assert caplog.text.count("nothing is copied to or from host memory: PermissionError: not for you") == 1
    assert set(rig.finished.values()) == {"length"}
    may_open.set()
    step_until(rig, "mapping", lambda: has_run(rig, 1))
    fill(rig, "later ")
    assert compute_again(rig, "again") == 8 + 1
    verify_quiet(rig)


def test_restored_from_the_servers_memory_by_another_engine_is_a_prefix_hit_bit_for_bit(make_llm: Any) -> None:
    with short_directory() as directory, ServerProcess(directory, {"host.size": "1GiB"}) as server:
        transfer = with_kvtier(**over(server, "512MiB"))
        llm = make_llm(kv_transfer_config=transfer, **LLM_SIZES)
        assert ask(llm, PROMPT)[0] == 0
        hit = ask(llm, PROMPT)
        assert hit[0] == NUM_FULL
        for other in OTHERS:
            ask(llm, other)
        assert llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side.kv.stats().ledger.stored > 0
        llm = make_llm(kv_transfer_config=transfer, **LLM_SIZES)
        assert ask(llm, PROMPT) == hit
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        stats = connector.scheduler_side.store.stats()
        assert stats.hits == {"server": NUM_FULL // 32}
        assert stats.server.mapped_bytes == 1 << 30
        assert (stats.server.errors, stats.server.refusals, stats.server.damaged_blocks) == ({}, {}, 0)
        assert not connector._errors
        make_llm.close()


def test_a_daemon_killed_between_prompts_costs_a_computation_and_its_next_run_is_stored_to(make_llm: Any) -> None:
    with short_directory() as directory, ServerProcess(directory, {"host.size": "1GiB"}) as server:
        llm = make_llm(kv_transfer_config=with_kvtier(**over(server, "512MiB")), **LLM_SIZES)
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        side = connector.scheduler_side
        cold = ask(llm, PROMPT)
        hit = ask(llm, PROMPT)
        assert (cold[0], hit[0]) == (0, NUM_FULL)
        for other in OTHERS:
            ask(llm, other)
        restart(server)
        lost = ask(llm, PROMPT)
        assert (lost[0], lost[1]) == (0, cold[1])
        wait_for("its next run", lambda: (found := side.store.host_memory) is not None and found.run == 2)
        before = side.store.stats().hits.get("server", 0)
        for other in OTHERS:
            ask(llm, other)
        assert ask(llm, PROMPT) == hit
        assert sum(side.store.stats().hits.values()) > before
        assert not connector._errors
        make_llm.close()
