"""The way up, first stage: what a request waits for before it is admitted, and a word when that was in vain."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvtier.config import RestoreSettings
from kvtier.keys import BlockDigest
from kvtier.reasons import MissReason
from kvtier.stage import Stage
from kvtier.store import Space
from kvtier_connectors.contract import RequestInfo

__all__ = ["Arrival", "ArrivalFlow"]

logger = logging.getLogger("kvtier.connector")


@dataclass(eq=False, slots=True)
class Arrival:
    """One request's stage, and where in its prompt that begins."""

    stage: Stage
    first_block: int
    limit_s: float

    @property
    def is_running(self) -> bool:
        """Whether there is still something to wait for. Ends the wait when its time is over."""
        return not self.stage.poll()

    def explains(self, block_index: int) -> MissReason | None:
        """Why the prompt's block at `block_index` is not in host memory, as far as the stage knows."""
        stage = self.stage
        if block_index < self.first_block + stage.num_end:
            return None
        gave_up = stage.miss is None and stage.num_end < stage.num_blocks
        return MissReason.TIMEOUT if gave_up else stage.miss


class ArrivalFlow:
    """Begins and ends the stages of live requests. Engine's thread only; holds nothing of its own."""

    def __init__(self, space: Space, settings: RestoreSettings) -> None:
        self._space = space
        self._max_wait_s = settings.max_wait_s
        self._block_tokens = space.namespace.layout.block_tokens

    def max_blocks(self, request: RequestInfo) -> int | None:
        """How many of its blocks may be restored; None: all."""
        tokens = request.options.max_restore_tokens
        return None if tokens is None else tokens // self._block_tokens

    def begin(self, request: RequestInfo) -> Arrival | None:
        """Bring to host memory what only lower tiers hold of its prompt; None when that is nothing."""
        wait = request.options.max_wait_s
        limit_s = self._max_wait_s if wait is None else wait
        start = request.num_local_blocks
        max_blocks = self.max_blocks(request)
        wanted: list[BlockDigest] = list(request.digests[start : None if max_blocks is None else start + max_blocks])
        if not wanted or start < 0:
            return None
        parent = request.digests[start - 1] if start else None
        stage = self._space.stage(request.request_id, wanted, parent, limit_s)
        return None if stage is None else Arrival(stage, start, limit_s)

    def end(self, request_id: str, arrival: Arrival) -> None:
        """The request is admitted, with what came: let go of the rest; one warning, and a count, if it waited in vain.

        Its landing has leased what it needs.
        """
        stage = arrival.stage
        stage.close()
        if stage.miss is None:
            return
        self._space.count_fallback(stage.miss)
        num_missing = stage.num_blocks - stage.num_end
        logger.warning(
            "request %s: %d of %d blocks did not come from the %s tier (%s) in %.3f s, limit %g s; their %d tokens are "
            "recomputed",
            request_id,
            num_missing,
            stage.num_blocks,
            " and ".join(stage.tiers),
            stage.miss.value,
            stage.seconds,
            arrival.limit_s,
            num_missing * self._block_tokens,
        )
