"""One step's work: who computes how many tokens, within one budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier_engine.admission import Admission, Candidate
from kvtier_engine.request import Request, RequestState
from kvtier_engine.roster import Roster
from kvtier_engine.tables import BlockTables

__all__ = ["Batch", "Scheduled"]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's share of a step: its next `num_tokens` tokens, from `start` on, for which its table has blocks."""

    request: Request
    start: int
    num_tokens: int
    is_prefill: bool


class Batch:
    """Fills one step. A decode that finds no block preempts; a prompt takes what is free. Lives for one step."""

    def __init__(self, roster: Roster, tables: BlockTables, admission: Admission, step: int, budget: int) -> None:
        self.shares: dict[str, Scheduled] = {}
        self._roster = roster
        self._tables = tables
        self._admission = admission
        self._step = step
        self._budget = budget
        self._num_preempted = roster.num_preemptions

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self.shares

    def run_decodes(self) -> None:
        """A token for each that decodes; where the budget is too small for all, first for those whose turn is longest
        ago, then for others in the place of those that find no block."""
        decodes = [request for request in self._roster.computing() if request.is_decoding]
        if len(decodes) > self._budget:
            last_turns = sorted(decodes, key=lambda request: request.last_decode_step)
            chosen = set(last_turns[: self._budget])
            decodes.sort(key=lambda request: request not in chosen)
        for request in decodes:
            if not self._budget:
                break
            if request.state is not RequestState.RUNNING:  # preempted for one before it
                continue
            fits = self._tables.grow(request, 1)
            while not fits and self._roster.preempt_for(request, self.__contains__):
                fits = self._tables.grow(request, 1)
            if fits:
                request.last_decode_step = self._step
                self._add(request, 1, is_prefill=False)
            elif self.shares:
                # Those before it go on: it would keep its blocks for as long as they run, and put out nothing.
                self._roster.give_way(request)

    def run_prefills(self) -> None:
        """Chunks of running prompts, first come first."""
        for request in self._roster.computing():
            if request not in self:
                self._run_chunk(request)

    def admit(self, candidates: Iterable[Candidate], *, may_compute: bool) -> None:
        """Give slots to those for whom there is still room, in their order; unless they may compute, only to those
        whose blocks land.

        Nobody after a preemption: what was preempted must not come back in its own step, nor its place be another's.
        """
        num_promised = 0
        for candidate in candidates:
            if self._roster.num_preemptions != self._num_preempted:
                break
            fitting = self._admission.fits(candidate, self._roster.running, num_promised)
            if fitting is None:
                continue
            if candidate.is_restore or (may_compute and self._budget):
                self._roster.start(candidate.request, fitting.local)
                if may_compute:
                    self._run_chunk(candidate.request)
            else:
                num_promised += fitting.num_taken

    def escape(self) -> None:
        """Nothing is scheduled. If something could run, preempt those that came last until it does."""
        self.run_decodes()
        for request in self._roster.computing():
            while not self.shares and request.state is RequestState.RUNNING:
                if self._run_chunk(request) or not self._roster.preempt_for(request, self.__contains__):
                    break

    def _run_chunk(self, request: Request) -> bool:
        if request.state is not RequestState.RUNNING or request.is_decoding or not self._budget:
            return False
        num_tokens = self._tables.num_fitting(request, min(request.num_uncomputed, self._budget))
        if not num_tokens or not self._tables.grow(request, num_tokens):
            return False
        self._add(request, num_tokens, is_prefill=True)
        return True

    def _add(self, request: Request, num_tokens: int, *, is_prefill: bool) -> None:
        self.shares[request.request_id] = Scheduled(request, request.num_computed, num_tokens, is_prefill)
        self._budget -= num_tokens
