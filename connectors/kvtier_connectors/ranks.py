"""A copy of several workers: ended when every rank has told, done where all of them have done it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier_connectors.contract import CopyFailure, CopyResult

__all__ = ["RankResults"]

MAX_SECONDS = 1e9
"""No copy takes longer: what says so is not a time."""


@dataclass(slots=True)
class _Told:
    """What some ranks told of a job."""

    copied: tuple[bool, ...]
    failure: CopyFailure | None
    seconds: float
    ranks: set[int] = field(default_factory=set)


def plain_seconds(seconds: object) -> float:
    """A time that a worker told; 0.0 for what is none."""
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= MAX_SECONDS:
        return 0.0
    return float(seconds)


class RankResults:
    """Joins what each rank's worker tells of a job into one result. Engine's thread only.

    Mutable state: `_told`, of jobs of which some ranks have told and others have not.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ConfigError(f"num_ranks must be at least 1, not {num_ranks}")
        self._num_ranks = num_ranks
        self._told: dict[int, _Told] = {}

    def can_take(self, result: CopyResult) -> bool:
        """Whether it is a known rank's first word of the job."""
        rank = result.rank
        if type(rank) is not int or not 0 <= rank < self._num_ranks:
            return False
        told = self._told.get(result.job_id)
        return told is None or rank not in told.ranks

    def take(self, result: CopyResult) -> CopyResult | None:
        """Note one rank's word; with the last, the job's result: a block is copied that each of them has copied, and
        the time is the slowest rank's."""
        copied = tuple(verdict is True for verdict in result.copied) if isinstance(result.copied, (tuple, list)) else ()
        told, seconds = self._told.get(result.job_id), plain_seconds(result.seconds)
        if told is None:
            told = self._told[result.job_id] = _Told(copied, result.failure, seconds)
        else:
            # Cut to the shorter: what a rank did not name it did not copy.
            told.copied = tuple(map(all, zip(told.copied, copied, strict=False)))
            told.failure = told.failure or result.failure
            told.seconds = max(told.seconds, seconds)
        told.ranks.add(result.rank)
        if len(told.ranks) < self._num_ranks:
            return None
        del self._told[result.job_id]
        return CopyResult(result.job_id, told.copied, told.failure, told.seconds)

    @property
    def all(self) -> range:
        return range(self._num_ranks)
