"""Leases: what keeps a slot of the host pool from being given to another block, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

__all__ = ["Lease", "Owner"]


class LeasedPool(Protocol):
    """What leases ask of their pool."""

    def _close_owner(self, owner: Owner) -> None: ...
    def _release(self, lease: Lease) -> bool: ...
    def _view(self, lease: Lease) -> memoryview: ...


class Owner:
    """Who holds leases: a request, a copy, a client. Closing it ends every lease it still has.

    Mutable state: `_leases`, `_closed`, guarded by the pool's lock.
    """

    __slots__ = ("_closed", "_leases", "_pool", "name")

    def __init__(self, pool: LeasedPool, name: str) -> None:
        self.name = name
        self._pool = pool
        self._leases: set[Lease] = set()
        self._closed = False

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        """End every lease. Idempotent; later leases for this owner are refused. Any thread, never blocks on I/O."""
        self._pool._close_owner(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease:
    """Keeps one slot's bytes from being given to another block, until `release` or its owner's end.

    slot: the slot's id. offset: its first byte in the pool's buffer. nbytes: its usable size (whole pages).
    """

    __slots__ = ("_live", "_on_end", "_owner", "_pool", "nbytes", "offset", "slot")

    def __init__(
        self, pool: LeasedPool, owner: Owner, slot: int, offset: int, nbytes: int, on_end: Callable[[], None] | None
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._live = True
        self._on_end = on_end
        self.slot = slot
        self.offset = offset
        self.nbytes = nbytes

    @property
    def live(self) -> bool:
        return self._live

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable. Valid only while the lease lives; raises LeaseError afterwards."""
        return self._pool._view(self)

    def release(self) -> bool:
        """End the lease; False, and nothing else, when it had ended before. Any thread."""
        return self._pool._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
