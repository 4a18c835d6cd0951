"""Copies with numpy, save where torch is faster. Imports torch; reach it through `get_backend("torch")`."""

import torch

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.checks import Copies
from kvtier_kernels.numpy_backend import NumpyBackend
from kvtier_kernels.runs import UnevenRun


class TorchBackend(NumpyBackend):
    """For pools made of separate tensors: gathers them without a temporary.

    That gather may use torch's intra-op threads, which stall on busy machines: prefer `torch.set_num_threads(1)` in a
    process that shares its cores.
    """

    def _gather_uneven(self, run: UnevenRun, copies: Copies, host: Bytes) -> None:
        windows = torch.from_numpy(run.windows)
        for block_id, offset in copies:
            rows, slot = torch.from_numpy(run.rows(block_id)), torch.from_numpy(run.slot(host, offset))
            torch.index_select(windows, 0, rows, out=slot)
