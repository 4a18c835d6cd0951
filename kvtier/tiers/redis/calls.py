"""A call's conversations with several servers: all are asked, then all are heard; what has moved is asked again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.channel import Channel, ChannelError, DeadlineError, LostError
from kvtier.tiers.redis.exchange import AbandonedError, Exchange, commands
from kvtier.tiers.redis.pool import ConnectionPool
from kvtier.tiers.redis.replies import KNOWN_CODES, Meaning, meaning, redirect
from kvtier.tiers.redis.resp import ErrorReply, Reply
from kvtier.tiers.redis.topology import Router

__all__ = ["Caller", "Failure", "Make"]

_Answer = TypeVar("_Answer")

MAX_REDIRECTS = 4
"""Of a block in a call: a slot that has moved may be on its way again, and nodes do not hear of it at once."""

Failure = ErrorReply | ChannelError
"""Why an item has no answer: what the server said instead, or what befell the connection."""

Make = Callable[[Address, Sequence[int], bool], Exchange[_Answer]]
"""The exchange with a server for items of a call, given by their positions; the last: whether to say ASKING."""


class Caller:
    """Runs exchanges. Any thread; takes connections of several servers in one order, so that no two calls wait for
    each other.

    Mutable state: `_errors`, guarded by `_lock`.
    """

    def __init__(self, pool: ConnectionPool, router: Router, on_failure: Callable[[Failure], None]) -> None:
        """on_failure: told of each failure, but redirects; without a lock."""
        self._pool = pool
        self._router = router
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()

    @property
    def errors(self) -> Mapping[str, int]:
        """Failures by kind: an error reply's first word, or timeout, connection, protocol."""
        with self._lock:
            return dict(self._errors)

    def run(
        self, num_items: int, slots: Callable[[], Sequence[int]], make: Make[_Answer], deadline: float
    ) -> list[_Answer | Failure]:
        """The answers, by position; what moves is followed. slots: of the items; asked of a cluster only.

        Raises what `Router.routes` does, where nobody knows who to ask.
        """
        routes = self._router.routes(deadline)
        if routes.masters_by_slot is None:
            groups: Mapping[tuple[Address, bool], Sequence[int]] = {(routes.masters[0], False): range(num_items)}
            answers: list[_Answer | Failure] = []
        else:
            # What a look-up in a cluster costs is this loop: a list for each master, and one for NO_MASTER, -1.
            *grouped, orphans = [list[int]() for _ in range(len(routes.masters) + 1)]
            by_slot, add = routes.masters_by_slot, [group.append for group in (*grouped, orphans)]
            for position, slot in enumerate(slots()):
                add[by_slot[slot]](position)
            groups = {(routes.masters[number], False): group for number, group in enumerate(grouped) if group}
            answers = [LostError("its slot has no master now")] * num_items
            if orphans:
                self._router.doubt()
                self.note(LostError("a slot has no master now"))
        for _ in range(1 + MAX_REDIRECTS):
            groups = self._round(groups, make, answers, deadline)
            if not groups:
                break
        return answers

    def ask(self, slot: int, command: bytes, deadline: float) -> Reply:
        """One command with one key. Raises a ChannelError; an error reply is returned."""
        answer = self.run(1, lambda: [slot], lambda _, __, asking: commands([command], asking=asking), deadline)[0]
        if isinstance(answer, ChannelError):
            raise answer
        return answer

    def drive(self, exchanges: Mapping[Address, Exchange[object]], deadline: float) -> dict[Address, ChannelError]:
        """Have each server answer, as far as it does by the deadline; what befell those that did not."""
        channels: dict[Address, Channel] = {}
        failures: dict[Address, ChannelError] = {}
        try:
            for address in sorted(exchanges):
                if exchanges[address].is_done:
                    continue
                try:
                    channels[address] = self._pool.acquire(address, deadline)
                    exchanges[address].begin(channels[address])
                except ChannelError as error:
                    failures[address] = error
            for address, exchange in exchanges.items():
                begun_badly = failures.pop(address, None)
                if address in channels or begun_badly is not None:
                    self._finish(address, exchange, channels, begun_badly, deadline, failures)
        finally:
            for channel in channels.values():
                self._pool.release(channel)
        for failure in failures.values():
            self._router.doubt()  # a master that fails may be none by now
            self.note(failure)
        return failures

    def note(self, failure: Failure) -> None:
        """Count it, and tell whoever wants to know."""
        kind = failure.kind if isinstance(failure, ChannelError) else failure.code
        if isinstance(failure, ErrorReply) and kind not in KNOWN_CODES:
            kind = "other"  # a server's words are no names for counters
        with self._lock:
            self._errors[kind] += 1
        self._on_failure(failure)

    def _finish(
        self,
        address: Address,
        exchange: Exchange[object],
        channels: dict[Address, Channel],
        error: ChannelError | None,
        deadline: float,
        failures: dict[Address, ChannelError],
    ) -> None:
        """Hear one server to its end; on a new connection where the old one was dead before it was asked."""
        while True:
            try:
                if error is not None:
                    raise error
                exchange.finish(channels[address])
                self._pool.release(channels.pop(address))
                return
            except ChannelError as failure:
                channel = channels.pop(address, None)
                if channel is None:
                    failures[address] = failure
                    return
                was_dead = isinstance(failure, LostError) and not (channel.is_fresh or channel.num_received)
                self._pool.release(channel)
                if not (was_dead or isinstance(failure, AbandonedError)):
                    failures[address] = failure
                    return
                exchange.rewind()
            error = None
            if exchange.is_done:
                return
            try:
                channels[address] = self._pool.acquire(address, deadline, fresh=was_dead)
                exchange.begin(channels[address])
            except ChannelError as failure:
                error = failure

    def _round(
        self,
        groups: Mapping[tuple[Address, bool], Sequence[int]],
        make: Make[_Answer],
        answers: list[_Answer | Failure],
        deadline: float,
    ) -> dict[tuple[Address, bool], Sequence[int]]:
        """Put in the answers of each group; where to ask for those that another node has."""
        moved: dict[tuple[Address, bool], list[int]] = {}
        for some in _by_kind(groups):
            exchanges = {address: make(address, positions, asking) for (address, asking), positions in some.items()}
            failures = self.drive(exchanges, deadline)
            for (address, _), positions in some.items():
                heard: list[_Answer | Failure] = [*exchanges[address].answers]
                if len(heard) < len(positions):
                    late = DeadlineError(f"{address} did not answer in time")
                    heard += [failures.get(address, late)] * (len(positions) - len(heard))
                if isinstance(positions, range) and not answers:
                    answers.extend(heard)
                else:
                    for position, answer in zip(positions, heard, strict=True):
                        answers[position] = answer
                if ErrorReply in set(map(type, heard)):
                    self._follow(address, positions, heard, moved)
        return {where: tuple(positions) for where, positions in moved.items()}

    def _follow(
        self,
        address: Address,
        positions: Sequence[int],
        heard: Sequence[object],
        moved: dict[tuple[Address, bool], list[int]],
    ) -> None:
        for position, answer in zip(positions, heard, strict=True):
            if type(answer) is not ErrorReply:
                continue
            where = redirect(answer, address) if self._router.is_clustered else None
            if where is not None:
                self._router.follow(where)
                moved.setdefault((where.address, where.asking), []).append(position)
            else:
                if meaning(answer) is Meaning.READ_ONLY:
                    self._router.doubt()
                self.note(answer)


def _by_kind(
    groups: Mapping[tuple[Address, bool], Sequence[int]],
) -> list[Mapping[tuple[Address, bool], Sequence[int]]]:
    """Those to ask plainly, and those to ask with ASKING: one server may be in both."""
    if not any(asking for _, asking in groups):
        return [groups]
    split = [{where: group for where, group in groups.items() if where[1] is asking} for asking in (False, True)]
    return [some for some in split if some]
