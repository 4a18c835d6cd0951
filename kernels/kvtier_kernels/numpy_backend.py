"""Copies with numpy: one call a block."""

import numpy as np

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.base import KernelBackend
from kvtier_kernels.checks import Copies
from kvtier_kernels.planes import BlockPlanes
from kvtier_kernels.runs import EvenRun, UnevenRun

# numpy reads separate planes through a temporary. Half a mebibyte of it stays in the L2 cache of a server core.
_TEMPORARY_BYTES = 512 * 1024


class NumpyBackend(KernelBackend[BlockPlanes]):
    """The default: no dependency, no threads of its own. Only a gather from separate planes is faster with torch."""

    def _gather(self, planes: BlockPlanes, copies: Copies, host: Bytes) -> None:
        for run in planes.runs:
            if isinstance(run, EvenRun):
                for block_id, offset in copies:
                    np.copyto(run.slot(host, offset), run.grid[:, block_id])
            else:
                self._gather_uneven(run, copies, host)

    def _scatter(self, planes: BlockPlanes, copies: Copies, host: Bytes) -> None:
        for run in planes.runs:
            if isinstance(run, EvenRun):
                for block_id, offset in copies:
                    np.copyto(run.grid[:, block_id], run.slot(host, offset))
            else:
                for block_id, offset in copies:
                    run.windows[run.rows(block_id)] = run.slot(host, offset)

    def _gather_uneven(self, run: UnevenRun, copies: Copies, host: Bytes) -> None:
        step = max(1, _TEMPORARY_BYTES // run.segment_bytes)
        for block_id, offset in copies:
            slot, rows = run.slot(host, offset), run.rows(block_id)
            for start in range(0, run.num_planes, step):
                part = slice(start, start + step)
                np.copyto(slot[part], run.windows[rows[part]])
