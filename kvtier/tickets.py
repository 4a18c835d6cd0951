"""Handles of running lookups and stages: polled, never awaited by the engine's thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

__all__ = ["Ticket"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """One answer that may come later, from another thread. The first `resolve` wins; later ones are ignored.

    Mutable state: `_value`, `_done`, guarded by the fact that `_value` is written before `_done` is set; `_waiting`,
    guarded by `_lock`.
    """

    __slots__ = ("_done", "_lock", "_value", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._value: T | None = None
        self._waiting: threading.Event | None = None

    @classmethod
    def resolved(cls, value: T) -> Ticket[T]:
        """A ticket that was answered at once."""
        ticket = cls()
        ticket.resolve(value)
        return ticket

    @property
    def done(self) -> bool:
        return self._done

    def resolve(self, value: T) -> bool:
        """Set the answer; False when there was one already. Any thread."""
        with self._lock:
            if self._done:
                return False
            self._value = value
            self._done = True
            if self._waiting is not None:
                self._waiting.set()
            return True

    def poll(self) -> T | None:
        """The answer, or None while there is none. Never blocks."""
        return self._value if self._done else None

    def wait(self, timeout: float) -> T | None:
        """As `poll`, once it is answered or `timeout` seconds are over. Blocks: never on the engine's thread."""
        with self._lock:
            if not self._done and self._waiting is None:
                self._waiting = threading.Event()
            waiting = self._waiting
        if waiting is not None:
            waiting.wait(timeout)
        return self.poll()
