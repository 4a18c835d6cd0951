"""The smallest right tier: a dictionary. A model to hold others against, and a lower tier for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.errors import ClosedError, IntegrityError
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest

__all__ = ["DictTier", "RemoteDictTier"]


class DictTier(Tier):
    """Keeps copies until `capacity_bytes` are used, then refuses; evicts nothing. Its epoch lives as long as itself.

    Mutable state: `_blocks`, `_used_bytes`, `_epoch`, `_closed`, guarded by `_lock`.
    """

    name = "dict"

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._capacity_bytes = capacity_bytes
        self._blocks: dict[Key, bytes] = {}
        self._used_bytes = 0
        self._epoch = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        return self._epoch

    def start_epoch(self, epoch: int) -> None:
        with self._lock:
            self._check_open()
            self._blocks.clear()
            self._used_bytes = 0
            self._epoch = epoch

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [key in self._blocks for key in keys]

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        with self._lock:
            self._check_open()
            return [self._read_one(request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        with self._lock:
            self._check_open()
            return [self._write_one(request) for request in requests]

    def remove(self, keys: Sequence[Key]) -> int:
        with self._lock:
            gone = [block for key in keys if (block := self._blocks.pop(key, None)) is not None]
            self._used_bytes -= sum(map(len, gone))
            return len(gone)

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._blocks), self._used_bytes, self._capacity_bytes)

    def check_integrity(self) -> None:
        with self._lock:
            if self._used_bytes != sum(map(len, self._blocks.values())):
                raise IntegrityError("dict tier: bytes do not add up")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self._used_bytes = 0

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        block = self._blocks.get(request.key)
        if block is None or len(block) != len(request.buffer):
            return ReadOutcome.MISS
        request.buffer[:] = block
        return ReadOutcome.OK

    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        if request.key in self._blocks:
            return WriteOutcome.ALREADY_STORED
        if self._used_bytes + len(request.buffer) > self._capacity_bytes:
            return WriteOutcome.FULL
        self._blocks[request.key] = bytes(request.buffer)
        self._used_bytes += len(request.buffer)
        return WriteOutcome.STORED

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the dict tier is closed")


class RemoteDictTier(DictTier):
    """As if another machine had the dictionary: it is asked and not known, and raises while it `is_sick`.

    num_asked, num_probes: keys asked for by `contains`, and probes.
    """

    name = "remote"
    is_remote = True

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        super().__init__(capacity_bytes)
        self.is_sick = False
        self.num_asked = 0
        self.num_probes = 0

    def probe(self) -> None:
        self.num_probes += 1
        self._check_well()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._check_well()
        self.num_asked += len(keys)
        return super().contains(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        self._check_well()
        return super().read(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        self._check_well()
        return super().write(requests)

    def _check_well(self) -> None:
        if self.is_sick:
            raise ConnectionError("the other machine does not answer")
