"""vLLM's KV events of what host memory holds: for routers that send a prompt where its KV is."""

from __future__ import annotations

from collections.abc import Callable

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import EventSpace, TierEvents, chains, follow_host, held_by_host
from kvtier.tiers.host import HostTier

__all__ = ["HostEvents"]

MEDIUM = "CPU"


class HostEvents:
    """Tells what has changed of what host memory holds since it was last asked, so that whoever follows the events ends
    with what is there, whatever happened in between, and in whatever order it was heard of.

    A stored block is named by vLLM's own hash, with its parent's and no tokens: who listens knows these from the event
    of the same hash on the GPU.

    Mutable state: `_cache`, by the engine's thread; what is heard of blocks is the tracker's.
    """

    def __init__(
        self, host: HostTier, space: EventSpace, block_tokens: int, current_cache: Callable[[], object]
    ) -> None:
        """current_cache: another object once vLLM has cleared its own prefix cache, and so told listeners to forget all
        that they knew, of every medium."""
        self._block_tokens = block_tokens
        self._current_cache = current_cache
        self._cache = current_cache()
        self._tracker = TierEvents(space, held_by_host(host))
        self._unsubscribe = follow_host(host, self._tracker)

    def take(self) -> list[KVCacheEvent]:
        """What has changed since the last call: removals, then what was stored, prefix before tail."""
        was_cleared = self._cache is not self._current_cache()
        if not was_cleared and not self._tracker.has_changes:
            return []
        if was_cleared:
            self._cache = self._current_cache()
            self._tracker.retell()
        changes = self._tracker.drain()
        events: list[KVCacheEvent] = []
        if changes.gone and not was_cleared:  # else listeners know nothing by now: vLLM's event comes before ours
            gone = [maybe_convert_block_hash(digest) for digest in changes.gone]
            events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM))
        for parent, run in chains(changes.stored):
            events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(digest) for digest in run],
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=[],
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=None,
                )
            )
        return events

    def close(self) -> None:
        self._unsubscribe()
