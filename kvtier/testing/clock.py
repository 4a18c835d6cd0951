"""A clock that stands still until told."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Starts at `start` seconds; `advance` moves it, also backwards, as a broken machine would."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
