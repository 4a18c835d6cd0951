"""The tier's calls on blocks, as exchanges with the servers that have them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.config.settings import MAX_LIFETIME_S, RedisSettings
from kvtier.errors import TierError
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.backoff import FullBackoff
from kvtier.tiers.redis.calls import Caller, Failure
from kvtier.tiers.redis.channel import ChannelError
from kvtier.tiers.redis.epochs import Era
from kvtier.tiers.redis.exchange import ASKING, Commands, Exchange
from kvtier.tiers.redis.replies import Meaning, hint, meaning
from kvtier.tiers.redis.resp import ErrorReply, Reply, repeated
from kvtier.tiers.redis.slots import slots_of
from kvtier.tiers.redis.transfer import Gets, Naming, Outgoing, Sets

__all__ = ["Blocks"]


class Blocks:
    """Looks up, reads, writes, touches and removes blocks of an era. Any thread.

    Mutable state: `_num_reads`, the reads under way, guarded by `_lock`.
    """

    def __init__(self, settings: RedisSettings, caller: Caller, backoff: FullBackoff) -> None:
        self._tenant = settings.tenant
        self._ttl_ms = None if settings.ttl_s == "off" else int(settings.ttl_s * 1000)
        self._caller = caller
        self._backoff = backoff
        self._lock = threading.Lock()
        self._num_reads = 0

    def contains(self, era: Era, keys: Sequence[Key], deadline: float) -> list[bool]:
        """Raises TierError unless every key was answered."""
        answers = self._each("EXISTS", era, keys, deadline)
        self._check(answers)
        return [answer == 1 for answer in answers]

    def touch(self, era: Era, keys: Sequence[Key], deadline: float) -> None:
        """Raises TierError unless every key was answered."""
        self._check(self._each("TOUCH", era, keys, deadline))
        if self._ttl_ms is not None:
            self._each("PEXPIRE", era, keys, deadline, self._ttl_ms, "GT")

    def forget(self, era: Era, keys: Sequence[Key], deadline: float) -> None:
        """As `remove`, where it is no harm that a server does not answer: what is damaged is so at its next read."""
        try:
            self._each("UNLINK", era, keys, deadline)
        except (ChannelError, TierError) as error:
            self._note(error)

    def remove(self, era: Era, keys: Sequence[Key], deadline: float) -> int:
        """How many were there. Raises TierError unless every key was answered."""
        answers = self._each("UNLINK", era, keys, deadline)
        self._check(answers)
        return sum(answer == 1 for answer in answers)

    def read(self, era: Era, requests: Sequence[ReadRequest], deadline: float) -> list[ReadOutcome]:
        naming = Naming(era.prefix, self._tenant)

        def make(_: Address, positions: Sequence[int], asking: bool) -> Exchange[ReadOutcome]:
            own = [requests[i] for i in positions]
            return Gets(own, naming, self._ttl_ms, asking=asking, num_reads=self._num_reads)

        keys = [request.key for request in requests]
        with self._lock:
            self._num_reads += 1
        try:
            answers = self._caller.run(len(keys), lambda: slots_of(era.prefix, keys), make, deadline)
        except (ChannelError, TierError) as error:
            self._note(error)
            return [ReadOutcome.ERROR] * len(requests)
        finally:
            with self._lock:
                self._num_reads -= 1
        return [answer if isinstance(answer, ReadOutcome) else self._failed_read(answer) for answer in answers]

    def write(self, era: Era, requests: Sequence[WriteRequest], deadline: float) -> list[WriteOutcome]:
        """Each key once: a second block under a key ends as the first, stored before."""
        first: dict[Key, int] = {}
        for position, request in enumerate(requests):
            first.setdefault(request.key, position)
        outcomes = [WriteOutcome.ERROR] * len(requests)
        try:
            self._write(era, requests, [*first.values()], outcomes, deadline)
        except (ChannelError, TierError) as error:
            self._note(error)
        for position, request in enumerate(requests):
            if first[request.key] != position:
                outcome = outcomes[first[request.key]]
                outcomes[position] = WriteOutcome.ALREADY_STORED if outcome is WriteOutcome.STORED else outcome
        return outcomes

    def _write(
        self,
        era: Era,
        requests: Sequence[WriteRequest],
        positions: Sequence[int],
        outcomes: list[WriteOutcome],
        deadline: float,
    ) -> None:
        # A look first: blocks that others have stored are not worth sending.
        held = self._each("EXISTS", era, [requests[i].key for i in positions], deadline)
        new: list[int] = []
        kept: list[int] = []
        for position, answer in zip(positions, held, strict=True):
            if answer == 1:
                outcomes[position] = WriteOutcome.ALREADY_STORED
                kept.append(position)
            elif answer == 0:
                new.append(position)
        self._store(era, [Outgoing(requests[i], self._lifetime_ms(requests[i])) for i in new], new, outcomes, deadline)
        self._prolong(era, [requests[i] for i in kept], deadline)

    def _store(
        self,
        era: Era,
        blocks: Sequence[Outgoing],
        positions: Sequence[int],
        outcomes: list[WriteOutcome],
        deadline: float,
    ) -> None:
        naming = Naming(era.prefix, self._tenant)
        made: list[tuple[Address, Sets]] = []

        def make(address: Address, chosen: Sequence[int], asking: bool) -> Exchange[WriteOutcome]:
            sets = Sets([blocks[i] for i in chosen], naming, asking=asking, is_full=self._backoff.is_on(address))
            made.append((address, sets))
            return sets

        if not blocks:
            return
        keys = [block.request.key for block in blocks]
        answers = self._caller.run(len(keys), lambda: slots_of(era.prefix, keys), make, deadline)
        for position, answer in zip(positions, answers, strict=True):
            outcomes[position] = answer if isinstance(answer, WriteOutcome) else WriteOutcome.ERROR
        for address, sets in made:
            if sets.was_refused:
                self._backoff.begin(address)
                self._caller.note(ErrorReply("OOM"))

    def _prolong(self, era: Era, requests: Sequence[WriteRequest], deadline: float) -> None:
        """Blocks that were offered again live as long as if they had been stored now, where they have an end."""
        by_ttl: dict[int, list[Key]] = {}
        for request in requests:
            ttl_ms = self._lifetime_ms(request)
            if ttl_ms is not None:
                by_ttl.setdefault(ttl_ms, []).append(request.key)
        for ttl_ms, keys in by_ttl.items():
            self._each("PEXPIRE", era, keys, deadline, ttl_ms, "GT")

    def _lifetime_ms(self, request: WriteRequest) -> int | None:
        return self._ttl_ms if request.ttl_s is None else max(1, int(min(request.ttl_s, MAX_LIFETIME_S) * 1000))

    def _each(
        self, verb: str, era: Era, keys: Sequence[Key], deadline: float, *options: str | int
    ) -> list[Reply | Failure]:
        """One short command for each key."""

        def make(_: Address, positions: Sequence[int], asking: bool) -> Exchange[Reply]:
            own = keys if isinstance(positions, range) else [keys[i] for i in positions]
            before = ASKING if asking else b""
            return Commands(
                len(own),
                lambda start, stop: repeated(verb, era.prefix, own[start:stop], *options, before=before),
                asking=asking,
            )

        return self._caller.run(len(keys), lambda: slots_of(era.prefix, keys), make, deadline)

    def _note(self, error: ChannelError | TierError) -> None:
        """Count a failure that nobody has met yet: the routes could not be found."""
        if isinstance(error, ChannelError):
            self._caller.note(error)

    def _failed_read(self, failure: Failure) -> ReadOutcome:
        """What the failure of a read means for its block; counted by whoever met it."""
        if isinstance(failure, ErrorReply) and meaning(failure) is Meaning.WRONG_TYPE:
            return ReadOutcome.DAMAGED
        return ReadOutcome.ERROR

    def _check(self, answers: Sequence[Reply | Failure]) -> None:
        if set(map(type, answers)) <= {int}:
            return
        for answer in answers:
            if isinstance(answer, ErrorReply):
                raise TierError(f"the redis tier: a server answered {answer.code}; {hint(answer) or answer.text[:80]}")
            if isinstance(answer, ChannelError):
                raise TierError(f"the redis tier: {answer}") from answer
        raise TierError("the redis tier: a server answered with no number")
