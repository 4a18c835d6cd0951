"""Asking remote tiers what they hold of a prompt: on threads of theirs, while the request goes on with its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.keys import BlockDigest, make_key
from kvtier.located import Source
from kvtier.reasons import MissReason

__all__ = ["Question"]

FIRST_ASKED = 64
ASKED_FACTOR = 8
"""Blocks asked for in the first round trip, and how many times more in each next one: a prompt of which nothing is
there costs the server little, and one of 8,192 blocks four round trips."""
MAX_ASKED = 8192
"""The most in one round trip: a few milliseconds of the server's."""


class Question:
    """One remote tier asked about the blocks of one prompt: polled, never awaited. What it answers it remembers.

    digests: from the first block on that no tier is known to hold. Nothing is asked behind the first that is nowhere.
    is_elsewhere: which blocks need not be asked for, from memory. on_end: called once, by the thread that asked.

    Mutable state: `_failure`, `_done`: written once each, in this order, by the thread that asks.
    """

    def __init__(
        self,
        source: Source,
        namespace: bytes,
        digests: Sequence[BlockDigest],
        is_elsewhere: Callable[[Sequence[BlockDigest]], list[bool]],
        on_end: Callable[[], None],
    ) -> None:
        self._source = source
        self._namespace = namespace
        self._digests = digests
        self._is_elsewhere = is_elsewhere
        self._on_end = on_end
        self._failure: MissReason | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether it was answered, or will not be: a tier found sick meanwhile is waited for no longer."""
        return self._done or not self._source.is_available

    @property
    def failure(self) -> MissReason | None:
        """Once it is done: why there is no answer; None where there is one."""
        return self._failure if self._done else MissReason.TIER_DOWN

    def begin(self) -> None:
        """Queue it. Never blocks."""
        if not self._source.asking.try_submit(self._ask, urgent=True):
            self._failure, self._done = MissReason.BACKLOG, True

    def _ask(self) -> None:
        try:
            self._failure = self._ask_on()
        except BaseException:  # whoever waits must be told
            self._failure = MissReason.TIER_ERROR
            raise
        finally:
            self._done = True
            self._on_end()

    def _ask_on(self) -> MissReason | None:
        start, count = 0, FIRST_ASKED
        while digests := self._digests[start : start + count]:
            asked = [d for d, is_known in zip(digests, self._is_elsewhere(digests), strict=True) if not is_known]
            held = self._source.look([make_key(self._namespace, digest) for digest in asked]) if asked else []
            if held is None:
                return MissReason.TIER_ERROR if self._source.is_available else MissReason.TIER_DOWN
            if not all(held):
                return None
            start, count = start + len(digests), min(count * ASKED_FACTOR, MAX_ASKED)
        return None
