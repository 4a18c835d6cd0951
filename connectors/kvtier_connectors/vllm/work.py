"""What vLLM's prompts cost, step by step: the cost of recomputing is learnt from it."""

from __future__ import annotations

from kvtier.clock import Clock
from kvtier_connectors.contract import StepWork

__all__ = ["PromptWork"]

NOTHING = (0, 0.0)
MIN_TOKENS = 64
"""A step that computes fewer prompt tokens tells what a step costs, and not what tokens do: after a restore the rest of
a prompt is a few tokens, each of which would seem to take a good part of a step."""


class PromptWork:
    """Counts the prompt tokens of each step until its workers have told that it ended. Engine's thread only.

    The first step of many tokens is not counted: an engine warms up in it, for seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at = 0.0
        self._under_way: dict[int, tuple[int, float]] = {}
        self._ended = (*NOTHING, 0.0)
        self._is_warm = False

    def begin(self, serial: int) -> None:
        """A step is planned."""
        self._began_at = self._clock.now()
        self._under_way[serial] = NOTHING

    def add(self, serial: int, start: int, num_tokens: int) -> None:
        """Of one request it computes so many prompt tokens, behind `start` others."""
        tokens, pairs = self._under_way[serial]
        self._under_way[serial] = (tokens + num_tokens, pairs + num_tokens * (start + num_tokens / 2))

    def end(self, serial: int) -> None:
        """The step ended, and with it those before."""
        tokens, pairs = self._under_way.pop(serial, NOTHING)
        for earlier in [known for known in self._under_way if known < serial]:
            del self._under_way[earlier]
        is_large = tokens >= MIN_TOKENS
        if not (is_large and self._is_warm):
            tokens, pairs = NOTHING
        self._is_warm |= is_large
        self._ended = (tokens, pairs, max(0.0, self._clock.now() - self._began_at))

    def take(self, backlog_tokens: int) -> StepWork:
        """What the last step that ended came to, once."""
        (tokens, pairs, seconds), self._ended = self._ended, (*NOTHING, 0.0)
        return StepWork(tokens, pairs, seconds, backlog_tokens)
