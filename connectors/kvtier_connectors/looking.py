"""The way up, before its first stage: finding out which tiers have a request's blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from kvtier.clock import Clock
from kvtier.episode import HOST, clip
from kvtier.keys import BlockDigest
from kvtier.located import Located, Source
from kvtier.membership import Question
from kvtier.reasons import MissReason
from kvtier.restore import RestoreDecision, TierPart
from kvtier.staging import Stager
from kvtier.store import Space
from kvtier_connectors.arrival import Arrival
from kvtier_connectors.faults import CAUGHT

__all__ = ["Lookups"]

ASKING_SHARE = 0.25
"""The part of a request's wait that may pass before tiers have answered: what is known without them is still to come
to host memory."""


class Lookups:
    """Looks blocks up, and tells the decision. Tiers of this machine answer at once; remote ones are asked for what
    those do not have, and an arrival waits here until they have answered, or its time for that is over: then what is
    known counts. Iterating gives those that wait, first come first. Engine's thread only.

    Mutable state: `_asking`.
    """

    def __init__(
        self,
        space: Space,
        stager: Stager,
        decision: RestoreDecision,
        clock: Clock,
        landing_bytes: Callable[[], int],
        report: Callable[[str, BaseException], None],
    ) -> None:
        """landing_bytes, report: as for `ArrivalFlow`."""
        self._space = space
        self._stager = stager
        self._decision = decision
        self._clock = clock
        self._landing_bytes = landing_bytes
        self._report = report
        self._asking: dict[Arrival, Sequence[Question]] = {}

    def __len__(self) -> int:
        return len(self._asking)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._asking)

    def __contains__(self, arrival: Arrival) -> bool:
        return arrival in self._asking

    def discard(self, arrival: Arrival) -> None:
        """It waits no more for an answer. Idempotent."""
        self._asking.pop(arrival, None)

    def next_deadline(self) -> float | None:
        """When the first of them waits no more."""
        ends = [arrival.episode.when_taken(ASKING_SHARE) for arrival in self._asking]
        return min((end for end in ends if end is not None), default=None)

    def look(self, arrival: Arrival) -> bool:
        """False until the tiers have answered; then the decision was told."""
        questions = self._asking.get(arrival)
        found: Located | None = None
        if questions is None:
            found, last = self._find(arrival)
            questions = self._ask(arrival, found, last)
        unanswered: MissReason | None = None
        if not all(question.done for question in questions):
            if not arrival.episode.has_taken(self._clock.now(), ASKING_SHARE):
                self._asking[arrival] = questions
                return False
            unanswered = arrival.episode.time_over
        self.discard(arrival)
        unanswered = unanswered or next((each.failure for each in questions if each.failure is not None), None)
        self._tell(arrival, self._find(arrival)[0] if questions else found, unanswered)
        return True

    def look_again(self, arrival: Arrival) -> None:
        """At once: by what is known, asking nobody."""
        self._tell(arrival, self._find(arrival)[0], None)

    def _ask(self, arrival: Arrival, found: Located | None, last: Collection[str]) -> Sequence[Question]:
        if found is None or not arrival.episode.max_wait_s:
            return ()
        try:
            return self._space.ask(_wanted(arrival), found, last)
        except CAUGHT as error:
            self._report("ask", error)
            return ()

    def _find(self, arrival: Arrival) -> tuple[Located | None, Collection[str]]:
        """Where its blocks are; and which tiers others are better than: those that failed it, and those too slow."""
        failed = arrival.failed
        try:
            found = self._space.locate(_wanted(arrival), failed)
            slow = self._too_slow(arrival, found)
            if not slow:
                return found, failed
            other = self._space.locate(_wanted(arrival), failed | slow)
            is_better = self._gain_s(arrival, self._parts(other)) > self._gain_s(arrival, self._parts(found))
            return other if is_better else found, failed | slow
        except CAUGHT as error:
            self._report("locate", error)
            return None, failed

    def _too_slow(self, arrival: Arrival, found: Located) -> set[str]:
        """Tiers whose blocks are not worth their wait, where another that may be asked would be, if it has them."""
        if len(self._stager.sources) == 1:
            return set()
        parts = self._parts(found)
        num_worth, gain_s = self._decision.worth(arrival.episode, parts)
        left = clip(parts, arrival.episode.max_blocks)
        slow: set[str] = set()
        for part in left:
            num_worth -= part.num_blocks
            if num_worth < 0 and part.tier != HOST:
                slow.add(part.tier)
        for source in self._stager.sources if slow else ():
            if source.name not in slow | arrival.failed and source.is_available:
                queued_bytes = self._stager.queued_bytes(source)
                instead = [
                    replace(p, tier=source.name, queued_bytes=queued_bytes) if p.tier in slow else p for p in left
                ]
                if self._gain_s(arrival, instead) > gain_s:
                    return slow
        return set()

    def _gain_s(self, arrival: Arrival, parts: Sequence[TierPart]) -> float:
        return self._decision.worth(arrival.episode, parts)[1]

    def _tell(self, arrival: Arrival, found: Located | None, unanswered: MissReason | None) -> None:
        parts: list[TierPart] | None = None
        try:
            parts = None if found is None else self._parts(found)
        except CAUGHT as error:
            self._report("locate", error)
        if parts is None:
            self._decision.not_answered(arrival.episode)
            return
        arrival.found = found
        self._decision.answered(arrival.episode, parts, unanswered)

    def _parts(self, found: Located) -> list[TierPart]:
        """What each tier holds of it, in the prompt's order. Blocks that somebody else copies to host memory come with
        the next one that is read, or not at all."""
        behind = found.sources[found.num_host :]
        reader = next((source for source in behind if source is not None), None)
        readers: list[Source | None] = [None] * found.num_host
        if reader is not None:
            first = behind.index(reader)
            readers += [reader] * first + list(behind[first:])
        parts: list[TierPart] = []
        for source, blocks in groupby(readers):
            tier = HOST if source is None else source.tier.name
            queued_bytes = self._landing_bytes() if source is None else self._stager.queued_bytes(source)
            parts.append(TierPart(tier, sum(1 for _ in blocks), queued_bytes))
        return parts


def _wanted(arrival: Arrival) -> Sequence[BlockDigest]:
    return arrival.digests[arrival.first_block : arrival.first_block + arrival.episode.max_blocks]
