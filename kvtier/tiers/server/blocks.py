"""The tier's calls on blocks, as messages to the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.clock import Clock
from kvtier.decisions import MAX_NAME, Decision
from kvtier.keys import Key
from kvtier.protocol.messages import Count, Held, Lookup, Remove, Tell, Touch
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.server.batches import Batch, Lookups, batch_bytes, batches, lookups, ttl_ms
from kvtier.tiers.server.calls import Caller
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import ServerError
from kvtier.tiers.server.fetching import Fetching
from kvtier.tiers.server.storing import Storing

__all__ = ["Blocks"]

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
PATIENCE_SHARE = 0.5
MAX_TIERS = 16
MAX_TIER_NAME = 64
"""Of a call's time, that a block which another client stores, or a slot, is waited for: half is left for the rest."""


class Blocks:
    """Looks up, reads, writes, touches and removes blocks. No state of its own but a count; any thread."""

    def __init__(self, caller: Caller, clock: Clock, timeout_s: float) -> None:
        self._caller = caller
        self._clock = clock
        self._timeout_s = timeout_s
        self.num_damaged = 0

    def contains(self, keys: Sequence[Key], deadline: float) -> list[bool]:
        """Raises TierError unless every key was answered."""

        def look(connection: Connection) -> list[bool]:
            found = bytearray(len(keys))
            for each in lookups(keys):
                held = _held(connection, each)
                if len(held) != len(each.positions):
                    raise connection.garbled(f"{len(held)} answers for {len(each.positions)} blocks")
                if isinstance(each.positions, range):
                    found[each.positions.start : each.positions.stop] = held
                else:
                    for position, tier in zip(each.positions, held, strict=True):
                        found[position] = tier
            return list(map(bool, found))

        return self._caller.ask(look, deadline)

    def touch(self, keys: Sequence[Key], deadline: float) -> None:
        """Raises TierError where the server cannot be told."""

        def tell(connection: Connection) -> None:
            for each in lookups(keys):
                connection.say(Touch(each.namespace, each.digests, b""))

        self._caller.ask(tell, deadline)

    def tell(self, decisions: Sequence[Decision], deadline: float) -> None:
        """Raises TierError where the server cannot be told."""

        def tell(connection: Connection) -> None:
            for decision in decisions:
                connection.say(_told(decision))

        self._caller.ask(tell, deadline)

    def remove(self, keys: Sequence[Key], deadline: float) -> int:
        """How many were there. Raises TierError unless every key was answered."""
        return self._caller.ask(lambda connection: _remove(connection, keys), deadline)

    def read(self, requests: Sequence[ReadRequest], deadline: float) -> list[ReadOutcome]:
        """Each key once: who asks for it again gets a copy."""
        first: dict[tuple[Key, int], int] = {}
        for position, request in enumerate(requests):
            first.setdefault((request.key, request.buffer.nbytes), position)
        outcomes = [ReadOutcome.ERROR] * len(requests)
        try:
            with self._caller.connection(deadline) as connection:
                fetching = Fetching(connection, requests, self._clock, deadline)
                try:
                    self._fetch(connection, fetching, requests, [*first.values()], deadline)
                finally:
                    outcomes = fetching.outcomes
                    self.num_damaged += len(fetching.scribbled)
                if fetching.scribbled:
                    _remove(connection, fetching.scribbled)
        except ServerError:
            pass  # it was noted, and the outcomes say it
        for position, request in enumerate(requests):
            source = first[request.key, request.buffer.nbytes]
            if source != position:
                outcomes[position] = outcomes[source]
                if outcomes[source] is ReadOutcome.OK:
                    request.buffer.cast("B")[:] = requests[source].buffer.cast("B")
        return outcomes

    def write(self, requests: Sequence[WriteRequest], deadline: float) -> list[WriteOutcome]:
        """Each key once: a second block under a key ends as the first, stored before."""
        first: dict[Key, int] = {}
        for position, request in enumerate(requests):
            first.setdefault(request.key, position)
        outcomes = [WriteOutcome.ERROR] * len(requests)
        try:
            with self._caller.connection(deadline) as connection:
                storing = Storing(connection, requests)
                try:
                    self._store(connection, storing, requests, [*first.values()], deadline)
                finally:
                    outcomes = storing.outcomes
        except ServerError:
            pass  # it was noted, and the outcomes say it
        for position, request in enumerate(requests):
            if first[request.key] != position:
                outcome = outcomes[first[request.key]]
                outcomes[position] = WriteOutcome.ALREADY_STORED if outcome is WriteOutcome.STORED else outcome
        return outcomes

    def _fetch(
        self,
        connection: Connection,
        fetching: Fetching,
        requests: Sequence[ReadRequest],
        positions: Sequence[int],
        deadline: float,
    ) -> None:
        """Blocks for which there was no slot are asked for again: other calls here may have held all that one client
        may have, and give it back in milliseconds."""
        for _ in self._turns(deadline):
            blocks = [(i, requests[i].key, requests[i].buffer.nbytes, 0) for i in positions]
            some, too_long = _split(connection, blocks)
            for position in too_long:
                fetching.outcomes[position] = ReadOutcome.MISS
            fetching.fetch(some)
            positions = fetching.no_room
            if not positions:
                return

    def _store(
        self,
        connection: Connection,
        storing: Storing,
        requests: Sequence[WriteRequest],
        positions: Sequence[int],
        deadline: float,
    ) -> None:
        """Blocks that another client stores are asked for again."""
        for _ in self._turns(deadline):
            blocks = [(i, requests[i].key, requests[i].buffer.nbytes, ttl_ms(requests[i])) for i in positions]
            some, too_long = _split(connection, blocks)
            for position in too_long:
                storing.outcomes[position] = WriteOutcome.FULL
            storing.store(some)
            positions = storing.being_stored
            if not positions:
                return

    def _turns(self, deadline: float) -> Iterator[None]:
        """At once, and then again after longer and longer pauses, for as long as patience lasts."""
        until = deadline - self._timeout_s * (1 - PATIENCE_SHARE)
        pause_s = FIRST_PAUSE_S
        while True:
            yield
            if self._clock.now() + pause_s > until or self._caller.closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _held(connection: Connection, asked: Lookups) -> bytes:
    return connection.call(lambda number: Lookup(number, asked.namespace, asked.digests), Held).tiers


def _remove(connection: Connection, keys: Sequence[Key]) -> int:
    return sum(_removed(connection, each) for each in lookups([*dict.fromkeys(keys)]))


def _removed(connection: Connection, gone: Lookups) -> int:
    return connection.call(lambda number: Remove(number, gone.namespace, gone.digests), Count).number


def _split(connection: Connection, blocks: Sequence[tuple[int, Key, int, int]]) -> tuple[list[Batch], Sequence[int]]:
    """Batches; and the positions of blocks that no message can carry."""
    most = (1 << 63) - 1 if connection.mapping is not None else connection.welcome.max_payload_bytes
    most_at_once = min(most, batch_bytes(connection.welcome.capacity_bytes))
    some = batches([block for block in blocks if block[2] <= most], most_at_once)
    return [*some], [block[0] for block in blocks if block[2] > most]


def _told(decision: Decision) -> Tell:
    served = dict(list(decision.served.items())[:MAX_TIERS])
    return Tell(
        decision.request_id[:MAX_NAME],
        decision.fate,
        decision.asked,
        [tier[:MAX_TIER_NAME] for tier in served],
        list(served.values()),
        decision.reason[:MAX_TIER_NAME],
        decision.tier[:MAX_TIER_NAME],
        int(1000 * max(0.0, decision.waited_s)),
        int(1000 * max(0.0, decision.limit_s)),
    )
