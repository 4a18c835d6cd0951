"""Waiting for something to be so, by asking again and again until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.errors import KVTierError

__all__ = ["wait_until"]

POLL_S = 0.003
T = TypeVar("T")


def wait_until(what: str, ask: Callable[[], T | None], timeout_s: float, clock: Clock) -> T:
    """The first answer that is true; KVTierError that names `what` after `timeout_s` seconds of `clock` without one."""
    deadline = clock.now() + timeout_s
    while not (answer := ask()):
        if clock.now() >= deadline:
            raise KVTierError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return answer
