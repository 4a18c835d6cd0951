"""The product in simulated time: the same each time, nothing leaked, and the guards that the benchmark takes away."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from benchmarks.agents import Inputs, run_agents
from benchmarks.agents_under_pressure import Load, missed_bars
from benchmarks.guards import GUARDS, without
from kvtier_engine.config import EngineConfig
from kvtier_engine.testing.simulation import Machine, MachineRates, Simulation, Step
from kvtier_engine.testing.timeline import Lane, SimulatedThreads, Timeline

RATES = MachineRates(
    prefill_tokens_per_s=1000, decode_step_s=0.01, decode_request_s=0.001, copy_bytes_per_s=1e9, disk_bytes_per_s=1e8
)
BLOCK = 64
MIB = 1 << 20


def small_machine(**sizes: int) -> Machine:
    """Blocks of 1 MiB: a copy takes 1 ms, a read 10 ms, computing one 64 ms."""
    sizes = {"num_blocks": 16, "host_blocks": 8, "disk_bytes": 1 << 30} | sizes
    return Machine(RATES, block_tokens=BLOCK, token_bytes=MIB // BLOCK, **sizes)


def small_inputs(**changes: Any) -> Inputs:
    """Four agents on a pool that holds two of their contexts."""
    small: dict[str, Any] = {
        "minutes": 1.0,
        "agents": 4,
        "slots": 3,
        "pool_blocks": 24,
        "block_tokens": BLOCK,
        "max_batch_tokens": 128,
        "min_context": 500,
        "max_context": 900,
        "min_tool_tokens": 10,
        "max_tool_tokens": 60,
        "min_output_tokens": 20,
        "max_output_tokens": 80,
        "prefill_tokens_per_s": 2000.0,
        "token_bytes": MIB // BLOCK,
        "copy_bytes_per_s": 2e9,
        "disk_bytes_per_s": 2e8,
    }
    return Inputs(**(small | changes))


def prompt(seed: int, num_blocks: int) -> list[int]:
    return [seed * 1000 + index for index in range(num_blocks * BLOCK)]


def outputs_of(simulation: Simulation) -> dict[str, Any]:
    """Filled with the last output of each request."""
    outputs: dict[str, Any] = {}

    def note(step: Step) -> None:
        outputs.update({output.request_id: output for output in step.result.outputs if output.finished})

    simulation.on_step(note)
    return outputs


def test_steps_take_the_time_that_the_rates_say() -> None:
    with Simulation(small_machine(host_blocks=0, disk_bytes=0), EngineConfig(max_batch_tokens=256)) as simulation:
        outputs = outputs_of(simulation)
        simulation.at(1.0, lambda: simulation.add_request("a", prompt(1, 8), max_tokens=11))
        simulation.run(until=10.0)
        assert outputs["a"].ttft_s == pytest.approx(8 * BLOCK / 1000)
        assert simulation.num_steps == 2 + 10
        assert simulation.num_empty_steps == 0
        assert simulation.now() == 10.0
        simulation.settle()


def test_a_prompt_comes_back_from_host_memory_and_disk_faster_than_it_is_computed() -> None:
    with Simulation(small_machine(), EngineConfig(max_batch_tokens=256)) as simulation:
        outputs = outputs_of(simulation)
        for index in range(4):  # 4 x 6 blocks: more than the pool and host memory hold
            ask = partial(simulation.add_request, str(index), prompt(index, 6), max_tokens=2)
            simulation.at(float(index), ask)
        simulation.at(8.0, lambda: simulation.add_request("again", [*prompt(0, 6), 7], max_tokens=2))
        simulation.run(until=12.0)
        assert simulation.disk is not None
        assert simulation.store is not None
        assert outputs["again"].restored_tokens >= 4 * BLOCK
        assert outputs["again"].ttft_s < outputs["0"].ttft_s / 2
        assert simulation.disk.num_blocks > 0
        assert simulation.store.stats().hits["disk"] > 0
        simulation.settle()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_agents_is_the_same_each_time_and_leaks_nothing(seed: int) -> None:
    inputs = small_inputs(seed=seed)
    figures = run_agents(inputs)  # ends with `settle`, which raises when something is left
    assert figures == run_agents(inputs)
    assert figures["turns"] > 20
    assert figures["restores"] > 0
    assert missed_bars(inputs, figures, None) == []


def test_another_seed_is_another_run() -> None:
    assert run_agents(small_inputs(seed=1)) != run_agents(small_inputs(seed=2))


def test_without_the_escape_the_engine_stalls() -> None:
    inputs = small_inputs(minutes=4.0, client_timeout_s=120.0)
    with without("escape"):
        figures = run_agents(inputs)
    assert figures["stalls"] > 0
    assert figures["longest_quiet_s"] > 60
    assert figures["client_timeouts"] > 0
    assert run_agents(inputs)["stalls"] == 0


@pytest.mark.parametrize("guard", sorted(set(GUARDS) - {"escape"}))
def test_each_other_guard_can_be_taken_away(guard: str) -> None:
    with without(guard):
        assert run_agents(small_inputs())["turns"] > 0


def test_a_load_that_no_engine_can_serve_is_known_by_formula() -> None:
    assert Load.of(small_inputs()).is_served_in_time
    assert not Load.of(small_inputs(pool_blocks=10)).holds_one
    assert not Load.of(small_inputs(client_timeout_s=0.5)).is_served_in_time


# ---- simulated time --------------------------------------------------------------------------------------------------


def test_background_events_happen_during_work_and_others_after_it() -> None:
    timeline = Timeline()
    seen: list[tuple[str, float]] = []
    timeline.at(1.0, lambda: seen.append(("client", timeline.now())))
    timeline.at(2.0, lambda: seen.append(("copy", timeline.now())), is_background=True)
    cancelled = timeline.at(2.5, lambda: seen.append(("never", timeline.now())), is_background=True)
    cancelled.cancel()
    timeline.work_until(3.0)
    assert seen == [("copy", 2.0)]
    assert timeline.run_due() == 1
    assert seen == [("copy", 2.0), ("client", 3.0)]
    assert timeline.num_background == 0


def test_a_lane_moves_one_thing_at_a_time() -> None:
    timeline = Timeline()
    lane = Lane(timeline, bytes_per_s=10)
    assert [lane.take(10), lane.take(5)] == [1.0, 1.5]
    timeline.work_until(4.0)
    assert lane.take(10) == 5.0


def test_jobs_sleep_side_by_side_and_keep_a_thread_for_what_is_urgent() -> None:
    timeline = Timeline()
    threads = SimulatedThreads(timeline, "test", num_threads=2)
    ended: list[tuple[str, float]] = []

    def submit(name: str, *, urgent: bool) -> None:
        def job() -> None:
            threads.sleep_until(timeline.now() + 1.0)
            ended.append((name, timeline.now()))

        assert threads.try_submit(job, urgent=urgent)

    for name in ("write 1", "write 2"):
        submit(name, urgent=False)
    submit("read", urgent=True)
    timeline.work_until(5.0)
    assert ended == [("read", 1.0), ("write 1", 1.0), ("write 2", 2.0)]
    assert threads.close(1.0) == []


def test_what_a_job_lets_out_is_raised_and_what_sleeps_ends_at_close() -> None:
    timeline = Timeline()
    threads = SimulatedThreads(timeline, "test", num_threads=2)
    ended: list[str] = []

    def fail() -> None:
        raise ValueError("of the job")

    def sleep() -> None:
        threads.sleep_until(100.0)
        ended.append("slept")

    threads.try_submit(fail, urgent=True)
    with pytest.raises(ValueError, match="of the job"):
        timeline.work_until(1.0)
    threads.try_submit(sleep, urgent=True)
    timeline.work_until(2.0)
    threads.try_submit(sleep, urgent=False)
    assert threads.close(1.0) == [sleep]
    assert ended == ["slept"]
    assert not threads.try_submit(sleep, urgent=True)
