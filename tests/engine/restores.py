"""An engine beside a connector, kvtier's own or the scripted one, for stories of restores: what host memory holds and
when copies end is in the test's hands, and so is the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, Self

from kvtier.config import RestoreSettings, Settings
from kvtier.metrics import RestoreStatus
from kvtier.restore import RestoreDecision
from kvtier.store import Store
from kvtier.testing import FakeClock
from kvtier_connectors.contract import ConnectorScheduler, CopyResult, KVOptions
from kvtier_engine.engine import StepResult
from kvtier_engine.request import Request, RequestState
from kvtier_engine.testing import FakeRunner, Recorder, ScriptedConnector, TaskKind
from kvtier_engine.testing.disk import SteppedExecutor
from kvtier_engine.testing.rig import ENOUGH_MEMORY, EngineRig
from kvtier_engine.verdict import SchedulerStats

Kind = Literal["kvtier", "scripted"]

BLOCK = 16
HELD = list(range(4 * BLOCK + 1))
"""A prompt with four blocks to restore. With a token to compute and the first of its output it needs five."""
APART = KVOptions(restore=False, store=False)
"""For requests that only take up room."""


def prompt(num_blocks: int, start: int, extra: int = 1) -> list[int]:
    """So many full blocks, and `extra` tokens, from a token on."""
    return list(range(start, start + num_blocks * BLOCK + extra))


BOUND_S = 60.0
"""`restore.capacity_bound_s` where nothing else is said."""


class Restores:
    """The engine's blocks are of 16 tokens, so that whoever decodes a few of them takes no further block.

    What is computed costs no time by the clock, unless `seconds` says so: then nothing is known of costs, and every
    restore is hoped for.
    """

    def __init__(self, kind: Kind, num_blocks: int = 8, *, host_blocks: int = 64, **kwargs: Any) -> None:
        """kwargs: settings of restores, `num_ranks` (of the scripted one), `seconds` (of a forward), `engine` (fields
        of EngineConfig), and what `EngineRig` takes."""
        self.clock = FakeClock()
        self.kv: ScriptedConnector | None = None
        self.copies = SteppedExecutor()
        self._num_good: int | None = None
        self._num_ranks = num_ranks = kwargs.pop("num_ranks", 1)
        names = RestoreSettings.model_fields.keys() & kwargs.keys()
        restore = {name: kwargs.pop(name) for name in names}
        seconds = kwargs.pop("seconds", None)
        runner = FakeRunner(num_blocks, BLOCK, clock=self.clock if seconds else None, seconds=seconds)
        common: dict[str, Any] = {"block_tokens": BLOCK, "clock": self.clock, "runner": runner} | kwargs
        if kind == "scripted":
            self.kv = ScriptedConnector(
                self.clock, block_tokens=BLOCK, num_ranks=num_ranks, settings=RestoreSettings(**restore)
            )
            self.rig = EngineRig(num_blocks, kvtier=False, open_connector=self.kv, **common)
        else:
            overrides = {f"restore__{name}": value for name, value in restore.items()}
            self.rig = EngineRig(
                num_blocks,
                host_blocks,
                make_store=self._make_store,
                executor=self.copies,
                **(common | overrides),
            )
            self._spoil_results()
        self.engine, self.pool = self.rig.engine, self.rig.engine.pool
        self.scheduler = self.engine.scheduler
        self.recorder = Recorder(self.clock)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._stack.callback(self._close)
        self._stack.enter_context(self.recorder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- driving -------------------------------------------------------------------------------------------------

    def hold(self, *prompts: Sequence[int]) -> None:
        """Their blocks are in host memory, and nothing is in the pool."""
        for tokens in prompts:
            if self.kv is not None:
                self.kv.hold(tokens)
            else:
                self.rig.generate(tokens)
                self._flush()
        self.pool.reset_cache()

    def forget_host(self) -> None:
        """No tier holds anything any more."""
        if self.kv is not None:
            self.kv.tiers.clear()
            return
        assert self.rig.store is not None
        for namespace in self.rig.store.host.namespaces():
            assert self.rig.store.host.reset(namespace)

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 2, options: KVOptions = KVOptions()) -> None:  # noqa: B008
        self.rig.add(name, tokens, max_tokens, options=options)

    def occupy(self, num_blocks: int, name: str = "busy", max_tokens: int = 15, **options: Any) -> None:
        """A request that decodes in so many blocks, and for its first `max_tokens` steps needs no other."""
        tokens = prompt(num_blocks - 1, 10_000 + 1_000 * len(self.rig.prompts))
        self.add(name, tokens, max_tokens, replace(APART, **options))
        self.step()
        assert self.state(name) is RequestState.RUNNING

    def preempt(self) -> None:
        """Whoever has a slot loses it, and the pool caches nothing."""
        self.pool.reset_cache()
        self.scheduler.preempt_all()

    def step(self, seconds: float = 0.0) -> StepResult:
        """Time passes, then the engine makes a step."""
        self.clock.advance(seconds)
        result = self.rig.step()
        self.recorder.note(result, self.scheduler.stats())
        return result

    def turn(self) -> set[str]:
        """A step; who computed in it."""
        self.step()
        return {item.request_id for item in self.rig.runner.batches[-1]}

    def land(self, num_good: int | None = None) -> None:
        """Every copy under way ends; of the landing, so many leading blocks well, or all."""
        if self.kv is None:
            self._num_good = num_good
            self.copies.run_all()
            return
        for task in self.kv.tasks(TaskKind.LAND):
            for rank in set(range(self._num_ranks)) - task.delivered:
                self.kv.deliver(task, rank, num_blocks=num_good)

    def land_first(self) -> None:
        """The copy that began first ends, and no other."""
        if self.kv is None:
            assert self.copies.run_next()
            return
        self.kv.deliver_all(self.kv.tasks(TaskKind.LAND)[0])

    def run(self, max_steps: int = 200) -> None:
        """Step, copies ending at once, until the engine has no work."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
            self.land()
        raise AssertionError(f"{self.engine.num_unfinished} requests are left after {max_steps} steps")

    # ---- looking -------------------------------------------------------------------------------------------------

    def request(self, name: str) -> Request:
        return next(request for request in self.scheduler.requests() if request.request_id == name)

    def state(self, name: str) -> RequestState:
        return self.request(name).state

    def num_restored(self, name: str) -> int:
        """Blocks; of a request that ended."""
        return self.rig.finished[name].restored_tokens // BLOCK

    def num_computed(self, name: str) -> int:
        """Tokens that the model was given for it so far, those computed again included."""
        return sum(len(i.token_ids) for batch in self.rig.runner.batches for i in batch if i.request_id == name)

    def num_tokens(self, name: str) -> int:
        """That a live request has put out."""
        return len(self.request(name).output_tokens)

    def warnings(self) -> list[str]:
        return [line.message for line in self.recorder.warnings() if line.logger == "kvtier.restore"]

    @property
    def connector(self) -> ConnectorScheduler:
        if self.kv is not None:
            return self.kv.scheduler
        assert self.engine.connector is not None
        return self.engine.connector.scheduler

    @property
    def decision(self) -> RestoreDecision:
        if self.kv is not None:
            return self.kv.scheduler.decision
        assert self.engine.connector is not None
        return self.engine.connector.scheduler._restores.decision

    @property
    def status(self) -> RestoreStatus:
        return self.decision.status()

    @property
    def block_bytes(self) -> int:
        return self.rig.runner.layout.block_bytes

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def calls_of(self, name: str, owner: object | None = None) -> list[tuple[Any, ...]]:
        """From now on, the arguments of each call of this method of the connector's scheduler half, or of `owner`."""
        target = self.connector if owner is None else owner
        calls: list[tuple[Any, ...]] = []
        method: Callable[..., Any] = getattr(target, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return method(*args, **kwargs)

        setattr(target, name, note)
        return calls

    def verify_quiet(self) -> None:
        """All blocks are free, nothing is pinned, nobody waits."""
        assert not self.engine.has_work
        assert self.pool.num_free == self.pool.num_blocks
        assert not any(map(self.pool.pins, range(self.pool.num_blocks)))
        assert (self.status.active_waits, self.status.capacity_waiters) == (0, 0)
        self.engine.check_integrity()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _make_store(self, settings: Settings) -> Store:
        return Store(settings, memory=ENOUGH_MEMORY, touch=False, clock=self.clock)

    def _flush(self) -> None:
        self.copies.inline = True
        assert self.engine.flush(5.0) == 0
        self.copies.inline = False

    def _spoil_results(self) -> None:
        """Have the worker tell that landings failed from some block on, as `land` says."""
        connector = self.rig.engine.connector
        assert connector is not None
        poll = connector.worker.poll

        def spoilt(timeout: float = 0.0) -> list[CopyResult]:
            results, good = poll(timeout), self._num_good
            self._num_good = None
            return [r if good is None else replace(r, copied=(True,) * good) for r in results]

        connector.worker.poll = spoilt  # type: ignore[method-assign]

    def _close(self) -> None:
        self.copies.inline = True
        self.copies.run_all()
        self.rig.close()


def open_refused(open_restores: Callable[..., Restores], num_busy: int = 4, **kwargs: object) -> Restores:
    """ "busy" decodes in so many of eight blocks, and "again" was just refused the five that it needs, for the first
    time."""
    story = open_restores(**kwargs)
    story.hold(HELD)
    story.occupy(num_busy)
    story.add("again", HELD)
    story.step()
    assert story.stats.restore_capacity_waits == story.status.capacity_waiters == 1
    return story
