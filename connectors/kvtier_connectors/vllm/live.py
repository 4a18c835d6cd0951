"""A vLLM request between its arrival and its end, and the load that it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.request import Request, RequestStatus

from kvtier_connectors.contract import CopyDirection, CopyJob, CopyResult

__all__ = ["ABORTED", "Live", "Load", "LoadJobs", "StepLimits"]

ABORTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
"""Of what such a request computed last it is not known whether it counts."""


class StepLimits(NamedTuple):
    """step_budget: the most blocks that one step can take. num_ranks: workers that each hold a part of every block."""

    step_budget: int
    num_ranks: int


@dataclass(eq=False)
class Load:
    """One load of a request: the destinations that vLLM was promised, and how many copies write them yet."""

    request_id: str
    blocks: tuple[int, ...]
    num_copying: int
    num_good: int | None = None
    """The first blocks that hold their bytes; None until that is known."""
    is_told: bool = False


@dataclass(eq=False)
class Live:
    """A request between its arrival and its end."""

    request: Request
    num_preemptions: int = 0
    """As vLLM counts them, when it last came to wait."""
    num_local: int = 0
    """Leading blocks that vLLM's prefix cache had when it last asked."""
    num_published: int = 0
    is_counted: bool = False
    """It was admitted since it last came to wait."""
    has_given_up: bool = False
    """A load failed, or it waited for GPU blocks for too long: nothing more is promised until it is preempted, so that
    it is admitted by its first chunk."""
    load: Load | None = None
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """Forwards under way: the plan's serial, and how many of its tokens are computed when it has ended."""


class LoadJobs:
    """The copy jobs of loads that have not ended in every worker: how many blocks each copies, and who has told."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, tuple[Load, int, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def note(self, job: CopyJob, loads: Mapping[int, Load]) -> None:
        """A job was planned; nothing, for a store. loads: by destination block. Idempotent."""
        load = loads.get(job.block_ids[0]) if job.direction is CopyDirection.RESTORE else None
        if load is not None:
            self._jobs.setdefault(job.job_id, (load, len(job.block_ids), set()))

    def end(self, result: CopyResult) -> Load | None:
        """A worker told the end of a job: the load, with fewer blocks to copy, if it was the last to."""
        found = self._jobs.get(result.job_id)
        if found is None:
            return None
        load, num_blocks, ranks = found
        ranks.add(result.rank)
        if len(ranks) < self._num_ranks:
            return None
        del self._jobs[result.job_id]
        load.num_copying -= num_blocks
        return load
