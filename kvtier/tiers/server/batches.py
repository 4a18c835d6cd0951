"""Blocks of one call, taken apart into what one message can name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.keys import DIGEST_BYTES, KEY_BYTES, NAMESPACE_BYTES, Key
from kvtier.protocol.messages import MAX_BLOCKS, MAX_LOOKUP_BLOCKS
from kvtier.tiers.base import WriteRequest

__all__ = ["BATCH_BYTES", "Batch", "Lookups", "batch_bytes", "batches", "digests_of", "lookups", "parents_of", "ttl_ms"]

MAX_TTL_MS = (1 << 63) - 1
NO_PARENT = bytes(DIGEST_BYTES)

BATCH_BYTES = 32 << 20
"""Of blocks that one message reserves or stages, unless one block is longer: while one batch is copied the server
prepares the next. A message costs both sides as much as some tens of blocks."""
MIN_BATCH_BYTES = 4 << 20
CAPACITY_SHARE = 32
"""Of the server's memory no batch takes more than this part, unless that is less than MIN_BATCH_BYTES: two of each
call are under way."""

G = TypeVar("G", bound=Hashable)


class Batch(NamedTuple):
    """Blocks of one namespace and length. positions: of them in the call."""

    namespace: bytes
    block_bytes: int
    ttl_ms: int
    positions: list[int]


def batch_bytes(capacity_bytes: int) -> int:
    """Of one batch at most, at a server with so much memory."""
    return min(BATCH_BYTES, max(MIN_BATCH_BYTES, capacity_bytes // CAPACITY_SHARE))


def batches(blocks: Iterable[tuple[int, Key, int, int]], max_bytes: int) -> Iterator[Batch]:
    """Of positions, keys, lengths and lifetimes in milliseconds: in their order within each kind. max_bytes: of one
    batch, at least one block whatever its length."""
    kinds: dict[tuple[bytes, int, int], list[int]] = {}
    for position, key, nbytes, ttl_ms in blocks:
        kinds.setdefault((key[:NAMESPACE_BYTES], nbytes, ttl_ms), []).append(position)
    for (namespace, nbytes, ttl_ms), positions in kinds.items():
        step = max(1, min(MAX_BLOCKS, min(BATCH_BYTES, max_bytes) // nbytes))
        for start in range(0, len(positions), step):
            yield Batch(namespace, nbytes, ttl_ms, positions[start : start + step])


class Lookups(NamedTuple):
    """Keys of one namespace, no more than one message may ask for. positions: of them in the call."""

    namespace: bytes
    positions: range | list[int]
    digests: bytes


def lookups(keys: Sequence[Key]) -> Iterator[Lookups]:
    """In their order within each namespace. A prompt is thousands of keys of one: no Python code runs for each."""
    if not keys:
        return
    table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
    kinds: dict[bytes, range | list[int]] = {keys[0][:NAMESPACE_BYTES]: range(len(keys))}
    if not (table[:, :NAMESPACE_BYTES] == table[0, :NAMESPACE_BYTES]).all():
        several: dict[bytes, list[int]] = {}
        for position, key in enumerate(keys):
            several.setdefault(key[:NAMESPACE_BYTES], []).append(position)
        kinds = {**several}
    for namespace, positions in kinds.items():
        for start in range(0, len(positions), MAX_LOOKUP_BLOCKS):
            part = positions[start : start + MAX_LOOKUP_BLOCKS]
            rows = table[part.start : part.stop] if isinstance(part, range) else table[part]
            yield Lookups(namespace, part, rows[:, NAMESPACE_BYTES:].tobytes())


def digests_of(keys: Iterable[Key]) -> bytes:
    """As messages carry them."""
    digests = b"".join([key[NAMESPACE_BYTES:] for key in keys])
    assert len(digests) % DIGEST_BYTES == 0
    return digests


def parents_of(requests: Iterable[WriteRequest]) -> bytes:
    """As messages carry them."""
    return b"".join([NO_PARENT if each.parent is None else each.parent[NAMESPACE_BYTES:] for each in requests])


def ttl_ms(request: WriteRequest) -> int:
    """As messages carry it."""
    return 0 if request.ttl_s is None else max(1, int(min(request.ttl_s * 1000, MAX_TTL_MS)))
