"""Good calls: what each moves, byte for byte."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.base import KernelBackend
from kvtier_kernels.checks import HOLE
from kvtier_kernels.testing.pools import Pool, verify_bytes

SLOT_ORDERS = ("contiguous", "reversed", "scattered", "odd")


def slot_offsets(order: str, num_slots: int, block_bytes: int) -> list[int]:
    """Offsets of disjoint slots that start at 8 or, for "odd", at 3; `host_for` leaves room behind them."""
    if order == "contiguous":
        return [8 + slot * block_bytes for slot in range(num_slots)]
    if order == "reversed":
        return slot_offsets("contiguous", num_slots, block_bytes)[::-1]
    start, gap = (8, 64) if order == "scattered" else (3, 5)
    slots = np.random.default_rng(11).permutation(num_slots)
    return [int(start + slot * (block_bytes + gap)) for slot in slots]


def host_for(num_slots: int, block_bytes: int) -> Bytes:
    """Random bytes, repeated at a prime distance, with room for the slots of any order."""
    pattern = np.random.default_rng(13).integers(0, 256, 65521, dtype=np.uint8)
    return np.resize(pattern, 72 + num_slots * (block_bytes + 64))


def id_lists(num_blocks: int) -> dict[str, list[int]]:
    """Block ids to move: none, one, all, with holes."""
    shuffled = np.random.default_rng(5).permutation(num_blocks).tolist()
    return {
        "empty": [],
        "single": [num_blocks - 1],
        "all": shuffled,
        "holes": [HOLE, *shuffled[: num_blocks // 2], HOLE, *shuffled[num_blocks // 2 + 1 :], HOLE],
        "only holes": [HOLE, HOLE],
    }


def verify_gather(backend: KernelBackend[Any], pool: Pool, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
    """The named slots hold their blocks; the rest of the host buffer and the pool are as before."""
    host, before = host_for(len(offsets), pool.block_bytes), pool.clone()
    expected = host.copy()
    for block_id, offset in zip(block_ids, offsets, strict=True):
        if block_id != HOLE:
            expected[offset : offset + pool.block_bytes] = pool.block(block_id)
    backend.gather(pool.planes, block_ids, host, offsets)
    verify_bytes(host, expected)
    pool.verify_equal(before)


def verify_scatter(backend: KernelBackend[Any], pool: Pool, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
    """The named blocks hold their slots; the rest of the pool and the host buffer are as before."""
    host, expected = host_for(len(offsets), pool.block_bytes), pool.clone()
    before = host.copy()
    host.flags.writeable = False
    for block_id, offset in zip(block_ids, offsets, strict=True):
        if block_id != HOLE:
            expected.set_block(block_id, host[offset : offset + pool.block_bytes])
    backend.scatter(pool.planes, block_ids, host, offsets)
    pool.verify_equal(expected)
    verify_bytes(host, before)


def verify_round_trip(
    backend: KernelBackend[Any], pool: Pool, block_ids: Sequence[int], offsets: Sequence[int]
) -> None:
    """Blocks stored from one pool and restored into other blocks of another read the same there."""
    host, target = host_for(len(offsets), pool.block_bytes), pool.clone()
    rotated = [block_id if block_id == HOLE else (block_id + 1) % pool.shape.num_blocks for block_id in block_ids]
    backend.gather(pool.planes, block_ids, host, offsets)
    backend.scatter(target.planes, rotated, host, offsets)
    for block_id, other in zip(block_ids, rotated, strict=True):
        if block_id != HOLE:
            verify_bytes(target.block(other), pool.block(block_id))
