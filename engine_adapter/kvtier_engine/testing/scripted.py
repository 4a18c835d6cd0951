"""A connector without a store, a thread or a clock of its own: what happens, and when, is in the test's hands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.clock import Clock
from kvtier.config import RestoreSettings
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest, Extras, digest_tokens
from kvtier.metrics import StatsSnapshot
from kvtier.restore import Fallback, RestoreDecision
from kvtier_connectors.connector import FlushResult
from kvtier_connectors.contract import WRITTEN, CopyFailure, RestoreOutcome, StepDemand
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.testing.fake_model import block_contents
from kvtier_engine.testing.scripted_scheduler import ScriptedScheduler
from kvtier_engine.testing.scripted_worker import FarSide, ScriptedWorker
from kvtier_engine.testing.tasks import IgnoredDelivery, Task, TaskKind
from kvtier_engine.testing.tiers import HOST, PoolBytes, ScriptedTiers
from kvtier_kernels import BlockPlanes

__all__ = ["ScriptedConnector"]

NO_EXTRAS = Extras(adapter=None, salt=None, media=())


class ScriptedConnector:
    """Both halves of a connector whose tiers are told what they hold, and whose work waits to be delivered.

    Lookups of lower tiers, stages, landings and stores are tasks. Each ends when all ranks have delivered; what a
    request waits for, for how long and what becomes of it are decided by the product's own `RestoreDecision`. Copies
    move real bytes as a rank delivers them, its share of each block, and a landing that fails leaves garbage, so that
    a block that is read too early, or in vain, changes what the fake model puts out.

        clock = FakeClock()
        tiers = ScriptedConnector(clock, block_tokens=4, num_ranks=2)
        tiers.hold(prompt, tier="disk")
        engine = Engine(runner, namespace, EngineConfig(), None, connector=tiers, clock=clock, ...)
        engine.add_request("a", prompt, params)     # asks the disk: a lookup waits
        tiers.deliver(tiers.tasks("lookup")[0], rank=0)
        tiers.deliver(tiers.tasks("lookup")[0], rank=1)
        engine.step()                               # takes the answer: a stage waits

    The engine hears of a delivery at its next step; one that is late, double or unknown is counted there, in `ignored`.

    auto: True, or kinds of tasks, that deliver by themselves at the next poll after they began.
    latency: when a task delivers by itself, on the clock; None leaves it to the test. Together with `next_event` this
    is a discrete-event simulation's connector.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        block_tokens: int = 4,
        num_ranks: int = 1,
        settings: RestoreSettings | None = None,
        auto: bool | Collection[TaskKind | str] = False,
        latency: Callable[[Task], float | None] | None = None,
    ) -> None:
        """settings: the bounds that restores have. Opened by `__call__`, which the engine does."""
        self.block_tokens = block_tokens
        self.settings = settings or RestoreSettings()
        self.fallbacks: list[Fallback] = []
        """Each restore that came to nothing, or to less than was hoped for."""
        kinds = TaskKind if auto is True else () if auto is False else auto
        self._far = FarSide(clock, num_ranks, [TaskKind(kind) for kind in kinds], latency)
        self._pool: BlockPool | None = None
        self._scheduler: ScriptedScheduler | None = None
        self._worker = ScriptedWorker(self._far)

    def __call__(self, pool: BlockPool, planes: BlockPlanes) -> ScriptedConnector:
        """Open it beside an engine's pool. One engine only."""
        if self._scheduler is not None:
            raise ValueError("a scripted connector serves one engine; make another")
        self._pool = pool
        self._far.pool_bytes = PoolBytes(planes, self._far.board.num_ranks)
        decision = RestoreDecision(
            self.settings, self.block_tokens, planes.block_bytes, self._far.clock, self.fallbacks.append
        )
        self._scheduler = ScriptedScheduler(self._far, pool, decision, self.settings, self.block_tokens)
        return self

    # ---- what an engine asks for -----------------------------------------------------------------------------------

    @property
    def scheduler(self) -> ScriptedScheduler:
        assert self._scheduler is not None, "give this connector to an engine first, or call it with a pool"
        return self._scheduler

    @property
    def worker(self) -> ScriptedWorker:
        return self._worker

    def stats(self) -> StatsSnapshot | None:
        """None: there is no store. See `scheduler.counts`, `scheduler.decision.status()` and `ignored`."""
        return None

    def num_in_flight(self) -> int:
        """Blocks of copies that have not ended."""
        return self.scheduler.num_copying

    def flush(self, timeout: float, reused: Sequence[int] = ()) -> FlushResult:
        """Store every published block, with copies that end at once."""
        del timeout
        outcomes: list[RestoreOutcome] = []
        self.scheduler.store_all, before = True, self.scheduler.store_all
        try:
            plan = self.scheduler.plan_step(reused, StepDemand(0, 0, 0))
        finally:
            self.scheduler.store_all = before
        self.worker.submit(plan, WRITTEN)
        for task in self.tasks(TaskKind.STORE):
            self.deliver_all(task)
        outcomes += self.scheduler.complete(self.worker.poll())
        return FlushResult(len(list(self.scheduler.stores.unstored())), tuple(outcomes))

    def close(self, timeout: float = 5.0, reused: Sequence[int] = ()) -> None:
        """Copies that were not delivered never are. Idempotent."""
        self.scheduler.stores.forget(reused)
        self.scheduler.complete(self.worker.close(timeout))
        self.scheduler.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError when requests, tasks, episodes and pins disagree."""
        self.scheduler.check_integrity()
        assert self._pool is not None
        pinned = sorted(self.scheduler.landings.pinned() + self.scheduler.stores.pinned())
        in_pool = [block for block in range(self._pool.num_blocks) for _ in range(self._pool.pins(block))]
        if pinned != in_pool:
            raise IntegrityError(f"scripted connector: its copies pin blocks {pinned}, the pool says {in_pool}")

    # ---- what the test says ----------------------------------------------------------------------------------------

    def hold(
        self,
        what: Sequence[int] | Sequence[BlockDigest],
        tier: str = HOST,
        *,
        first_block: int = 0,
        num_blocks: int | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> list[BlockDigest]:
        """From now on a tier holds these blocks: the full ones of a prompt of token ids, as the fake model computes
        them, or digests of blocks that some tier holds. Returns their digests.

        first_block, num_blocks: which of them; all.
        """
        last = None if num_blocks is None else first_block + num_blocks
        if not len(what):
            return []
        if isinstance(what[0], bytes):
            digests = [digest for digest in what if isinstance(digest, bytes)][first_block:last]
            held = [self.tiers.data(BlockDigest(digest)) for digest in digests]
            if None in held:
                raise ValueError(f"no tier holds block {held.index(None)} of these; hold it by its tokens")
            contents = [data for data in held if data is not None]
        else:
            tokens = [token for token in what if not isinstance(token, bytes)]
            digests = list(digest_tokens(tokens, self.block_tokens, extras))[first_block:last]
            contents = [array.tobytes() for array in block_contents(tokens, self.block_tokens)[first_block:last]]
        for digest, data in zip(digests, contents, strict=True):
            self.tiers.put(tier, BlockDigest(digest), data)
        return [BlockDigest(digest) for digest in digests]

    def drop(self, digests: Iterable[BlockDigest], tier: str | None = None) -> None:
        """From now on a tier, or none at all, holds these blocks no more."""
        self.tiers.drop(digests, tier)

    def holds(self, digests: Iterable[BlockDigest], tier: str = HOST) -> list[bool]:
        held = self.tiers.held(tier)
        return [digest in held for digest in digests]

    def store_all(self, *, on: bool = True) -> None:
        """At every plan from now on store every published block that is not in host memory; at first nothing is."""
        self.scheduler.store_all = on

    def tasks(self, kind: TaskKind | str | None = None, request_id: str | None = None) -> list[Task]:
        """What waits for a delivery, the oldest first."""
        waiting = self._far.board.waiting(None if kind is None else TaskKind(kind))
        return [task for task in waiting if request_id in (None, task.request_id)]

    def deliver(
        self,
        task: Task | int,
        rank: int = 0,
        ok: bool = True,
        num_blocks: int | None = None,
        *,
        verdicts: Sequence[bool] | None = None,
    ) -> None:
        """One rank is done with a task. ok: with all its blocks, or with none; num_blocks: with that many, from the
        first; verdicts: with those blocks.

        A lookup that is not ok is an error; one with `num_blocks` found only so many.
        """
        found = self._far.board.get(task if isinstance(task, int) else task.task_id)
        total = found.num_blocks if found is not None else task.num_blocks if isinstance(task, Task) else 1
        if verdicts is None:
            good = 0 if not ok else total if num_blocks is None else num_blocks
            verdicts = [index < good for index in range(total)]
        self._far.deliver(task, rank, verdicts, None if any(verdicts) else CopyFailure.RAISED)

    def deliver_all(self, task: Task | None = None, *, ok: bool = True) -> int:
        """Every rank that has not delivered does: to one task, or to all that can be. Returns how many tasks those
        are."""
        tasks = [task] if task is not None else [task for task in self.tasks() if self._far.is_deliverable(task)]
        for each in tasks:
            self._far.deliver_rest(each, ok=ok)
        return len(tasks)

    def next_event(self) -> float | None:
        """When the next task delivers by itself, on the clock; None when none does."""
        return self._far.next_due()

    # ---- looking ---------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> ScriptedTiers:
        return self._far.tiers

    @property
    def ignored(self) -> dict[IgnoredDelivery, int]:
        """Deliveries that came to nothing, by why."""
        return dict(self._far.board.ignored)

    @property
    def num_polls(self) -> int:
        """Calls of `poll_restores`."""
        return self.scheduler.counts["polls"]

    @property
    def num_polled(self) -> int:
        """Restores that these looked at, all together."""
        return self.scheduler.counts["polled"]
