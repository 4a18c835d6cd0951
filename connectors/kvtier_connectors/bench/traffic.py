"""Requests through a connector beside a toy engine, one step at a time: what each got, and what a step cost."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.keys import BlockDigest
from kvtier_connectors.contract import WRITTEN, RequestInfo, RestoreOutcome, StepDemand, StepWork
from kvtier_connectors.selftest.toy_engine import ToyEngine

__all__ = ["CHAIN_BLOCKS", "Traffic", "Wait"]

P = ParamSpec("P")
R = TypeVar("R")

CHAIN_BLOCKS = 8
DRAIN_TIMEOUT_S = 30.0
FORWARD_S = 0.0005  # a step's forward, in which the engine's thread lets go of the GIL
DEAR_WORK = StepWork(1000, 0.0, 1000.0, 0)  # a second a token


@dataclass(frozen=True, slots=True)
class Wait:
    """What one request waited for lower tiers, from its arrival until it was admitted."""

    seconds: float
    steps: int
    sick_steps: int
    """Of these steps, those in which some lower tier was being left alone as sick."""


class _Live:
    """A request under way."""

    __slots__ = ("began", "block_ids", "digests", "generation", "num_wanted", "request_id", "sick_steps", "steps")

    def __init__(self, request_id: str, digests: Sequence[BlockDigest], num_wanted: int, generation: int) -> None:
        self.request_id = request_id
        self.digests = digests
        self.num_wanted = num_wanted
        self.generation = generation
        self.block_ids: list[int] = []
        self.began = time.monotonic()
        self.steps = self.sick_steps = 0


class Traffic:
    """Plays the engine's loop: requests wait for what is staged, land, and compute and publish the rest.

    Each block's content follows from its digest and from how many resets came before, so that what landed can be told
    from what should have.

    asked, lost: blocks that should have been restorable, and of those the ones that were not restored. recomputed:
    requests with a lost block. landed, wrong: blocks that landed, and of those the ones with other bytes. waits: of
    each request that was admitted. step_seconds: of each step the time in hooks of the connector, the engine's
    thread's, but for steps in which the kernel gave its CPU to another thread. longest_step_s: of all steps, forward
    included.
    """

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._scheduler = engine.connector.scheduler
        self._worker = engine.connector.worker
        self._num_requests = 0
        self._waiting: list[_Live] = []
        self._landing: dict[str, _Live] = {}
        self._computing: list[tuple[_Live, int]] = []
        self._spent = 0.0
        self._planes = np.arange(engine.memory.shape[0], dtype=np.uint8)[:, None]
        self.known: set[BlockDigest] = set()
        self.asked = self.lost = self.recomputed = self.landed = self.wrong = self.requests = 0
        self.waits: list[Wait] = []
        self.step_seconds: list[float] = []
        self.longest_step_s = 0.0
        self._generation = 0
        # A model's work, of which a toy has none: with it no restore is given up because computing were as fast.
        self._scheduler.plan_step([], StepDemand(0, 0, 0, DEAR_WORK))

    def start(self, digests: Sequence[BlockDigest]) -> None:
        """A request arrives. Of its blocks those that were published before should be to be had."""
        self._num_requests += 1
        num_wanted = sum(digest in self.known for digest in digests)
        live = _Live(f"bench-{self._num_requests}", digests, num_wanted, self._generation)
        self._time(self._scheduler.start_request, RequestInfo(live.request_id, digests))
        self._waiting.append(live)

    def step(self) -> None:
        """One step of the engine, with a forward of half a millisecond."""
        began, preempted = time.monotonic(), _num_preempted()
        reused = self._admit()
        demand = StepDemand(len(reused), CHAIN_BLOCKS, CHAIN_BLOCKS * len(self._waiting))
        plan = self._time(self._scheduler.plan_step, reused, demand)
        self._time(self._worker.submit, plan, WRITTEN)
        results = self._time(self._worker.poll)
        outcomes = self._time(self._scheduler.complete, results)
        outcomes += self._time(self._scheduler.poll_restores).outcomes
        if _num_preempted() == preempted:
            self.step_seconds.append(self._spent)
        self._spent = 0.0
        time.sleep(FORWARD_S)
        for outcome in outcomes:
            self._land(outcome)
        for live, num_landed in self._computing:
            self._compute(live, num_landed)
        self._computing.clear()
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)

    def abort(self, number: int) -> None:
        """The client of a request that is not computed yet goes away; `number` below `num_live` says which."""
        if number < len(self._waiting):
            live = self._waiting.pop(number)
        else:
            live = self._landing.pop(list(self._landing)[number - len(self._waiting)])
        self._time(self._scheduler.finish_request, live.request_id)
        self._engine.blocks.give_back(live.block_ids)

    def reset(self) -> bool:
        """All KV so far is forgotten, and blocks have other contents from now on; whether every tier took note."""
        self._generation += 1
        self.known.clear()
        for live in [*self._waiting, *self._landing.values()]:
            live.num_wanted = 0
        return self._scheduler.reset()

    def forget_figures(self) -> None:
        """Let what is measured begin now."""
        self.waits.clear()
        self.step_seconds.clear()
        self.longest_step_s = 0.0

    @property
    def num_live(self) -> int:
        return len(self._waiting) + len(self._landing)

    def drain(self, timeout: float = DRAIN_TIMEOUT_S) -> None:
        """Step until every request is over and the connector copies nothing."""
        deadline = time.monotonic() + timeout
        while self.num_live or self._scheduler.stats().in_flight_blocks or self._scheduler.stats().ledger.pending:
            assert time.monotonic() < deadline, f"{self.num_live} requests hang"
            self.step()
        self.step()

    def _time(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        result = method(*args, **kwargs)
        self._spent += time.perf_counter() - began
        return result

    def _admit(self) -> list[int]:
        """Admit those that wait for nothing any more; the blocks they took."""
        reused: list[int] = []
        waiting, self._waiting = self._waiting, []
        is_sick = bool(waiting) and not all(lower.is_available for lower in self._engine.store.lower)
        for live in waiting:
            match = self._time(self._scheduler.match, live.request_id, 0, len(live.digests))
            if match.is_staging:
                live.steps += 1
                live.sick_steps += is_sick
                self._waiting.append(live)
                continue
            self.waits.append(Wait(time.monotonic() - live.began, live.steps, live.sick_steps))
            live.block_ids = self._engine.blocks.take(len(live.digests))
            reused += live.block_ids
            wanted = live.block_ids[: match.num_blocks]
            if self._time(self._scheduler.admit, live.request_id, 0, len(live.digests), wanted):
                self._landing[live.request_id] = live
            else:
                self._computing.append((live, 0))
        return reused

    def _land(self, outcome: RestoreOutcome) -> None:
        live = self._landing.pop(outcome.request_id, None)
        if live is None:  # aborted since
            return
        self.landed += outcome.num_landed
        for block_id, digest in zip(live.block_ids[: outcome.num_landed], live.digests, strict=False):
            self.wrong += not np.array_equal(self._engine.memory[:, block_id], self._content(digest, live.generation))
        self._computing.append((live, outcome.num_landed))

    def _compute(self, live: _Live, num_landed: int) -> None:
        lost = max(0, live.num_wanted - num_landed)
        self.requests += live.num_wanted > 0
        self.asked += live.num_wanted
        self.lost += lost
        self.recomputed += lost > 0
        for block_id, digest in list(zip(live.block_ids, live.digests, strict=True))[num_landed:]:
            self._engine.memory[:, block_id] = self._content(digest, live.generation)
        if live.generation == self._generation:
            self.known.update(live.digests)
        self._time(self._scheduler.publish, live.request_id, 0, live.block_ids)
        self._time(self._scheduler.finish_request, live.request_id)
        self._engine.blocks.give_back(live.block_ids)

    def _content(self, digest: BlockDigest, generation: int) -> npt.NDArray[np.uint8]:
        """[num_planes, segment_bytes]"""
        segment = np.resize(np.frombuffer(digest, np.uint8) ^ np.uint8(generation % 251), self._engine.memory.shape[2])
        content: npt.NDArray[np.uint8] = segment ^ self._planes
        return content


def _num_preempted() -> int:
    """How often this thread lost its CPU without having to wait for anything."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
