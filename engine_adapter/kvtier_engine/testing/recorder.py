"""What an engine did, step by step, and what it said of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvtier.clock import Clock
from kvtier_engine.request import RequestOutput
from kvtier_engine.verdict import SchedulerStats, Verdict

if TYPE_CHECKING:
    from kvtier_engine.engine import Engine, StepResult

__all__ = ["LogLine", "Recorder", "StepRecord"]


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that a kvtier logger wrote.

    args: what its text was made of, for tests that care for the numbers and not for the words. step: steps that were
    recorded before it.
    """

    step: int
    level: int
    logger: str
    message: str
    args: tuple[object, ...] | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. at: the clock's seconds after it, 0 without a clock. stats: the scheduler's, after it."""

    result: StepResult
    at: float
    stats: SchedulerStats | None = None


class _Handler(logging.Handler):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.DEBUG)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args or ()
        line = LogLine(len(self._recorder.steps), record.levelno, record.name, record.getMessage(), args)
        self._recorder.lines.append(line)


class Recorder:
    """Collects steps and log lines. A context manager: it listens from `__enter__` to `__exit__`, at every level.

        with Recorder(clock) as recorder:
            recorder.step(engine)
        assert recorder.verdicts == [Verdict.OK]
        assert recorder.warnings() == []

    logger_name: the logger whose lines, and whose children's, are collected.
    """

    def __init__(self, clock: Clock | None = None, *, logger_name: str = "kvtier") -> None:
        self.steps: list[StepRecord] = []
        self.lines: list[LogLine] = []
        self._clock = clock
        self._logger = logging.getLogger(logger_name)
        self._handler = _Handler(self)
        self._level: int | None = None

    def step(self, engine: Engine) -> StepResult:
        """One step of the engine, recorded."""
        result = engine.step()
        self.note(result, engine.scheduler.stats())
        return result

    def note(self, result: StepResult, stats: SchedulerStats | None = None) -> None:
        """Record a step that somebody else made."""
        self.steps.append(StepRecord(result, 0.0 if self._clock is None else self._clock.now(), stats))

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def verdicts(self) -> list[Verdict]:
        return [step.result.verdict for step in self.steps]

    @property
    def in_flight(self) -> list[int]:
        """Copies and stages that a step was waiting for, by step."""
        return [step.result.in_flight for step in self.steps]

    @property
    def deadlines(self) -> list[float | None]:
        """When the first wait would end by itself, by step."""
        return [step.result.next_deadline for step in self.steps]

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for step in self.steps for output in step.result.outputs]

    def tokens(self, request_id: str) -> list[int]:
        """What was put out for this id, in order; for the last request that had it, if several had."""
        found: list[int] = []
        for output in self.outputs:
            if output.request_id == request_id:
                found = list(output.token_ids)
        return found

    def finished(self) -> dict[str, RequestOutput]:
        return {output.request_id: output for output in self.outputs if output.finished}

    def log(self, containing: str = "", level: int = logging.DEBUG) -> list[LogLine]:
        """Lines of at least this level whose text, or an argument of it, contains this."""
        return [line for line in self.lines if line.level >= level and containing in line.message]

    def warnings(self, containing: str = "") -> list[LogLine]:
        """Warnings, errors and worse."""
        return self.log(containing, logging.WARNING)

    def num_empty_in_a_row(self) -> int:
        """The longest run of steps that computed nothing though something was runnable: neither OK, IDLE nor WAIT."""
        longest = current = 0
        for verdict in self.verdicts:
            current = current + 1 if verdict is Verdict.STALL else 0
            longest = max(longest, current)
        return longest

    # ---- listening -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logger.removeHandler(self._handler)
        if self._level is not None:
            self._logger.setLevel(self._level)
            self._level = None
