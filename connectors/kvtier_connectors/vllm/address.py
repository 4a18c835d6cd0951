"""What the workers are told of where the host pool is."""

from __future__ import annotations

import os
from typing import Protocol

from kvtier.memory import HostMemory
from kvtier_connectors.vllm.messages import HostAddress

__all__ = ["AddressTeller"]


class Home(Protocol):
    """The store, as far as is asked here."""

    @property
    def host_memory(self) -> HostMemory | None: ...


class AddressTeller:
    """Decides which plans say where the host pool is: from the first that can, or from when it is another, until every
    worker has begun one that did. Engine's thread only."""

    def __init__(self, store: Home) -> None:
        self._store = store
        self._pid = os.getpid()
        self._memory: HostMemory | None = None
        self._first: int | None = None
        """The serial of the first plan that told of it; None once every worker has begun that."""

    def to_tell(self, serial: int) -> HostAddress | None:
        """For the plan of this serial, whose jobs are made: their slots are leased, and keep the memory what it is."""
        memory = self._store.host_memory
        if memory is None:
            return None
        if memory != self._memory:
            self._memory, self._first = memory, serial
        return None if self._first is None else HostAddress(self._pid, *memory)

    def note_begun(self, serial: int) -> None:
        """Every worker has begun the plan of this serial."""
        if self._first is not None and serial >= self._first:
            self._first = None
