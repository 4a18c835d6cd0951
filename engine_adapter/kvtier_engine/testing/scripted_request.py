"""A request as a scripted connector knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.keys import BlockDigest
from kvtier.restore import RestoreEpisode, RestorePhase, RestoreQuery
from kvtier_connectors.contract import RequestInfo
from kvtier_engine.testing.scripted_landings import Landing
from kvtier_engine.testing.tasks import Task

__all__ = ["ACTIVE", "ON_THE_WAY", "ScriptedRequest", "query"]

ACTIVE = (RestorePhase.LOOKING, RestorePhase.STAGING, RestorePhase.LANDING)
ON_THE_WAY = (RestorePhase.LOOKING, RestorePhase.STAGING)


def query(
    info: RequestInfo, num_local_blocks: int, num_tokens: int, block_tokens: int, *, may_restore: bool
) -> RestoreQuery:
    """What an episode of this request begins with."""
    num_tokens = num_tokens or len(info.digests) * block_tokens
    return RestoreQuery(
        request_id=info.request_id,
        position=num_local_blocks * block_tokens,
        num_tokens=num_tokens,
        max_blocks=max(0, (num_tokens - 1) // block_tokens - num_local_blocks),
        may_restore=may_restore,
        max_wait_s=info.options.max_wait_s,
        max_tokens=info.options.max_restore_tokens,
    )


@dataclass(eq=False, slots=True)
class ScriptedRequest:
    """From its arrival to its end.

    epoch: resets before it began. waits: the engine was told to wait for it. lookup, stage, landing: what is under way
    for it, and still wanted.
    """

    info: RequestInfo
    episode: RestoreEpisode
    epoch: int
    block_tokens: int
    waits: bool = False
    was_admitted: bool = False
    lookup: Task | None = None
    stage: Task | None = None
    landing: Landing | None = None

    @property
    def request_id(self) -> str:
        return self.info.request_id

    @property
    def phase(self) -> RestorePhase:
        return self.episode.phase

    @property
    def position(self) -> int:
        """The first block that its episode is about."""
        return self.episode.position // self.block_tokens

    @property
    def wanted(self) -> Sequence[BlockDigest]:
        """Every block that its episode is about."""
        return self.info.digests[self.position : self.position + self.episode.max_blocks]

    @property
    def goal(self) -> Sequence[BlockDigest]:
        """The blocks of these that it goes for."""
        return self.wanted[: self.episode.num_blocks]

    def reachable(self, first_block: int, max_blocks: int) -> Sequence[BlockDigest]:
        """Of blocks `first_block ..`, at most `max_blocks`, those that its episode may restore."""
        last = min(first_block + max(0, max_blocks), self.position + self.episode.num_blocks)
        return self.info.digests[first_block : max(0, last)]
