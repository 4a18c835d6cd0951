"""A machine under kvtier in simulated time: what would this engine, with these settings, do under that traffic?

Everything that decides is the product: engine, scheduler, connector, restore decision, store, staging, write-behind.
Only what costs time is simulated: the model's steps, the copies between GPU pool and host memory, the disk. Half an
hour of a busy engine takes a minute or two, needs no GPU, and is the same each time.

    simulation = Simulation(Machine(rates, num_blocks=319, ...), EngineConfig(max_num_seqs=4), {"restore.margin": 0.2})
    simulation.on_step(lambda step: ...)
    simulation.after(1.0, lambda: simulation.add_request("a", prompt, max_tokens=100))
    simulation.run(until=60.0)
    simulation.close()
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

from kvtier.config import MemorySnapshot, load_settings
from kvtier.errors import IntegrityError
from kvtier.keys import Namespace, Shard
from kvtier.store import Store
from kvtier.testing import ManualExecutor
from kvtier_connectors.connector import Connector
from kvtier_connectors.contract import NO_OPTIONS, KVOptions
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.config import EngineConfig
from kvtier_engine.engine import Engine, StepResult
from kvtier_engine.request import RequestOutput
from kvtier_engine.sampling import Sampler, SamplingParams
from kvtier_engine.testing.fake_model import FakeSampler
from kvtier_engine.testing.simulated_parts import MachineRates, SimulatedDisk, SimulatedModel, SimulatedWorker
from kvtier_engine.testing.timeline import Event, SimulatedThreads, Timeline
from kvtier_engine.verdict import Verdict
from kvtier_kernels import BlockPlanes

__all__ = ["Event", "Machine", "MachineRates", "Simulation", "Step"]

ENOUGH_MEMORY = MemorySnapshot(total_bytes=1 << 50, available_bytes=1 << 50)
MIN_WAIT_S = 1e-3
"""How soon an engine that can do nothing looks again at the soonest: what is due by the clock may be due a moment later
by its own sums."""
MAX_EMPTY_STEPS = 1000
"""Steps at one moment that compute nothing: more is a loop that will not end."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine runs on. Sizes are nominal: a block costs a page or two of real memory.

    num_blocks: of the GPU pool, each of `block_tokens` tokens of `token_bytes`. host_blocks: that host memory holds; 0
    runs the engine without kvtier. disk_bytes: that the disk holds; 0 is no disk.
    """

    rates: MachineRates
    num_blocks: int
    block_tokens: int = 1024
    token_bytes: int = 40 << 10
    host_blocks: int = 0
    disk_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine. began_at, ended_at: on the simulation's clock; equal when it computed nothing."""

    result: StepResult
    began_at: float
    ended_at: float


class Simulation:
    """Owns the engine, its store and the clock, and is the loop around the engine.

    It steps while a step can change something: after one that computed tokens, and whenever something happened; else
    the clock goes to the next event or deadline. Clients are events (`at`, `after`) that happen between steps, as they
    would on the engine's thread; copies and reads end while the model computes.
    """

    def __init__(
        self,
        machine: Machine,
        config: EngineConfig,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """settings: kvtier's, by dotted name; sizes of host memory and disk are the machine's."""
        self.machine = machine
        self.timeline = Timeline()
        self.model = SimulatedModel(
            self.timeline, machine.rates, machine.num_blocks, machine.block_tokens, machine.token_bytes
        )
        self.num_steps = 0
        self.num_empty_steps = 0
        """Steps that computed nothing."""
        self.store: Store | None = None
        self.disk: SimulatedDisk | None = None
        self._threads: SimulatedThreads | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._observers: list[Callable[[Step], None]] = []
        self._last: StepResult | None = None
        self._has_news = True
        self._num_empty_here = 0
        self._opened: Connector | None = None
        if machine.host_blocks:
            self._open_store(settings or {})
        self.engine = Engine(
            self.model,
            self._namespace(),
            config,
            None,
            clock=self.timeline,
            make_sampler=cast("Callable[[SamplingParams], Sampler]", FakeSampler),
            open_connector=None if self.store is None else self._open_connector,
        )

    # ---- clients -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.timeline.now()

    def at(self, when: float, action: Callable[[], None]) -> Event:
        """Have a client do something at that time."""
        return self.timeline.at(when, action)

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        return self.timeline.after(seconds, action)

    def add_request(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, options: KVOptions = NO_OPTIONS
    ) -> None:
        """See `Engine.add_request`."""
        self.engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens), options=options)
        self._has_news = True

    def abort(self, request_id: str) -> RequestOutput | None:
        """See `Engine.abort`."""
        self._has_news = True
        return self.engine.abort(request_id)

    def on_step(self, observer: Callable[[Step], None]) -> None:
        """Call `observer` after each step, with what it put out; it may add and abort requests."""
        self._observers.append(observer)

    # ---- running -------------------------------------------------------------------------------------------------

    @property
    def connector(self) -> Connector | None:
        """kvtier's; None without it. Its worker is the simulated one."""
        return self._opened

    @property
    def num_under_way(self) -> int:
        """Copies that run, and reads, writes and other jobs of the disk that have not ended."""
        return self.timeline.num_background

    def run(self, until: float) -> None:
        """Let time pass until then, and to the end of the step that runs at that time.

        Raises RuntimeError when the engine asks for step after step and none does anything.
        """
        while self.now() < until:
            self._has_news |= bool(self.timeline.run_due())
            if self._has_news and self.engine.has_work:
                self._step()
            else:
                self._wait(until)

    def settle(self, max_s: float = 3600.0) -> None:
        """Abort all requests and let everything under way end. Clients that are still to come are not awaited.

        Raises RuntimeError if it takes longer than `max_s`, and what `verify_quiet` raises.
        """
        for request in list(self.engine.scheduler.requests()):
            self.abort(request.request_id)
        deadline = self.now() + max_s
        while self.engine.has_work or self.num_under_way:
            if self.now() >= deadline:
                raise RuntimeError(f"{self.num_under_way} copies and reads are left after {max_s:g} s")
            if self.engine.has_work:
                self._step()
            self.timeline.work_until(self.now() + MIN_WAIT_S)
        self.verify_quiet()

    def verify_quiet(self) -> None:
        """Raises IntegrityError unless all blocks are free and unpinned, and nothing is leased, queued or pending."""
        self.engine.check_integrity()
        pool = self.engine.pool
        counts = {
            "GPU blocks in use": pool.num_blocks - pool.num_free,
            "unfinished requests": self.engine.num_unfinished,
        }
        if self._opened is not None and self.store is not None:
            stats, stored = self._opened.scheduler.stats(), self.store.stats()
            counts |= {
                "live requests": stats.live_requests,
                "pending stores": stats.ledger.pending,
                "blocks being copied": stats.in_flight_blocks,
                "active restores": stats.restore.active_waits + stats.restore.capacity_waiters,
                "leases": stored.leases,
                "bytes being staged": stored.staging_bytes,
                "bytes to be written": stored.disk.queued_bytes if stored.disk is not None else 0,
            }
        left = {what: count for what, count in counts.items() if count}
        if left:
            raise IntegrityError(f"nothing runs, and yet there are {left}")

    def close(self) -> None:
        """Give everything back; what is not written by now never is. Idempotent."""
        self.engine.close(0.0)
        if self.store is not None:
            self.store.close()
        if self._directory is not None:
            self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self) -> None:
        began_at = self.now()
        result = self.engine.step()
        self.num_steps += 1
        is_empty = not result.num_tokens
        self.num_empty_steps += is_empty
        self._num_empty_here = self._num_empty_here + 1 if is_empty and self.now() == began_at else 0
        if self._num_empty_here > MAX_EMPTY_STEPS:
            raise RuntimeError(f"{self._num_empty_here} steps at {began_at:g} s computed nothing: {result.verdict}")
        # A stall's second step in a row may end it; further ones change nothing by themselves.
        was_stalled = self._last is not None and self._last.verdict is Verdict.STALL
        is_new_stall = result.verdict is Verdict.STALL and not was_stalled
        self._has_news = bool(result.num_tokens or result.outputs or is_new_stall)
        self._last = result
        for observer in self._observers:
            observer(Step(result, began_at, self.now()))

    def _wait(self, until: float) -> None:
        """Go to the next event, or to when a wait of the engine's ends by itself."""
        times = [until]
        if (event := self.timeline.next_time()) is not None:
            times.append(event)
        deadline = self._last.next_deadline if self._last is not None and self.engine.has_work else None
        if deadline is not None:
            times.append(max(deadline, self.now() + MIN_WAIT_S))
        self.timeline.wait_until(min(times))
        self._num_empty_here = 0
        self._has_news = deadline is not None and self.now() >= deadline

    # ---- opening -------------------------------------------------------------------------------------------------

    def _namespace(self) -> Namespace:
        return Namespace(model="simulated", revision="", layout=self.model.layout, group="all", shard=Shard(0, 1))

    def _open_store(self, settings: Mapping[str, object]) -> None:
        machine = self.machine
        slab = 1 << max(12, (machine.block_bytes - 1).bit_length())  # one slot a slab: as many slots as were asked for
        overrides: dict[str, object] = {"host.size": machine.host_blocks * slab, "host.slab": slab} | dict(settings)
        if machine.disk_bytes:
            self._directory = tempfile.TemporaryDirectory(prefix="kvtier-simulated-")
            # Of the real disk tier only the directory is used; its size is what a block of ours fits.
            overrides |= {
                "disk.path": [self._directory.name],
                "disk.size": 64 * machine.block_bytes,
                "disk.min_free": 0,
            }
        loaded = load_settings(env={}, overrides=overrides)
        if machine.disk_bytes:
            self._threads = SimulatedThreads(self.timeline, "kvtier-simulated", loaded.disk.threads + 1)
        self.store = Store(loaded, memory=ENOUGH_MEMORY, touch=False, clock=self.timeline, disk_executor=self._threads)
        if self._threads is not None:
            lower = self.store.lower[0]
            self.disk = SimulatedDisk(
                lower.device, self._threads, self.timeline, machine.rates.disk_bytes_per_s, machine.disk_bytes
            )
            lower._meter._inner = self.disk

    def _open_connector(self, pool: BlockPool, planes: BlockPlanes) -> Connector:
        assert self.store is not None
        connector = Connector(
            self.store.settings, self._namespace(), pool, planes, store=self.store, executor=ManualExecutor()
        )
        connector.worker.close(0.0)
        connector.worker = SimulatedWorker(
            planes, connector.space.buffer, self.timeline, self.machine.rates.copy_bytes_per_s
        )
        self._opened = connector
        return connector
