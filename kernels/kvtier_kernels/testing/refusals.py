"""Bad calls: each is refused before a byte moves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.base import KernelBackend
from kvtier_kernels.errors import KernelError
from kvtier_kernels.planes import BlockPlanes
from kvtier_kernels.testing.pools import Pool, PoolShape, View, verify_bytes


@dataclass(frozen=True, slots=True)
class BadCall:
    """Arguments to refuse, for a pool of 9 blocks of 96 bytes. `host` makes the buffer from an array of four slots."""

    name: str
    block_ids: Any
    offsets: Any
    ops: tuple[str, ...] = ("gather", "scatter")
    host: Callable[[Bytes], Any] = lambda host: host


def _read_only(host: Bytes) -> Bytes:
    view = host.view()
    view.flags.writeable = False
    return view


# The first copies of each call are good: a back end that checks as it goes has moved bytes before it raises.
BAD_CALLS = (
    BadCall("fewer offsets", [0, 1], [0]),
    BadCall("fewer ids", [0], [0, 96]),
    BadCall("id too large", [0, 9], [0, 96]),
    BadCall("id below hole", [0, -2], [0, 96]),
    BadCall("unsigned id too large", np.array([0, 2**64 - 1], np.uint64), [0, 96]),
    BadCall("float ids", [0.0, 1.0], [0, 96]),
    BadCall("bool ids", [False, True], [0, 96]),
    BadCall("2-D ids", [[0], [1]], [0, 96]),
    BadCall("ragged ids", [[0], [1, 2]], [0, 96]),
    BadCall("no ids", None, [0, 96]),
    BadCall("float offsets", [0, 1], [0.0, 96.0]),
    BadCall("offset past the end", [0, 1], [0, 289]),
    BadCall("negative offset", [0, 1], [0, -1]),
    BadCall("host smaller than a slot", [0], [0], host=lambda host: host[:1]),
    BadCall("host too small", [0, 1], [0, 96], host=lambda host: host[: host.size // 2 - 1]),
    BadCall("host of int64", [0], [0], host=lambda host: host.view(np.int64)),
    BadCall("host of two dimensions", [0], [0], host=lambda host: host.reshape(4, -1)),
    BadCall("host with gaps", [0], [0], host=lambda host: host[::2]),
    BadCall("host of bytes", [0], [0], host=bytearray),
    BadCall("read-only host", [0], [0], ("gather",), _read_only),
    BadCall("slots overlap", [0, 1], [0, 95], ("gather",)),
    BadCall("slot twice, apart", [0, 1, 2], [96, 0, 96], ("gather",)),
    BadCall("block twice, apart", [2, 0, 2], [0, 96, 192], ("scatter",)),
)


def verify_refused(backend: KernelBackend[Any], bad: BadCall, view: View = BlockPlanes.from_arrays) -> None:
    """Each op of `bad` raises KernelError and moves no byte."""
    pool = Pool(PoolShape("kv_split", 16), view=view)
    before, host = pool.clone(), np.random.default_rng(3).integers(0, 256, 4 * 96, dtype=np.uint8)
    expected = host.copy()
    for op in bad.ops:
        try:
            getattr(backend, op)(pool.planes, bad.block_ids, bad.host(host), bad.offsets)
        except KernelError:
            pass
        else:
            raise AssertionError(f"{op} took {bad.name}")
        pool.verify_equal(before)
        verify_bytes(host, expected)
