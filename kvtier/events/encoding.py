"""KV events as they go over the wire: byte for byte what vLLM publishes for the same event.

A batch is an array of its time, its events and a rank; an event is a map with its kind under `type`, in which fields
that say nothing are left out. Names and order of the fields are those of vLLM's `vllm.distributed.kv_events`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.events.tracker import Changes, chains

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "KVEventBatch", "encode_batch", "events_of"]


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    """Blocks that continue each other are on a medium by now.

    Hashes are kvtier's digests, the bytes as they are. Tokens are never given: no tier knows them.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first one; None where there is none, or it is not known."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event):
    """Blocks are on a medium no more; they may be on others."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    """No block is on any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events to be applied in their order. ts: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def events_of(changes: Changes, medium: str, block_tokens: int) -> list[Event]:
    """Changes of a tier as events: removals, then one event for each run of blocks that continue each other."""
    events: list[Event] = []
    if changes.gone:
        events.append(BlockRemoved(block_hashes=list(changes.gone), medium=medium))
    for parent, run in chains(changes.stored):
        events.append(
            BlockStored(
                block_hashes=list(run),
                parent_block_hash=parent,
                token_ids=[],
                block_size=block_tokens,
                lora_id=None,
                medium=medium,
                lora_name=None,
            )
        )
    return events


def encode_batch(ts: float, events: list[Event]) -> bytes:
    """The payload of one message."""
    return msgspec.msgpack.encode(KVEventBatch(ts, events))
