"""Which CPU method moves blocks fastest between layered planes and slots?

Each row is one way to move the same random blocks between a pool and random or consecutive slots: the back ends of
`kvtier_kernels`, and candidates that were not chosen, kept in this file. The number is a rate as a fraction of memcpy
of as many bytes with one call a block, 1 thread, median of interleaved rounds.

The second row is memcpy in a single call. Above a threshold (glibc.cpu.x86_non_temporal_threshold, which follows the
cache size) memcpy writes past the cache. Calls of a segment's size do not, so no method reaches it, unless the process
starts with GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x8000.

    OMP_NUM_THREADS=1 python benchmarks/copy_methods.py [--mebibytes 512] [--rounds 7]
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier_kernels import BlockPlanes, get_backend

Bytes = NDArray[np.uint8]
Method = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's blocks of 16 tokens: planes of K or V of one layer."""

    name: str
    num_planes: int
    segment_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot."""
        return self.num_planes * self.segment_bytes


SHAPES = (Shape("Llama-3.1-8B", 64, 32 * 1024), Shape("SmolLM2-135M", 60, 6 * 1024))


@dataclass(frozen=True, slots=True)
class Scene:
    """Touched memory and the copies to make in it. `slots` are slot numbers, `host` is [slots, block_bytes]."""

    planes: list[Bytes]  # [num_blocks, segment_bytes] each
    host: Bytes
    block_ids: NDArray[np.int64]
    slots: NDArray[np.int64]


def make_scene(shape: Shape, num_bytes: int, one_storage: bool, contiguous: bool) -> Scene:
    """Blocks of `num_bytes` in a pool and a host buffer that have a quarter more."""
    num_copies = num_bytes // shape.block_bytes
    num_blocks = num_copies * 5 // 4
    rng = np.random.default_rng(0)
    size = (num_blocks, shape.segment_bytes)
    if one_storage:
        planes = list(np.ones((shape.num_planes, *size), np.uint8))
    else:
        planes = [np.ones(size, np.uint8) for _ in range(shape.num_planes)]
    host = np.frombuffer(mmap.mmap(-1, num_blocks * shape.block_bytes), np.uint8).reshape(num_blocks, -1)
    host[:] = 1
    slots = np.arange(num_copies) if contiguous else rng.permutation(num_blocks)[:num_copies]
    return Scene(planes, host, rng.permutation(num_blocks)[:num_copies], slots)


def memcpy_methods(scene: Scene) -> Iterator[tuple[str, Method]]:
    """Plain copies of the same number of bytes, from a flat array."""
    source = np.ones(scene.host.shape, np.uint8)
    count = len(scene.slots)
    pairs = list(zip(scene.block_ids.tolist(), scene.slots.tolist(), strict=True))

    def by_block() -> None:
        for block_id, slot in pairs:
            np.copyto(scene.host[slot], source[block_id])

    yield "memcpy, a call a block", by_block
    yield "memcpy, one call", lambda: np.copyto(scene.host[:count], source[:count])


def package_methods(scene: Scene) -> Iterator[tuple[str, Method]]:
    """What users get, checks included."""
    planes, host = BlockPlanes.from_arrays(scene.planes), scene.host.reshape(-1)
    call = (planes, scene.block_ids, host, scene.slots * planes.block_bytes)
    for name in ("reference", "numpy", "torch"):
        backend = get_backend(name)
        yield f"gather  {name}", partial(backend.gather, *call)
        yield f"scatter {name}", partial(backend.scatter, *call)


def rejected_methods(scene: Scene) -> Iterator[tuple[str, Method]]:
    """A call a plane for 1 MiB of blocks, or for all of them where the slots are a run; np.concatenate a block.

    The last needs no temporary, but takes the GIL for each segment, which beside a busy thread costs a switch interval.
    """
    count, num_planes = len(scene.slots), len(scene.planes)
    segments = scene.host.reshape(len(scene.host), num_planes, -1)
    step = max(1, (1 << 20) // scene.planes[0].shape[1])

    def by_plane(copy: Callable[[Bytes, NDArray[np.int64], int, NDArray[np.int64]], None]) -> None:
        for start in range(0, count, step):
            ids, slots = scene.block_ids[start : start + step], scene.slots[start : start + step]
            for index, plane in enumerate(scene.planes):
                copy(plane, ids, index, slots)

    def gather(plane: Bytes, ids: NDArray[np.int64], index: int, slots: NDArray[np.int64]) -> None:
        segments[slots, index] = plane[ids]

    def scatter(plane: Bytes, ids: NDArray[np.int64], index: int, slots: NDArray[np.int64]) -> None:
        plane[ids] = segments[slots, index]

    def concatenate() -> None:
        for block_id, slot in zip(scene.block_ids, scene.slots, strict=True):
            np.concatenate([plane[block_id] for plane in scene.planes], out=scene.host[slot])

    yield "gather  a call a plane, numpy", lambda: by_plane(gather)
    yield "scatter a call a plane, numpy", lambda: by_plane(scatter)
    yield "gather  np.concatenate a block", concatenate
    if np.all(np.diff(scene.slots) == 1):
        ids, run = torch.from_numpy(scene.block_ids), segments[:count]
        tensors = [torch.from_numpy(plane) for plane in scene.planes]
        slots = torch.from_numpy(run)
        yield (
            "gather  index_select a plane",
            lambda: [torch.index_select(plane, 0, ids, out=slots[:, p]) for p, plane in enumerate(tensors)],
        )
        yield (
            "scatter index_copy_ a plane",
            lambda: [plane.index_copy_(0, ids, slots[:, p]) for p, plane in enumerate(tensors)],
        )
        yield (
            "scatter numpy fancy a plane",
            lambda: [plane.__setitem__(scene.block_ids, run[:, p]) for p, plane in enumerate(scene.planes)],
        )


def relative_rates(methods: dict[str, Method], rounds: int) -> dict[str, float]:
    """Rate of each method over that of the first, medians of `rounds` in which each runs once."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_id in range(rounds + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if round_id:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = next(iter(medians.values()))
    return {name: base / median for name, median in medians.items()}


def main() -> None:
    """Print the table, one column for each kind of pool and slots."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.copy_methods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mebibytes", type=int, default=512, help="bytes moved a call; use several times the L2 cache")
    parser.add_argument("--rounds", type=int, default=7, help="more on a noisy machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = {"1 storage, run": (True, True), "1 storage, scattered": (True, False)}
    columns |= {"separate, run": (False, True), "separate, scattered": (False, False)}
    for shape in SHAPES:
        table: dict[str, dict[str, float]] = {}
        for column, (one_storage, contiguous) in columns.items():
            scene = make_scene(shape, args.mebibytes << 20, one_storage, contiguous)
            methods = dict(memcpy_methods(scene)) | dict(package_methods(scene)) | dict(rejected_methods(scene))
            for name, rate in relative_rates(methods, args.rounds).items():
                table.setdefault(name, {})[column] = rate
        print(f"\n{shape.name}: {shape.num_planes} segments of {shape.segment_bytes} B, {args.mebibytes} MiB a call")
        print(f"{'':32}" + "".join(f"{column:>22}" for column in columns))
        for name, row in table.items():
            cells = (f"{row[column]:22.2f}" if column in row else f"{'-':>22}" for column in columns)
            print(f"{name:32}" + "".join(cells))


if __name__ == "__main__":
    main()
