"""What keeps the engine from stalling, each removable, by patching the one place that has it.

Nothing here is an option of the product: an engine without one of these is what the benchmark compares with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from kvtier_connectors.contract import NO_RESTORES, RestorePoll
from kvtier_engine.admission import Candidate
from kvtier_engine.batch import Batch
from kvtier_engine.capacity import CapacityLedger
from kvtier_engine.compute_share import WorkClass
from kvtier_engine.request import Request
from kvtier_engine.scheduler import Scheduler, StepPlan, _Turn
from kvtier_engine.verdict import Stall

GUARDS = {
    "escape": "a turn that schedules nothing is rescued: blocked requests are no prompt work, an empty prompt turn "
    "falls back to decodes, a step that would be empty preempts, and a stall is ended",
    "poll": "restores are polled in every step, not only in those that come to admit prompts",
    "expiry": "a restore that was refused blocks for 60 s is recomputed",
    "holdback": "what a blocked request needs is kept from those behind it",
}


class _BatchWithoutEscape(Batch):
    def escape(self) -> None:
        pass


class _SchedulerWithoutEscape(Scheduler):
    """The incident's engine: while a slot is free, whoever waits counts as prompt work, blocked or not. A prompt turn
    that schedules nothing ends there, and charges nobody, so that the next turn is the prompts' again."""

    def _could_prefill(self) -> bool:
        has_slot = len(self.running) < self._config.max_num_seqs
        return super()._could_prefill() or (has_slot and self.waiting.num_ready > 0)

    def _take_turn(
        self, batch: Batch, candidates: list[Candidate], *, could_decode: bool, could_prefill: bool
    ) -> _Turn | None:
        share = self._share
        if share is None or share.select(could_decode, could_prefill) is not WorkClass.PREFILL:
            return super()._take_turn(batch, candidates, could_decode=could_decode, could_prefill=could_prefill)
        batch.run_prefills()
        batch.admit(candidates, may_compute=True)
        if not batch.shares:
            return None
        is_contended = could_decode and could_prefill
        share.dispatch(WorkClass.PREFILL, is_contended)
        return _Turn(WorkClass.PREFILL, is_contended)

    def _end_stall(self, stall: Stall) -> list[tuple[Request, str]]:
        del stall
        self._num_stalled_steps += 1
        self.num_stalls += self._num_stalled_steps == 1
        return []


class _SchedulerPollingInAdmission(Scheduler):
    """Restores are polled by the pass that admits prompts: in a prompt turn, or where nothing decodes, and only while a
    slot is free. What it finds is seen in the step after."""

    _found: RestorePoll = NO_RESTORES

    def _poll_restores(self) -> RestorePoll:
        found, self._found = self._found, NO_RESTORES
        return found

    def _take_turn(
        self, batch: Batch, candidates: list[Candidate], *, could_decode: bool, could_prefill: bool
    ) -> _Turn | None:
        turn = super()._take_turn(batch, candidates, could_decode=could_decode, could_prefill=could_prefill)
        is_prefill = turn is not None and turn.work is WorkClass.PREFILL
        if (is_prefill or not could_decode) and len(self.running) < self._config.max_num_seqs:
            self._found = super()._poll_restores()
        return turn

    def _judge(self, poll: RestorePoll, copies_in_flight: int, failed: list[tuple[Request, str]]) -> StepPlan:
        return super()._judge(replace(poll, next_deadline=self._found.next_deadline), copies_in_flight, failed)


def _never_expires(_connector: object, _request_id: str, *, is_permanent: bool = False) -> bool:
    return not is_permanent


_wait = CapacityLedger.wait


def _wait_without_hold(ledger: CapacityLedger, request: Request, _num_needed: int) -> None:
    _wait(ledger, request, 0)


def _hold_nothing(_ledger: CapacityLedger, _num_blocks: int) -> None:
    pass


PATCHES: dict[str, Sequence[tuple[str, object]]] = {
    "escape": [
        ("kvtier_engine.engine.Scheduler", _SchedulerWithoutEscape),
        ("kvtier_engine.scheduler.Batch", _BatchWithoutEscape),
    ],
    "poll": [("kvtier_engine.engine.Scheduler", _SchedulerPollingInAdmission)],
    "expiry": [("kvtier_connectors.scheduler.KVTierScheduler.refuse_restore", _never_expires)],
    "holdback": [
        ("kvtier_engine.capacity.CapacityLedger.wait", _wait_without_hold),
        ("kvtier_engine.capacity.CapacityLedger.hold", _hold_nothing),
    ],
}


@contextmanager
def without(guard: str | None) -> Iterator[None]:
    """Engines that are opened and run within have not this guard; None takes none away."""
    with ExitStack() as stack:
        for target, replacement in PATCHES[guard] if guard is not None else ():
            stack.enter_context(patch(target, replacement))
        yield
