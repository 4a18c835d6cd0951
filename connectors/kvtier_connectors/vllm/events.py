"""vLLM's KV events of what host memory holds: for routers that send a prompt where its KV is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, split_key
from kvtier.store import Space
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction

__all__ = ["HostEvents"]

MEDIUM = "CPU"


class HostEvents:
    """Tells what has changed of what host memory holds since it was last asked, so that whoever follows the events ends
    with what is there, whatever happened in between, and in whatever order it was heard of.

    A stored block is named by vLLM's own hash, with its parent's and no tokens: who listens knows these from the event
    of the same hash on the GPU.

    Mutable state: `_touched` (blocks of which something was heard since, with their parents), guarded by `_lock`, for
    any thread may store and evict; `_told` (what listeners believe, with parents) and the rest, by the engine's thread.
    """

    def __init__(self, host: HostTier, space: Space, block_tokens: int, current_cache: Callable[[], object]) -> None:
        """current_cache: another object once vLLM has cleared its own prefix cache, and so told listeners to forget all
        that they knew, of every medium."""
        self._host = host
        self._space = space
        self._block_tokens = block_tokens
        self._current_cache = current_cache
        self._cache = current_cache()
        self._epoch = space.digest
        self._lock = threading.Lock()
        self._touched: dict[BlockDigest, BlockDigest | None] = {}
        self._told: dict[BlockDigest, BlockDigest | None] = {}
        self._unsubscribe = host.subscribe(on_commit=self._stored, on_evict=self._removed)

    def take(self) -> list[KVCacheEvent]:
        """What has changed since the last call: removals, then what was stored, prefix before tail."""
        if not self._touched and self._epoch == self._space.digest and self._cache is self._current_cache():
            return []
        with self._lock:
            touched, self._touched = self._touched, {}
        gone: list[BlockDigest] = []
        if self._epoch != self._space.digest:
            self._epoch, gone = self._space.digest, list(self._told)
        states = self._host.states(self._epoch, list(touched))
        held = {digest for digest, state in zip(touched, states, strict=True) if state is BlockState.COMMITTED}
        gone = gone or [digest for digest in touched if digest in self._told and digest not in held]
        for digest in gone:
            del self._told[digest]
        if self._cache is self._current_cache():
            events = self._removals(gone)
        else:  # listeners know nothing by now: vLLM's event comes before ours
            self._cache = self._current_cache()
            events = [self._event(item) for item in self._told.items()]
        new = {digest: parent for digest, parent in touched.items() if digest in held and digest not in self._told}
        self._told |= new
        events += map(self._event, new.items())
        return events

    def close(self) -> None:
        self._unsubscribe()

    @staticmethod
    def _removals(digests: Sequence[BlockDigest]) -> list[KVCacheEvent]:
        gone = [maybe_convert_block_hash(digest) for digest in digests]
        return [BlockRemoved(block_hashes=gone, medium=MEDIUM)] if gone else []

    def _event(self, item: tuple[BlockDigest, BlockDigest | None]) -> KVCacheEvent:
        digest, parent = item
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(digest)],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=[],
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
        )

    def _stored(self, keys: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        del came_from
        digest = self._space.digest
        split = [(split_key(key), None if parent is None else split_key(parent)[1]) for key, parent in keys]
        with self._lock:
            for (space, block), above in split:
                if space == digest:
                    self._touched.pop(block, None)  # to the end: prefixes are stored before their tails
                    self._touched[block] = above

    def _removed(self, evicted: Sequence[Eviction]) -> None:
        digest = self._space.digest
        with self._lock:
            for item in evicted:
                if item.namespace == digest:
                    self._touched.setdefault(item.digest, None)
