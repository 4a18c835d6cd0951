"""Agents that talk to one engine in simulated time, each in a loop of its own, and what is measured of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_engine.config import EngineConfig
from kvtier_engine.request import FinishReason, RequestOutput, RequestState
from kvtier_engine.testing.simulation import Event, Machine, MachineRates, Simulation, Step
from kvtier_engine.verdict import Verdict

STALL_S = 2.0
"""Seconds without a token, though nothing is under way, that are a stall: as many as a running request may have to wait
for its next token. An engine that stands still until a bound of 60 s frees it has stalled."""


def given(default: Any, source: str) -> Any:
    """An input and why it is what it is."""
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run depends on. Rates and sizes were fixed before the first run. Where the agents stand when it
    begins was not: see `first_context`."""

    minutes: float = given(30.0, "the incident's run, in simulated time")
    seed: int = given(1, "of lengths, pauses and tokens")
    agents: int = given(12, "the incident: clients, one context each, the next turn after the answer to the last")
    slots: int = given(4, "the incident: max_num_seqs")
    pool_blocks: int = given(319, "the incident: GPU blocks")
    block_tokens: int = given(1024, "the incident: tokens of a block")
    prefill_share: float = given(0.4, "the incident: of contended compute time, for prompts")
    max_batch_tokens: int = given(2048, "tokens of a step: two blocks, a usual chunk for contexts of this length")
    capacity_bound_s: float = given(60.0, "the incident's bound of a restore's wait for blocks, and kvtier's default")
    max_wait_s: float = given(30.0, "kvtier's default: how long a request waits for blocks to come from the disk")
    client_timeout_s: float = given(600.0, "a common default of HTTP clients for LLMs")
    min_context: int = given(40_000, "tokens of a fresh context: instructions, tools and the files it begins with")
    max_context: int = given(100_000, "tokens at which an agent begins anew")
    min_tool_tokens: int = given(500, "what a tool returns: from a listing ...")
    max_tool_tokens: int = given(
        1500, "... to a long file; with the answer some 2,500 a turn, as 40k to 100k in 24 turns"
    )
    min_output_tokens: int = given(1000, "an agentic turn's thinking and calls; with 4 slots at these rates a turn ...")
    max_output_tokens: int = given(2000, "... takes some 25 s of a slot, the incident's 285 turns in 30 minutes")
    min_pause_s: float = given(1.0, "how long a tool runs: an edit ...")
    max_pause_s: float = given(5.0, "... to a short test; uniform between")
    prefill_tokens_per_s: float = given(8000.0, "a dense model of some 30 B parameters on one large GPU")
    decode_step_s: float = given(0.010, "reading such weights once")
    decode_request_s: float = given(0.001, "and each request's KV, some 3 GB, once")
    token_bytes: int = given(40 << 10, "KV of a token: a block is 40 MiB")
    copy_bytes_per_s: float = given(20e9, "PCIe 4.0 x16, as measured for pinned copies")
    host_share: float = given(0.5, "of all contexts, at their mean length, that host memory holds")
    disk_bytes_per_s: float = given(2e9, "one NVMe device, reads and writes together")
    disk_bytes: int = given(1 << 40, "one NVMe device")

    @property
    def host_blocks(self) -> int:
        mean = (self.min_context + self.max_context) / 2
        return max(1, round(self.host_share * self.agents * mean / self.block_tokens))

    @property
    def max_model_len(self) -> int:
        """A context as long as it gets, and its answer."""
        return self.max_context + self.max_output_tokens

    def first_context(self, index: int) -> int:
        """Tokens with which an agent comes: the run begins in the midst of things, and the agents stand at even
        distances in their contexts. None of it is cached.

        Chosen after a first run in which all began with `min_context`: the contexts are then too short for the pool to
        be full before the last minutes, and no guard of the scheduler is ever needed. This start is the harder one.
        """
        return self.min_context + index * (self.max_context - self.min_context) // self.agents

    def open(self) -> Simulation:
        rates = MachineRates(
            self.prefill_tokens_per_s,
            self.decode_step_s,
            self.decode_request_s,
            self.copy_bytes_per_s,
            self.disk_bytes_per_s,
        )
        machine = Machine(
            rates, self.pool_blocks, self.block_tokens, self.token_bytes, self.host_blocks, self.disk_bytes
        )
        config = EngineConfig(
            max_num_seqs=self.slots,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            prefill_share=self.prefill_share,
        )
        bounds = {"restore.capacity_bound_s": self.capacity_bound_s, "restore.max_wait_s": self.max_wait_s}
        return Simulation(machine, config, bounds)


class Agent:
    """One client: a context that grows by what tools return and what the model answers, and then begins anew.

    A turn that the client gave up on has no answer; the next one goes on from the same context.
    """

    def __init__(self, simulation: Simulation, inputs: Inputs, index: int, measures: Measures) -> None:
        self._simulation = simulation
        self._inputs = inputs
        self._measures = measures
        self._random = random.Random(f"{inputs.seed} {index}")
        self._name = f"agent {index}"
        self._num_turns = 0
        self._timer: Event | None = None
        self._context = self._tokens(inputs.first_context(index))
        self._pause()

    @property
    def request_id(self) -> str:
        return f"{self._name}, turn {self._num_turns}"

    def take(self, output: RequestOutput) -> None:
        """The end of its turn."""
        assert self._timer is not None
        self._timer.cancel()
        self._measures.end_turn(output)
        self._context += output.token_ids
        self._pause()

    def _pause(self) -> None:
        inputs = self._inputs
        self._simulation.after(self._random.uniform(inputs.min_pause_s, inputs.max_pause_s), self._ask)

    def _ask(self) -> None:
        inputs = self._inputs
        self._context += self._tokens(self._random.randint(inputs.min_tool_tokens, inputs.max_tool_tokens))
        num_output = self._random.randint(inputs.min_output_tokens, inputs.max_output_tokens)
        if len(self._context) + num_output > inputs.max_context:
            self._context = self._tokens(inputs.min_context)
        self._num_turns += 1
        self._simulation.add_request(self.request_id, self._context, num_output)
        self._measures.agents[self.request_id] = self
        self._timer = self._simulation.after(inputs.client_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._measures.look()
        self._measures.num_timeouts += 1
        self._simulation.abort(self.request_id)
        del self._measures.agents[self.request_id]
        self._pause()

    def _tokens(self, count: int) -> list[int]:
        return list(self._random.randbytes(count))


class Measures:
    """What is counted of a run, from the steps and their outputs."""

    def __init__(self, simulation: Simulation) -> None:
        self.agents: dict[str, Agent] = {}
        """Of the turns that run."""
        self.num_timeouts = 0
        self.num_turns = 0
        self.num_failed = 0
        self.num_stalls = 0
        self.longest_quiet_s = 0.0
        self.max_gap_s = 0.0
        self.num_restores = 0
        self.num_output_tokens = 0
        self.ttfts: list[float] = []
        self._simulation = simulation
        self._last_token: dict[str, float] = {}
        self._restoring: set[str] = set()
        self._quiet_since: float | None = None
        self._quiet_s = 0.0
        self._is_counted = False
        simulation.on_step(self._note_step)

    def end_turn(self, output: RequestOutput) -> None:
        self.num_turns += output.finish_reason is not FinishReason.ERROR
        self.num_failed += output.finish_reason is FinishReason.ERROR
        if output.ttft_s is not None:
            self.ttfts.append(output.ttft_s)

    def look(self) -> None:
        """Account for the time since the last step, in which no request got a token."""
        self._note_gaps()
        self._end_quiet()

    def _note_step(self, step: Step) -> None:
        # `quiet`: from a step that computed nothing, with nothing under way, until the next one.
        if self._quiet_since is not None:
            self._quiet_s += step.began_at - self._quiet_since
            self._quiet_since = None
            self._count_stall(is_stall=self._quiet_s > STALL_S)
        if step.result.num_tokens or not self._simulation.engine.num_unfinished:
            self._quiet_s, self._is_counted = 0.0, False
        else:
            self._count_stall(is_stall=step.result.verdict is Verdict.STALL)
            if not self._simulation.num_under_way:
                self._quiet_since = step.ended_at
        self._note_gaps({output.request_id for output in step.result.outputs if output.new_token_ids})
        for output in step.result.outputs:
            self.num_output_tokens += len(output.new_token_ids)
            if output.finished and (agent := self.agents.pop(output.request_id, None)) is not None:
                agent.take(output)

    def _end_quiet(self) -> None:
        if self._quiet_since is not None:
            now = self._simulation.now()
            self._quiet_s += now - self._quiet_since
            self._quiet_since = now
            self._count_stall(is_stall=self._quiet_s > STALL_S)

    def _count_stall(self, *, is_stall: bool) -> None:
        """Once for each spell without a token."""
        self.longest_quiet_s = max(self.longest_quiet_s, self._quiet_s)
        self.num_stalls += is_stall and not self._is_counted
        self._is_counted |= is_stall

    def _note_gaps(self, served: set[str] | frozenset[str] = frozenset()) -> None:
        now, running = self._simulation.now(), self._simulation.engine.scheduler.running
        for request_id, last in self._last_token.items():
            self.max_gap_s = max(self.max_gap_s, now - last)
            if request_id in served:
                self._last_token[request_id] = now
        holding = {request.request_id for request in running}
        for request_id in self._last_token.keys() - holding:  # it ended, or lost its slot
            del self._last_token[request_id]
        for request_id in served & holding - self._last_token.keys():
            self._last_token[request_id] = now
        restoring = {request.request_id for request in running if request.state is RequestState.RESTORING}
        self.num_restores += len(restoring - self._restoring)
        self._restoring = restoring


def run_agents(inputs: Inputs) -> dict[str, Any]:
    """One run; its figures."""
    with inputs.open() as simulation:
        measures = Measures(simulation)
        for index in range(inputs.agents):
            Agent(simulation, inputs, index, measures)
        seconds = 60.0 * inputs.minutes
        simulation.run(until=seconds)
        measures.look()
        figures = _figures(simulation, measures, seconds)
        measures.agents.clear()
        simulation.settle()
    return figures


def _figures(simulation: Simulation, measures: Measures, seconds: float) -> dict[str, Any]:
    assert simulation.connector is not None
    restores = simulation.connector.scheduler.stats().restore
    ttfts = sorted(measures.ttfts)
    return {
        "stalls": measures.num_stalls,
        "max_token_gap_s": round(measures.max_gap_s, 4),
        "turns": measures.num_turns,
        "failed_turns": measures.num_failed,
        "preemptions": simulation.engine.scheduler.num_preemptions,
        "restores": measures.num_restores,
        "restores_recomputed": dict(sorted(restores.fallbacks.items())),
        "restore_decisions": dict(sorted(restores.decisions.items())),
        "capacity_waits": restores.capacity_waits,
        "client_timeouts": measures.num_timeouts,
        "longest_quiet_s": round(measures.longest_quiet_s, 4),
        "decode_tokens_per_s": round(measures.num_output_tokens / seconds, 2),
        "prefill_tokens_per_s": round(simulation.model.num_prefill_tokens / seconds, 2),
        "ttft_s": _summary(ttfts),
        "steps": simulation.num_steps,
        "empty_steps": simulation.num_empty_steps,
    }


def _summary(values: list[float]) -> Mapping[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    return {
        "mean": round(statistics.fmean(values), 3),
        "p50": round(statistics.median(values), 3),
        "p99": round(p99, 3),
    }
