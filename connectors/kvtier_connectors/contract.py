"""The contract between an engine and kvtier: a scheduler half, a worker half, fifteen methods in all.

A request's life (docs/embedding.md has a whole engine):

    start_request -> match -> admit -> [landing: complete names the blocks] -> publish ... -> finish_request

A request whose blocks are on their way from a lower tier waits: `match` says so, and `poll_restores` when that is over.
One that the engine has no room to land is refused (`refuse_restore`), one that was preempted begins again
(`requeue_request`). Once a step: worker `poll`, `complete`, `poll_restores`, then `plan_step`, worker `submit`. The
scheduler half runs on the engine's thread and never blocks; the worker half copies on a thread of its own. No method
lets an exception out: what goes wrong is a miss or a drop with a reason, counted and logged. Only ids cross between the
halves, so that they may live in different processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.keys import BlockDigest
from kvtier.reasons import MissReason
from kvtier_connectors.options import NO_OPTIONS, KVOptions

__all__ = [
    "NO_COPIES",
    "NO_OPTIONS",
    "NO_RESTORES",
    "NO_WORK",
    "WRITTEN",
    "BlockPoolView",
    "ConnectorScheduler",
    "ConnectorWorker",
    "CopyDirection",
    "CopyFailure",
    "CopyJob",
    "CopyResult",
    "KVOptions",
    "Match",
    "RequestInfo",
    "RestoreOutcome",
    "RestorePoll",
    "StepDemand",
    "StepWork",
    "TransferPlan",
    "WriteFence",
]


class BlockPoolView(Protocol):
    """What the connector may see and do of the engine's block pool. Called on the engine's thread only."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, used or free."""

    @property
    def queue_version(self) -> int:
        """Changes whenever the order or members of the free queue change, so that an idle step costs nothing."""

    def free_queue(self) -> Iterable[int]:
        """Blocks that no request references, the next to be reused first, pinned ones in their place."""

    def pin(self, block_id: int, holder: str) -> None:
        """Keep the block's bytes: it is not reused, whatever its requests do, until unpinned as often as pinned.

        holder: who keeps it, for messages.
        """

    def unpin(self, block_id: int) -> None:
        """End one pin; the block keeps its place in the free queue."""


class WriteFence(Protocol):
    """An event of the engine's device after which the GPU pool's bytes are what the engine's bookkeeping says."""

    def wait(self, timeout: float) -> bool:
        """Block the calling thread (a copying thread, never the engine's) until it fired; False after `timeout` s."""


class _Written:
    def wait(self, timeout: float) -> bool:
        del timeout
        return True


WRITTEN: WriteFence = _Written()
"""For engines whose forward has ended when it returns, as on a CPU."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request as the connector knows it.

    request_id: unique among live requests; a finished id may be used again.
    digests: one digest per full block of the request's tokens; the same list, growing as tokens come.
    num_local_blocks: leading blocks that the engine's own prefix cache holds as the request arrives: those behind them
        are looked for in lower tiers.
    num_tokens: that it has as it arrives, for what recomputing would cost; 0 is those of its full blocks.
    """

    request_id: str
    digests: Sequence[BlockDigest]
    options: KVOptions = NO_OPTIONS
    num_local_blocks: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What could be restored of a prompt.

    num_blocks: blocks after the local ones that could land now. miss: why the next one could not; None if none is left.
    is_staging: blocks are on their way to host memory, within the request's limit: let others pass until
    `poll_restores` names the request. Admitting it all the same is allowed, and gives up the wait.
    """

    num_blocks: int
    miss: MissReason | None
    is_staging: bool = False


@dataclass(frozen=True, slots=True)
class StepWork:
    """What prompts cost this engine, from which the cost of recomputing one is learnt.

    num_tokens: prompt tokens that the last step computed. num_pairs: what their attention looked at: over each
    request's chunk of n tokens from a position, n x (position + n / 2). seconds: how long that step ran the model, also
    for decodes. backlog_tokens: prompt tokens that are to be computed before those of a request that arrives now.
    """

    num_tokens: int
    num_pairs: float
    seconds: float
    backlog_tokens: int


NO_WORK = StepWork(0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class StepDemand:
    """How soon the free queue will be used up, in blocks.

    allocated: taken since the last plan. step_budget: the most that one step can take. waiting: what the requests that
    wait for admission are known to need. work: what the last step computed.
    """

    allocated: int
    step_budget: int
    waiting: int
    work: StepWork = NO_WORK


class CopyDirection(StrEnum):
    STORE = "store"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy between GPU pool and slots: `block_ids[i]` and the slot at byte `offsets[i]` of the host pool."""

    job_id: int
    direction: CopyDirection
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the worker should copy. in_flight: blocks of copies that have not ended, but for those given up, or that
    begin in a moment; while it is not 0, the engine polls on, even without a request. fence: jobs that read what this
    step writes."""

    jobs: tuple[CopyJob, ...]
    in_flight: int
    fence: tuple[int, ...] = ()


NO_COPIES = TransferPlan((), 0)


class CopyFailure(StrEnum):
    """Why blocks of a job were not copied."""

    BACKLOG = "backlog"
    NO_FENCE = "no_fence"
    RAISED = "raised"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The end of a job, told once.

    copied: one positive verdict per block, in the job's order. seconds: copying time. rank: of the worker that tells
    it; a job of several workers has ended when each has told.
    """

    job_id: int
    copied: tuple[bool, ...]
    failure: CopyFailure | None = None
    seconds: float = 0.0
    rank: int = 0

    def verdicts(self, num_blocks: int) -> list[bool]:
        """Exactly `num_blocks` verdicts, whatever the worker told: what is not plainly copied is not copied."""
        told = self.copied if isinstance(self.copied, (tuple, list)) else ()
        copied = [verdict is True for verdict in told[:num_blocks]]
        return copied + [False] * (num_blocks - len(copied))


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """The end of one request's restore. The first `num_landed` of the destination blocks hold their bytes and may be
    made matchable now; the others hold nothing and are the engine's to compute into or free.

    will_retry: what did not land is looked for once more: the engine gives the blocks up (those that landed stay
    matchable) and the request waits, as one that `match` said is staging.
    must_fail: it failed for good, and `restore.on_failure` is `fail`: the engine ends the request with an error.
    is_abandoned: its time is over, but copies still write the destinations: nothing landed, and the engine gives these
    blocks up at once (their pins keep them from reuse); the request waits for others and is recomputed.
    """

    request_id: str
    first_block: int
    num_landed: int
    will_retry: bool = False
    must_fail: bool = False
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class RestorePoll:
    """Where restores stand, once a step.

    ready: requests that no longer wait for blocks to come to host memory: `match` says what they have. failed: those
    whose blocks could not be brought there, where `restore.on_failure` is `fail`: the engine ends them with an error;
    they are not in `ready`. outcomes: restores that ended because their time is over. num_active: restores that wait
    for a tier or a copy. next_deadline: on the connector's clock, when the first wait ends by itself, that for a copy
    down included; None without one.
    """

    ready: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    outcomes: tuple[RestoreOutcome, ...] = ()
    num_active: int = 0
    next_deadline: float | None = None


NO_RESTORES = RestorePoll()


class ConnectorScheduler(ABC):
    """The half beside the engine's scheduler. One thread; no call blocks, copies or raises."""

    @abstractmethod
    def start_request(self, request: RequestInfo) -> None:
        """A request arrived.

        From here on its blocks may be asked for; those that only lower tiers hold begin to move to host memory.
        """

    @abstractmethod
    def requeue_request(self, request_id: str, num_local_blocks: int, num_tokens: int) -> None:
        """A live request was preempted: it lost its blocks and waits again, with the tokens it has now.

        What it may restore is looked for anew, as when it arrived. num_local_blocks, num_tokens: as in RequestInfo.
        """

    @abstractmethod
    def poll_restores(self) -> RestorePoll:
        """Once a step, after `complete`: advance every active restore, whatever the engine has room for.

        Names each request that `match` said is staging once, when that is over. Costs as much as restores are active.
        """

    @abstractmethod
    def match(self, request_id: str, num_local_blocks: int, max_blocks: int) -> Match:
        """How many of blocks `num_local_blocks ..`, at most `max_blocks`, could be restored.

        May be asked at every step: nothing that an engine can see changes by it, nothing is counted, and it costs
        nothing while it is staging. The engine leaves at least one token to compute.
        """

    @abstractmethod
    def refuse_restore(self, request_id: str, *, is_permanent: bool = False) -> bool:
        """The engine has a place for this request, but not the blocks that its restore and the rest of it need now.

        True: go on waiting, and ask again in the next step. False: it has waited for `restore.capacity_bound_s` since
        the first refusal; one warning. Admit it as any prompt: nothing more is brought for it, and what `match` finds
        in host memory then lands. is_permanent: the blocks will never be there: False at once, and nothing lands.
        """

    @abstractmethod
    def admit(self, request_id: str, num_local_blocks: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        """The request is admitted: count its lookup, and restore into `block_ids` (empty: recompute).

        max_blocks: as in `match`, the blocks that a restore might have served: those asked for, in the hit rate.

        The destinations are the request's blocks `num_local_blocks ..`, allocated, referenced, not matchable. Returns
        for how many of them, from the first, a restore began; for those the engine waits for the RestoreOutcome, the
        rest it computes. 0: nothing began and nothing is pinned. They stay pinned until the last copy ended. A request
        that ends first gets no outcome: the engine gives up its blocks at once, and the pins keep them from reuse.
        """

    @abstractmethod
    def publish(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """A confirmed forward, or a landed restore, filled these blocks: blocks `first_block ..` of the request.

        Only full blocks, only after the step that filled them has succeeded. From here on they may be stored.
        """

    @abstractmethod
    def plan_step(self, reused: Sequence[int], demand: StepDemand, *, is_fenced: bool = False) -> TransferPlan:
        """Once a step, after the engine allocated for it: choose what to copy and pin its sources.

        reused: blocks handed out since the last plan; what they held before is gone. The order of a step is allocate,
        plan_step, forward, publish: a block named here after its new content was published is forgotten, not stored.
        is_fenced: what they held is stored yet, for the forward waits for `fence`, or tells those jobs as not copied.
        """

    @abstractmethod
    def complete(self, results: Sequence[CopyResult]) -> list[RestoreOutcome]:
        """Copies ended: commit, unpin, report restores that are over. Late, double or unknown results are ignored."""

    @abstractmethod
    def finish_request(self, request_id: str) -> None:
        """The request ended: finished, failed or aborted. Idempotent. Its copies under way end on their own."""

    @abstractmethod
    def reset(self) -> bool:
        """Forget all KV, here and in every tier: the engine forgets its own too. Copies under way come to nothing.

        False when a tier could not make sure of it, which is logged: nothing is stored or restored from then on, until
        a reset succeeds, but a later process might find KV of before. Between steps: waits, within a bound, for lower
        tiers.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop what is not stored, with a reason, and end every lease. Idempotent. Between steps.

        The worker was closed first. Blocks of copies that did not end within its bound stay pinned, and their slots
        leased: something may still write them.
        """


class ConnectorWorker(ABC):
    """The half beside the GPU pool. Copies on its own thread; `submit` and `poll` are called by the engine's thread."""

    @abstractmethod
    def submit(self, plan: TransferPlan, written: WriteFence | None) -> None:
        """Queue the plan's copies: each begins after `written` fired, and without a fence nothing is. Never blocks."""

    @abstractmethod
    def poll(self, timeout: float = 0.0) -> list[CopyResult]:
        """Results since the last poll. Blocks at most `timeout` seconds for the first one: 0 within a step."""

    @abstractmethod
    def close(self, timeout: float) -> list[CopyResult]:
        """Stop copying, within `timeout` seconds; the last results, those of copies never begun included."""
