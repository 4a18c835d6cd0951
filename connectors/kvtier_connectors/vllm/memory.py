"""The host pool as a worker has it: mapped, pinned where its device wants that, and another one later if need be."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError
from kvtier.memory import PoolMemory
from kvtier.tiers.server.addresses import Addresses
from kvtier.tiers.server.mapping import Mapping, MappingError, Mappings
from kvtier_connectors.contract import WriteFence
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.vllm.device import Device
from kvtier_connectors.vllm.messages import HostAddress

__all__ = ["WorkerMemory"]

logger = logging.getLogger("kvtier.vllm")

RETRY_S = 1.0
JOIN_S = 1.0
"""How long an end waits at most for the driver to have pinned host memory."""
PRESENT_S = 120.0
POLL_S = 0.1
"""How long a server is given to make its memory, which is its to make, before the driver would; looked at so often."""


@dataclass(eq=False)
class _Taking:
    """One try to have a memory."""

    host: HostAddress
    error: str | None
    """Why it cannot be used; of one that was tried before, until this try comes to something."""
    is_over: threading.Event = field(default_factory=threading.Event)
    is_ready: threading.Event = field(default_factory=threading.Event)
    is_past: threading.Event = field(default_factory=threading.Event)
    """Another came after it, or the end."""
    retry_at: float = 0.0


class WorkerMemory:
    """Owns a worker's mapping of the host pool, and the thread that maps and pins it.

    The engine's own is mapped at once, and stays. That of a kvtier-server is another with each of its runs, and comes
    to the same addresses: to let go of one and map the next takes a moment, with a device seconds, so who copies waits
    for it, and no step.

    Calls are those of the thread that begins steps. Mutable state: `_taking`, whose fields but for the events its
    thread writes before it sets `is_over`; `_mapping` is the latest thread's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._taking: _Taking | None = None
        self._thread: threading.Thread | None = None
        """The latest; it waits for the one before."""
        self._own: PoolMemory | None = None
        self._addresses: Addresses | None = None
        self._mappings: Mappings | None = None
        self._mapping: Mapping | None = None

    @property
    def host(self) -> HostAddress | None:
        """What it was last told to take."""
        return None if self._taking is None else self._taking.host

    @property
    def error(self) -> str | None:
        """Why nothing can be copied, as far as is known."""
        return None if self._taking is None else self._taking.error

    @property
    def is_ready(self) -> bool:
        """Whether copies go at their speed, or never will: nothing is left to be pinned."""
        return self._taking is not None and self._taking.is_ready.is_set()

    @property
    def must_try_again(self) -> bool:
        """It could not be had, some time ago."""
        taking = self._taking
        return (
            taking is not None
            and taking.is_over.is_set()
            and taking.error is not None
            and time.monotonic() >= taking.retry_at
        )

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The same for every run of a server. Only what a lease is held of may be touched."""
        if self._own is not None:
            return self._own.buffer
        if self._addresses is None:
            raise ClosedError("no host pool is mapped here")
        return self._addresses.buffer

    def take(self, host: HostAddress) -> None:
        """Have this memory from now on, in place of what there was. No copy is under way. Returns at once, and raises
        nothing: see `error` and `after`."""
        before = self._taking
        if before is not None:
            before.is_past.set()
        self._taking = taking = _Taking(host, before.error if before is not None and before.host == host else None)
        if not self._device.is_gpu:
            taking.is_ready.set()
        try:
            if host.run:
                self._set_aside()
                self._start(self._exchange, taking)
                return
            self._map_own(taking)
            if self._device.is_gpu:
                self._start(self._pin_own, taking)
        except CAUGHT as error:
            self._fail(taking, error)

    def after(self, written: WriteFence) -> WriteFence:
        """Fires once `written` has and the memory is mapped; raises MappingError if it cannot be."""
        taking = self._taking
        assert taking is not None
        is_mapped = taking.is_over.is_set() and taking.error is None  # in this order: the thread writes the other way
        return written if is_mapped else _Mapped(taking, written)

    def close(self, *, is_used: bool) -> None:
        """Unmap it; not while the driver has it yet, nor where a copy that hangs uses it: then it stays for the life of
        the process. Idempotent."""
        if self._taking is not None:
            self._taking.is_past.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            is_used |= self._thread.is_alive()
        if (mapping := self._mapping) is not None:
            mapping.stop()
        if is_used and (self._addresses is not None or self._device.is_gpu):
            return
        self._device.unpin()
        self._let_go()
        if self._addresses is not None:
            self._addresses.close()
        if self._own is not None:
            self._own.close()

    def _set_aside(self) -> None:
        """Addresses for all runs of a server. Raises ConfigError where there are not so many."""
        if self._addresses is None:
            self._addresses = Addresses()
            self._mappings = Mappings(self._addresses)

    def _map_own(self, taking: _Taking) -> None:
        host = taking.host
        if self._own is None:
            # A second mapping in the scheduler's process too: its pages are there already, and are only to be entered.
            self._own = PoolMemory(host.num_bytes, fd=_open(host), touch=not self._device.is_gpu)
        taking.error = None
        taking.is_over.set()

    def _start(self, work: Callable[[_Taking, threading.Thread | None], None], taking: _Taking) -> None:
        thread = threading.Thread(target=work, args=(taking, self._thread), name="kvtier-map", daemon=True)
        thread.start()
        self._thread = thread

    # ---- its thread ----------------------------------------------------------------------------------------------

    def _exchange(self, taking: _Taking, before: threading.Thread | None) -> None:
        """A server's next memory in place of the one before."""
        try:
            if before is not None:
                before.join()
            self._device.unpin()
            self._let_go()
            mapping = self._map(taking.host)
        except CAUGHT as error:
            self._fail(taking, error)
            return
        taking.error = None
        taking.is_over.set()
        try:
            if self._device.is_gpu and self._is_present(mapping, taking):
                self._device.pin(mapping.buffer)
        finally:
            taking.is_ready.set()

    def _map(self, host: HostAddress) -> Mapping:
        assert self._mappings is not None
        fd = _open(host)
        try:
            self._mapping = mapping = self._mappings.take(fd, host.num_bytes)
        finally:
            os.close(fd)
        return mapping

    def _let_go(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is not None and self._mappings is not None:
            self._mappings.release(mapping)

    def _is_present(self, mapping: Mapping, taking: _Taking) -> bool:
        """Wait until the server has made all of it, or long enough; False if it is not wanted any more."""
        deadline = time.monotonic() + PRESENT_S
        while not mapping.wait_present(POLL_S) and time.monotonic() < deadline:
            if taking.is_past.wait(POLL_S):
                break
        return not taking.is_past.is_set()

    def _pin_own(self, taking: _Taking, before: threading.Thread | None) -> None:
        del before
        try:
            self._device.pin(self.buffer)
        finally:
            taking.is_ready.set()

    def _fail(self, taking: _Taking, error: BaseException) -> None:
        taking.error = f"{type(error).__name__}: {error}"
        taking.retry_at = time.monotonic() + RETRY_S
        taking.is_ready.set()
        taking.is_over.set()


class _Mapped:
    """A fence that waits for the memory first."""

    def __init__(self, taking: _Taking, written: WriteFence) -> None:
        self._taking = taking
        self._written = written

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        if not self._taking.is_over.wait(timeout):
            return False
        if self._taking.error is not None:
            raise MappingError(f"host memory cannot be mapped here: {self._taking.error}")
        return self._written.wait(max(0.0, deadline - time.monotonic()))


def _open(host: HostAddress) -> int:
    """A descriptor of the host pool of another process, or of this one."""
    return os.open(f"/proc/{host.pid}/fd/{host.fd}", os.O_RDWR | os.O_CLOEXEC)
