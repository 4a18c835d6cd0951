"""Where a worker's KV cache is, and what that asks of its copies: a back end, a fence, pinned host memory, a proof."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import LayoutError
from kvtier_connectors.contract import WRITTEN, WriteFence
from kvtier_kernels import BlockPlanes, KernelBackend, default_backend
from kvtier_kernels.device import DeviceBackend, DevicePlanes, pin, unpin

__all__ = ["Device"]

logger = logging.getLogger("kvtier.vllm")

POLL_S = 0.0002
PROOF_SEED = 7


class Device:
    """One worker's KV cache and the back end that copies it.

    On a CPU a forward has ended when it returns. On a GPU it has only been queued: copies have a stream of their own,
    and begin when what the runner's stream had been given by then is done.
    """

    def __init__(self, planes: BlockPlanes | DevicePlanes) -> None:
        self.planes: Any = planes
        self.backend: KernelBackend[Any]
        self._device: torch.device | None = None
        self._pinned: npt.NDArray[np.uint8] | None = None
        if isinstance(planes, DevicePlanes):
            if planes.device.type not in ("cpu", "cuda"):
                raise LayoutError(
                    f"kvtier does not know how copies are ordered on {planes.device.type}: CPU and GPU alone"
                )
            self._device = planes.device
            self.backend = DeviceBackend(planes.device)
        else:
            self.backend = default_backend()

    @property
    def is_gpu(self) -> bool:
        """Work is queued there, and copies want pinned memory."""
        return self._device is not None and self._device.type == "cuda"

    def pin(self, host: npt.NDArray[np.uint8]) -> None:
        """Lock the host pool for the device's copies; takes seconds. A thread of its own."""
        began_at = time.monotonic()
        assert self._device is not None
        if pin(host, self._device):
            self._pinned = host
            logger.info("%d MiB of host memory pinned in %.1f s", host.size >> 20, time.monotonic() - began_at)
        else:
            logger.warning(
                "the driver did not pin the %d MiB of host memory, so that copies are several times slower: lower "
                "host.size, or raise the limit on locked memory (ulimit -l)",
                host.size >> 20,
            )

    def unpin(self) -> None:
        """Before the mapping ends, and after the last copy: the driver would go on with pages that are others' then."""
        if self._pinned is not None and self._device is not None:
            unpin(self._pinned, self._device)
            self._pinned = None

    def written(self) -> WriteFence:
        """Fires when all is written that was queued to the KV cache so far. The engine's thread."""
        return _Recorded(self._device) if self.is_gpu else WRITTEN

    def prove(self) -> None:
        """Write two blocks and read them back, before any request, and leave them as they were: raises LayoutError if
        the bytes that come back are not those that went."""
        if self.is_gpu:
            torch.cuda.synchronize(self._device)
        planes = self.planes
        ids = sorted({planes.num_blocks // 2, planes.num_blocks - 1})
        offsets = [index * planes.block_bytes for index in range(len(ids))]
        before, after = (np.zeros(len(ids) * planes.block_bytes, np.uint8) for _ in range(2))
        pattern = np.random.default_rng(PROOF_SEED).integers(0, 256, before.size, np.uint8)
        self.backend.gather(planes, ids, before, offsets)
        try:
            self.backend.scatter(planes, ids, pattern, offsets)
            self.backend.gather(planes, ids, after, offsets)
        finally:
            self.backend.scatter(planes, ids, before, offsets)
        if not np.array_equal(after, pattern):
            raise LayoutError(
                f"copies to and from the KV cache on {self._device or 'the CPU'} do not keep its bytes: vLLM must run "
                f"without kvtier on this machine"
            )


class _Recorded:
    """An event on the runner's stream."""

    def __init__(self, device: torch.device | None) -> None:
        cuda: Any = torch.cuda
        self._event = cuda.Event()
        self._event.record(cuda.current_stream(device))

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)  # on the copying thread: the driver's own wait has no bound
        return True
