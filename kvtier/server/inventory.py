"""What a store holds, tier by tier, a slice at a time: for operators, not for engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.keys import BlockDigest, split_key
from kvtier.lower import LowerTier
from kvtier.protocol.fields import MAX_BLOCKS
from kvtier.store import Store
from kvtier.tiers.disk import DiskTier

__all__ = ["HOST", "Count", "Rows", "block_slices", "count_namespaces"]

HOST = "host"
SLICE_BLOCKS = MAX_BLOCKS
"""That are leased at once to be looked at: less than a millisecond under host memory's lock."""


class Count(NamedTuple):
    """What a tier holds of one namespace; of all, where it cannot tell them apart. nbytes: in host memory of blocks,
    below of what they take there."""

    tier: str
    namespace: bytes
    blocks: int
    nbytes: int


class Rows(NamedTuple):
    """Blocks of one namespace in one tier: digest and length of each, MAX_BLOCKS at most."""

    tier: str
    namespace: bytes
    blocks: list[tuple[bytes, int]]


def count_namespaces(store: Store) -> Iterator[Count | None]:
    """Of every tier; None after a slice of the work. What comes or goes meanwhile is counted or not."""
    for namespace in sorted(store.host.namespaces()):
        blocks = nbytes = 0
        for rows in _host_slices(store, namespace):
            yield None
            blocks += len(rows.blocks)
            nbytes += sum(length for _, length in rows.blocks)
        yield Count(HOST, namespace, blocks, nbytes)
    for lower in store.lower:
        if isinstance(lower.device, DiskTier):
            yield from _count_disk(lower.name, lower.device)
        else:
            usage = lower.device.usage()
            yield Count(lower.name, b"", usage.num_blocks, usage.used_bytes)


def block_slices(store: Store, tier: str, namespace: bytes) -> Iterator[Rows]:
    """Blocks that may be read. tier, namespace: of these alone, unless empty; a tier that cannot list its blocks has
    none here."""
    if tier in ("", HOST):
        for each in sorted(store.host.namespaces()):
            if namespace in (b"", each):
                yield from _host_slices(store, each)
    for lower in store.lower:
        if tier in ("", lower.name) and isinstance(lower.device, DiskTier):
            yield from _disk_slices(lower, lower.device, namespace)


def _host_slices(store: Store, namespace: bytes) -> Iterator[Rows]:
    """No lease is kept between slices."""
    digests = store.host.digests(namespace)
    for start in range(0, len(digests), SLICE_BLOCKS):
        part = [(namespace, BlockDigest(digest)) for digest in digests[start : start + SLICE_BLOCKS]]
        with store.pool.owner("an operator looks") as owner:
            found = store.host.lease_blocks(part, owner)
        pairs = zip(part, found, strict=True)
        yield Rows(HOST, namespace, [(digest, held.nbytes) for (_, digest), held in pairs if held is not None])


def _count_disk(name: str, tier: DiskTier) -> Iterator[Count | None]:
    blocks: Counter[bytes] = Counter()
    nbytes: Counter[bytes] = Counter()
    for rows in tier.rows():
        for row in rows:
            namespace = split_key(row.key)[0]
            blocks[namespace] += 1
            nbytes[namespace] += row.frame_bytes
        yield None
    for namespace in sorted(blocks):
        yield Count(name, namespace, blocks[namespace], nbytes[namespace])


def _disk_slices(lower: LowerTier, tier: DiskTier, namespace: bytes) -> Iterator[Rows]:
    for rows in tier.rows():
        found: defaultdict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
        for row in rows:
            space, digest = split_key(row.key)
            if namespace in (b"", space):
                found[space].append((digest, row.raw_bytes))
        for space, blocks in found.items():
            for start in range(0, len(blocks), MAX_BLOCKS):
                yield Rows(lower.name, space, blocks[start : start + MAX_BLOCKS])
