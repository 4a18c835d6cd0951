"""A request between its start and its end, as the scheduler half keeps it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.restore import RestoreQuery
from kvtier_connectors.arrival import Arrival
from kvtier_connectors.contract import RequestInfo
from kvtier_connectors.known import KnownRun
from kvtier_connectors.landing import Landing

__all__ = ["LiveRequest", "check_index"]


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request between its start and its end.

    num_local_blocks, num_tokens: as in RequestInfo, when it last came to wait. epoch_digest: the namespace when it
    began; after a reset its blocks are of no use to others, and theirs not to it.
    """

    info: RequestInfo
    epoch_digest: bytes
    num_local_blocks: int
    num_tokens: int
    order: tuple[int, int]
    """Its priority, and which of all the requests it is."""
    was_admitted: bool = False
    is_retrying: bool = False
    """Its last copies failed, and it is matched and admitted once more."""
    arrival: Arrival | None = None
    landing: Landing | None = None
    hit_sources: Mapping[str, int] = field(default_factory=dict)
    """Blocks that its first admission began to restore, by the tier that had had them."""
    known: KnownRun | None = None
    """What host memory was found to hold of it."""

    @property
    def request_id(self) -> str:
        return self.info.request_id

    @property
    def must_fail(self) -> bool:
        """Its restore failed for good, and the engine is to end it."""
        return self.arrival is not None and self.arrival.episode.must_fail

    def max_restored(self, block_tokens: int) -> int | None:
        """How many of its blocks may be restored; None: all."""
        tokens = self.info.options.max_restore_tokens
        return None if tokens is None else tokens // block_tokens

    def query(self, block_tokens: int, *, may_restore: bool) -> RestoreQuery:
        """What it would have restored, of the blocks behind its local ones."""
        num_local, num_full = self.num_local_blocks, len(self.info.digests)
        if self.num_tokens:
            num_full = min(num_full, (self.num_tokens - 1) // block_tokens)
        return RestoreQuery(
            request_id=self.request_id,
            position=num_local * block_tokens,
            num_tokens=self.num_tokens or num_full * block_tokens,
            max_blocks=max(0, num_full - num_local),
            may_restore=may_restore,
            max_wait_s=self.info.options.max_wait_s,
            max_tokens=self.info.options.max_restore_tokens,
        )


def check_index(name: str, value: int) -> None:
    if operator.index(value) < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
