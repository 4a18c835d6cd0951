"""Requests through store and connector beside a toy engine, one step at a time: what each got, and what a step cost."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.config import DiskSettings, HostSettings, RestoreSettings, Settings, StoreSettings
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.metrics import DiskStats
from kvtier.store import Store
from kvtier.testing.files import FaultyFiles
from kvtier.tiers.disk import Files
from kvtier_connectors.contract import WRITTEN, RequestInfo, RestoreOutcome, StepDemand
from kvtier_connectors.selftest.toy_engine import ToyEngine

__all__ = ["CHAIN_BLOCKS", "FaultRig", "SickFiles", "Traffic"]

P = ParamSpec("P")
R = TypeVar("R")

CHAIN_BLOCKS = 8
GPU_BLOCKS = 512
DRAIN_TIMEOUT_S = 30.0
FORWARD_S = 0.0005  # a step's forward, in which the engine's thread lets go of the GIL
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16)  # blocks of 32 KiB


class SickFiles(FaultyFiles):
    """Faults that `FaultyFiles` has, a device that hangs for as long as it likes, and one that only reads.

    Mutable state: the gates, which are events, and `read_only`; any thread.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.gates = {"read": threading.Event(), "write": threading.Event()}
        self.read_only = False
        for gate in self.gates.values():
            gate.set()

    def stall(self, what: str) -> None:
        """Each 'read' or 'write' hangs from now until `heal`."""
        self.gates[what].clear()

    def heal(self) -> None:
        super().heal()
        self.read_only = False
        for gate in self.gates.values():
            gate.set()

    def open(self, name: str, flags: int, directory: int) -> int:
        if flags & os.O_CREAT:
            self._check_writable()
        return super().open(name, flags, directory)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._check_writable()
        super().allocate(fd, nbytes)

    def preadv(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self.gates["read"].wait()
        return super().preadv(fd, vectors, offset)

    def pwritev(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self.gates["write"].wait()
        self._check_writable()
        return super().pwritev(fd, vectors, offset)

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class _Live:
    """A request under way."""

    __slots__ = ("block_ids", "digests", "num_wanted", "request_id")

    def __init__(self, request_id: str, digests: Sequence[BlockDigest], num_wanted: int) -> None:
        self.request_id = request_id
        self.digests = digests
        self.num_wanted = num_wanted
        self.block_ids: list[int] = []


class Traffic:
    """Plays the engine's loop: requests wait for what is staged, land, and compute and publish the rest.

    Each block's content follows from its digest, so that what landed can be told from what should have.

    asked, lost: blocks that should have been restorable, and of those the ones that were not restored. recomputed:
    requests with a lost block. wrong: blocks that landed with other bytes. step_seconds: of each step the time in
    hooks of the connector, the engine's thread's.
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
        self.asked = self.lost = self.recomputed = self.wrong = self.requests = 0
        self.step_seconds: list[float] = []

    def start(self, digests: Sequence[BlockDigest]) -> None:
        """A request arrives. Of its blocks those that were published before should be to be had."""
        self._num_requests += 1
        live = _Live(f"bench-{self._num_requests}", digests, sum(digest in self.known for digest in digests))
        self._time(self._scheduler.start_request, RequestInfo(live.request_id, digests))
        self._waiting.append(live)

    def step(self) -> None:
        """One step of the engine, with a forward of half a millisecond."""
        reused = self._admit()
        demand = StepDemand(len(reused), CHAIN_BLOCKS, CHAIN_BLOCKS * len(self._waiting))
        plan = self._time(self._scheduler.plan_step, reused, demand)
        self._time(self._worker.submit, plan, WRITTEN)
        results = self._time(self._worker.poll)
        outcomes = self._time(self._scheduler.complete, results)
        outcomes += self._time(self._scheduler.poll_restores).outcomes
        self.step_seconds.append(self._spent)
        self._spent = 0.0
        time.sleep(FORWARD_S)
        for outcome in outcomes:
            self._land(outcome)
        for live, num_landed in self._computing:
            self._compute(live, num_landed)
        self._computing.clear()

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
        for live in waiting:
            match = self._time(self._scheduler.match, live.request_id, 0, len(live.digests))
            if match.is_staging:
                self._waiting.append(live)
                continue
            live.block_ids = self._engine.blocks.take(len(live.digests))
            reused += live.block_ids
            wanted = live.block_ids[: match.num_blocks]
            if self._time(self._scheduler.admit, live.request_id, 0, len(live.digests), wanted):
                self._landing[live.request_id] = live
            else:
                self._computing.append((live, 0))
        return reused

    def _land(self, outcome: RestoreOutcome) -> None:
        live = self._landing.pop(outcome.request_id)
        for block_id, digest in zip(live.block_ids[: outcome.num_landed], live.digests, strict=False):
            self.wrong += not np.array_equal(self._engine.memory[:, block_id], self._content(digest))
        self._computing.append((live, outcome.num_landed))

    def _compute(self, live: _Live, num_landed: int) -> None:
        lost = max(0, live.num_wanted - num_landed)
        self.requests += live.num_wanted > 0
        self.asked += live.num_wanted
        self.lost += lost
        self.recomputed += lost > 0
        for block_id, digest in list(zip(live.block_ids, live.digests, strict=True))[num_landed:]:
            self._engine.memory[:, block_id] = self._content(digest)
        self.known.update(live.digests)
        self._time(self._scheduler.publish, live.request_id, 0, live.block_ids)
        self._time(self._scheduler.finish_request, live.request_id)
        self._engine.blocks.give_back(live.block_ids)

    def _content(self, digest: BlockDigest) -> npt.NDArray[np.uint8]:
        """[num_planes, segment_bytes]"""
        segment = np.resize(np.frombuffer(digest, np.uint8), self._engine.memory.shape[2])
        content: npt.NDArray[np.uint8] = segment ^ self._planes
        return content


class FaultRig:
    """A store with a small host pool and a disk tier, a connector, and traffic through both."""

    def __init__(
        self,
        directory: Path,
        files: Files | None = None,
        *,
        host_bytes: int = 32 << 20,
        disk_bytes: int = 96 << 20,
        timeout_s: float = 0.5,
        max_wait_s: float = 0.5,
    ) -> None:
        settings = Settings(
            host=HostSettings(size=host_bytes, slab=1 << 20),
            disk=DiskSettings(path=(str(directory),), size=disk_bytes, min_free=1 << 20, timeout_s=timeout_s),
            store=StoreSettings(policy="write_through"),
            restore=RestoreSettings(max_wait_s=max_wait_s),
        )
        self.directory = directory
        self.store = Store(settings, disk_files=files)
        self._namespace = Namespace("kvtier bench", "", LAYOUT, "all", Shard(0, 1))
        self.engine = ToyEngine(self.store, self._namespace, GPU_BLOCKS, CHAIN_BLOCKS)
        self.traffic = Traffic(self.engine)

    def chain(self, number: int) -> list[BlockDigest]:
        """The digests of a conversation, the same each time."""
        noise = np.random.default_rng(number)
        return [BlockDigest(noise.bytes(32)) for _ in range(CHAIN_BLOCKS)]

    @property
    def disk(self) -> DiskStats:
        disk = self.store.stats().disk
        assert disk is not None
        return disk

    def forget_host(self) -> None:
        """Leave the disk tier as the only one that holds anything."""
        self.store.host.reset(self._namespace.digest(self.store.epoch))

    def run(self, chains: Sequence[Sequence[BlockDigest]], after_step: Callable[[], None] = lambda: None) -> None:
        """Requests for these, a new one every other step, to their end."""
        for digests in chains:
            self.traffic.start(digests)
            for _ in range(2):
                self.traffic.step()
                after_step()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.traffic.num_live:
            assert time.monotonic() < deadline, f"{self.traffic.num_live} requests hang"
            self.traffic.step()
            after_step()
        self.traffic.drain()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
