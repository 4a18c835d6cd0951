"""vLLM's KV events of what host memory holds: for routers that send a prompt where its KV is."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.keys import Key, split_key
from kvtier.store import Space
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction

__all__ = ["HostEvents"]

logger = logging.getLogger("kvtier.vllm")

MEDIUM = "CPU"
MAX_EVENTS = 1 << 16


class HostEvents:
    """Collects what is stored to and removed from host memory until vLLM publishes it. Any thread.

    A stored block is named by vLLM's own hash, with its parent's and no tokens: who listens knows these from the event
    of the same hash on the GPU. A reset is vLLM's to tell: it clears its own cache with ours.

    Mutable state: `_events`, guarded by `_lock`; where nobody takes them the oldest are lost, and that is said once.
    """

    def __init__(self, host: HostTier, space: Space, block_tokens: int) -> None:
        self._space = space
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._events: deque[KVCacheEvent] = deque(maxlen=MAX_EVENTS)
        self._has_lost = False
        self._unsubscribe = host.subscribe(on_commit=self._stored, on_evict=self._removed)

    def take(self) -> list[KVCacheEvent]:
        """Those since the last call, in their order."""
        if not self._events:
            return []
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    def close(self) -> None:
        self._unsubscribe()

    def _stored(self, keys: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        del came_from
        digest = self._space.digest
        for key, parent in keys:
            space, block = split_key(key)
            if space == digest:
                above = None if parent is None else maybe_convert_block_hash(split_key(parent)[1])
                stored = BlockStored(
                    block_hashes=[maybe_convert_block_hash(block)],
                    parent_block_hash=above,
                    token_ids=[],
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=None,
                )
                self._add(stored)

    def _removed(self, evicted: Sequence[Eviction]) -> None:
        digest = self._space.digest
        gone = [maybe_convert_block_hash(item.digest) for item in evicted if item.namespace == digest]
        if gone:
            self._add(BlockRemoved(block_hashes=gone, medium=MEDIUM))

    def _add(self, event: KVCacheEvent) -> None:
        with self._lock:
            is_full = len(self._events) == MAX_EVENTS
            self._events.append(event)
        if is_full and not self._has_lost:
            self._has_lost = True
            logger.warning("vLLM takes no KV events: of more than %d the oldest are lost from here on", MAX_EVENTS)
