"""All back ends over the conformance cases, and over random ones against the reference."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import BlockPlanes, KernelBackend, KernelError, backend_names, get_backend
from kvtier_kernels.device import DeviceBackend, DevicePlanes
from kvtier_kernels.testing import (
    BAD_CALLS,
    LAYOUTS,
    SLOT_ORDERS,
    BadCall,
    Pool,
    PoolShape,
    View,
    host_for,
    id_lists,
    pool_shapes,
    slot_offsets,
    verify_gather,
    verify_refused,
    verify_round_trip,
    verify_scatter,
)


def device_planes(arrays: Sequence[Any]) -> DevicePlanes:
    return DevicePlanes([torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arrays])


CPU = torch.device("cpu")
NAMES = backend_names()
CASES: dict[str, tuple[Callable[[], KernelBackend[Any]], View]] = {
    **{name: (partial(get_backend, name), BlockPlanes.from_arrays) for name in NAMES},
    "device": (partial(DeviceBackend, CPU), device_planes),
}
"""Every back end, and what it sees a pool as."""
SHAPES = list(pool_shapes())


def open_case(name: str, shape: PoolShape) -> tuple[Pool, KernelBackend[Any]]:
    make, view = CASES[name]
    return Pool(shape, view=view), make()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves_exactly_the_named_bytes(name: str, shape: PoolShape) -> None:
    pool, backend = open_case(name, shape)
    block_ids = id_lists(shape.num_blocks)["holes" if shape.num_blocks > 1 else "all"]
    for order in SLOT_ORDERS:
        offsets = slot_offsets(order, len(block_ids), pool.block_bytes)
        verify_gather(backend, pool, block_ids, offsets)
        verify_round_trip(backend, pool, block_ids, offsets)
        verify_scatter(backend, pool, block_ids, offsets)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", id_lists(1))
def test_id_lists(name: str, layout: str, ids: str) -> None:
    pool, backend = open_case(name, PoolShape(layout, 48))
    block_ids = id_lists(9)[ids]
    offsets = slot_offsets("scattered", len(block_ids), pool.block_bytes)
    verify_gather(backend, pool, block_ids, offsets)
    verify_scatter(backend, pool, block_ids, offsets)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_bad_calls_move_nothing(name: str, bad: BadCall) -> None:
    make, view = CASES[name]
    verify_refused(make(), bad, view)


NO_INTEGERS = [
    [0.0, 96.0],
    None,
    np.array([False, True]),
    [[0], [96]],
    [[0], [1, 2]],
    [None, 96],
    [0, 10**30],
    "0",
    {0, 96},
    torch.tensor([0.0, 96.0]),
    torch.tensor([0.0, 96.0], requires_grad=True),
    torch.tensor([0.0, 96.0], dtype=torch.bfloat16),
    torch.tensor([False, True]),
    torch.tensor([[0], [96]]),
    torch.tensor([0, 96], device="meta"),
    torch.tensor([0, 96]).to_sparse(),
    torch.tensor([0j, 96j]).conj(),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", NO_INTEGERS, ids=repr)
def test_copies_that_are_no_integers_are_refused_by_the_arguments_name(name: str, bad: Any) -> None:
    pool, backend = open_case(name, PoolShape("kv_split", 16))
    before, host = pool.clone(), host_for(2, pool.block_bytes)
    expected = host.copy()
    for op in (backend.gather, backend.scatter):
        with pytest.raises(KernelError, match=r"^block_ids is "):
            op(pool.planes, bad, host, [0, 96])
        with pytest.raises(KernelError, match=r"^offsets is "):
            op(pool.planes, [0, 1], host, bad)
    pool.verify_equal(before)
    np.testing.assert_array_equal(host, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_block_may_be_gathered_twice_and_a_slot_scattered_twice(name: str) -> None:
    pool, backend = open_case(name, PoolShape("separate", 24))
    verify_gather(backend, pool, [4, 4], slot_offsets("reversed", 2, pool.block_bytes))
    verify_scatter(backend, pool, [4, 5], [7, 7])


@pytest.mark.parametrize("name", CASES)
def test_any_integer_array_and_any_offset_of_a_hole(name: str) -> None:
    pool, backend = open_case(name, PoolShape("kv_split", 24))
    host = np.zeros(2 * pool.block_bytes, np.uint8)
    backend.gather(pool.planes, np.array([8, -1], np.int8), host, np.array([3, -(10**12)]))
    np.testing.assert_array_equal(host[3 : 3 + pool.block_bytes], pool.block(8))
    backend.scatter(pool.planes, np.array([1, 2], np.uint64), host, np.array([3, 3], np.uint16))
    np.testing.assert_array_equal(pool.block(2), pool.block(8))
    backend.scatter(pool.planes, torch.tensor([4, 5], dtype=torch.int32), host, torch.tensor([3, 3]))
    np.testing.assert_array_equal(pool.block(5), pool.block(8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["kv_split", "separate"])
def test_threads_on_disjoint_blocks(name: str, layout: str) -> None:
    source, backend = Pool(PoolShape(layout, 4096, num_blocks=32)), get_backend(name)
    target = source.clone()
    offsets = slot_offsets("scattered", 32, source.block_bytes)
    host = host_for(32, source.block_bytes)

    def move(part: int) -> None:
        ids, slots = range(part, 32, 4), offsets[part::4]
        backend.gather(source.planes, ids, host, slots)
        backend.scatter(target.planes, [31 - block_id for block_id in ids], host, slots)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(move, range(4)))
    for block_id in range(32):
        np.testing.assert_array_equal(target.block(31 - block_id), source.block(block_id))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_back_end_equals_the_reference(data: st.DataObject) -> None:
    shape = data.draw(
        st.builds(
            PoolShape,
            layout=st.sampled_from(list(LAYOUTS)),
            segment_bytes=st.integers(1, 300),
            num_layers=st.integers(1, 5),
            num_blocks=st.integers(1, 12),
        )
    )
    source = Pool(shape)
    block_ids = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), unique=True))
    block_ids = data.draw(st.permutations(block_ids + [-1] * data.draw(st.integers(0, 3))))
    gaps = data.draw(st.lists(st.integers(0, 40), min_size=len(block_ids), max_size=len(block_ids)))
    ends = np.cumsum(np.array(gaps, int) + source.block_bytes).tolist()
    offsets = data.draw(st.permutations([end - source.block_bytes for end in ends]))

    hosts, targets = [], []
    for name in NAMES:
        host, target = np.zeros(ends[-1] + 9 if ends else 0, np.uint8), source.clone()
        get_backend(name).gather(source.planes, block_ids, host, offsets)
        get_backend(name).scatter(target.planes, block_ids[::-1], host, offsets)
        hosts.append(host)
        targets.append(target)
    for host, target in zip(hosts[1:], targets[1:], strict=True):
        np.testing.assert_array_equal(host, hosts[0])
        target.verify_equal(targets[0])
