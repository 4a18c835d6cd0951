"""What the engine's log says of prompts on their way, and whether the engine works, waits, stalls or idles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier.clock import Clock

__all__ = ["EngineState", "Heartbeat", "PrefillProgress", "StepCounts"]

logger = logging.getLogger("kvtier.progress")

MAX_ENTRIES = 64
"""Prompts remembered before those that are done or gone are dropped."""
MIN_LINE_S = 0.4
MIN_LINE_TOKENS = 256
"""A prompt's next line comes after this time or this progress, whichever is first."""
HEARTBEAT_S = 30.0
FLUTTER_S = 1.0
"""An engine that works and waits in turn says so at most this often."""


@dataclass(slots=True)
class _Prefill:
    """One prompt: how far it was at its first step, how far it is, and how far it was when its last line was logged."""

    num_prompt: int
    started_at: float
    num_at_start: int
    num_computed: int
    logged_at: float
    num_logged: int

    @property
    def is_done(self) -> bool:
        return self.num_computed >= self.num_prompt


class PrefillProgress:
    """Logs each prompt's progress at INFO: one line when it begins, some on the way, one when it is done.

    A line is said before a step's forward only to begin; the others come after it, so that their times hold the
    forward. On the way a line is left out when less than 400 ms and less than 256 tokens have passed since the last.

    Bounded: with more than 64 prompts, those that are done or no longer live are dropped; the rest have a slot.

    Mutable state: one entry a prompt. Engine's thread only; never blocks.
    """

    def __init__(self, clock: Clock, is_live: Callable[[str], bool]) -> None:
        """is_live: whether a request id is unfinished; asked only when there are too many."""
        self._clock = clock
        self._is_live = is_live
        self._prefills: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._prefills)

    def begin(self, request_id: str, num_prompt: int, num_computed: int, num_scheduled: int, is_chunked: bool) -> None:
        """Tokens of a prompt were scheduled. Only the first call for a request counts, until `forget`.

        num_prompt: its tokens; after a preemption, those that it had put out as well. num_computed: tokens whose KV it
        has before the step. is_chunked: whether more steps must follow.
        """
        if request_id in self._prefills:
            return
        now = self._clock.now()
        self._prefills[request_id] = _Prefill(num_prompt, now, num_computed, num_computed, now, num_computed)
        self._purge()
        logger.info(
            "prefill of %s begins: %d prompt tokens, %d computed already, %d remaining, %d scheduled%s",
            request_id,
            num_prompt,
            num_computed,
            num_prompt - num_computed,
            num_scheduled,
            " (chunked)" if is_chunked else "",
        )

    def computed(self, request_id: str, num_computed: int) -> None:
        """The step's forward is over, and the request has KV of `num_computed` tokens.

        Nothing happens for a request that has not begun, or is done.
        """
        prefill = self._prefills.get(request_id)
        if prefill is None or prefill.is_done:
            return
        prefill.num_computed = num_computed
        now = self._clock.now()
        elapsed = max(0.0, now - prefill.started_at)
        if prefill.is_done:
            self._log_done(request_id, prefill, elapsed)
        elif now - prefill.logged_at >= MIN_LINE_S or num_computed - prefill.num_logged >= MIN_LINE_TOKENS:
            prefill.logged_at, prefill.num_logged = now, num_computed
            self._log_running(request_id, prefill, elapsed)

    def forget(self, request_id: str) -> None:
        """The request was aborted, or preempted and so begins anew. Idempotent, for any id."""
        self._prefills.pop(request_id, None)

    @staticmethod
    def _log_running(request_id: str, prefill: _Prefill, elapsed: float) -> None:
        num_new = prefill.num_computed - prefill.num_at_start
        is_known = num_new > 0 and elapsed > 0
        eta = f"{(prefill.num_prompt - prefill.num_computed) * elapsed / num_new:.1f} s" if is_known else "unknown"
        logger.info(
            "prefill of %s runs: %d of %d prompt tokens, %.1f s so far, eta %s",
            request_id,
            prefill.num_computed,
            prefill.num_prompt,
            elapsed,
            eta,
        )

    @staticmethod
    def _log_done(request_id: str, prefill: _Prefill, elapsed: float) -> None:
        logger.info(
            "prefill of %s is done: %d tokens computed in %.3f s",
            request_id,
            prefill.num_computed - prefill.num_at_start,
            elapsed,
        )

    def _purge(self) -> None:
        if len(self._prefills) > MAX_ENTRIES:
            self._prefills = {
                request_id: prefill
                for request_id, prefill in self._prefills.items()
                if not prefill.is_done and self._is_live(request_id)
            }


class EngineState(StrEnum):
    IDLE = "idle"
    """No request is unfinished."""
    WORKING = "working"
    """The model ran."""
    WAITING = "waiting"
    """Nothing could run until a copy, a lookup or a deadline that is under way."""
    STALLED = "stalled"
    """Requests are unfinished, nothing could run, and nothing is under way."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The engine after one step."""

    num_unfinished: int
    num_running: int
    num_waiting: int
    num_staging: int
    """Of the waiting, those whose blocks are on their way to host memory."""
    num_tokens: int
    """Computed in the step; 0 when the model did not run."""
    is_event_due: bool
    """Whether a copy or a deadline is under way that the requests can wait for."""

    @property
    def state(self) -> EngineState:
        if not self.num_unfinished:
            return EngineState.IDLE
        if self.num_tokens:
            return EngineState.WORKING
        return EngineState.WAITING if self.is_event_due else EngineState.STALLED


class Heartbeat:
    """Logs at INFO whether the engine is idle, working, waiting or stalled, so that a silent one can be told from a
    stuck one.

    One line when that changes, and one every 30 s while it does not. Changes between working and waiting within a
    second of the last line are held back until that second is over. It has no thread: an engine that is not stepped
    says nothing, and is idle or stuck inside a step, whichever its last line leaves open.

    Mutable state: the counts since the last line. Engine's thread only; never blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = self._logged_state = EngineState.IDLE
        self._logged_at = clock.now()
        self._num_steps = self._num_executed = self._num_tokens = 0

    @property
    def state(self) -> EngineState:
        """As of the last step."""
        return self._state

    def beat(self, step: StepCounts) -> None:
        """A step ended."""
        self._state = step.state
        self._num_steps += 1
        self._num_executed += step.num_tokens > 0
        self._num_tokens += step.num_tokens
        elapsed = self._clock.now() - self._logged_at
        if self._is_due(elapsed):
            self._log(step, elapsed)

    def _is_due(self, elapsed: float) -> bool:
        if self._state is self._logged_state:
            return elapsed >= HEARTBEAT_S
        flutters = {self._state, self._logged_state} == {EngineState.WORKING, EngineState.WAITING}
        return not flutters or elapsed >= FLUTTER_S

    def _log(self, step: StepCounts, elapsed: float) -> None:
        logger.log(
            logging.WARNING if self._state is EngineState.STALLED else logging.INFO,
            "engine is %s: %d unfinished, %d running, %d waiting, %d of them staging; since the last line %d steps, "
            "%d with the model, %d tokens, %.1f s",
            self._state.value,
            step.num_unfinished,
            step.num_running,
            step.num_waiting,
            step.num_staging,
            self._num_steps,
            self._num_executed,
            self._num_tokens,
            elapsed,
        )
        self._logged_state, self._logged_at = self._state, self._clock.now()
        self._num_steps = self._num_executed = self._num_tokens = 0
