"""Requests of one connection that are answered later: polled, never awaited."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from kvtier.clock import Clock
from kvtier.durability import Durability
from kvtier.errors import TierError
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.lower import LowerTier
from kvtier.membership import Question
from kvtier.protocol.messages import Count, Durable, Epoch, Failed, FailureCode, Held, ServerMessage
from kvtier.server.tenants import Tenant
from kvtier.tickets import Ticket

__all__ = ["Answer", "DurabilityRequest", "LookupRequest", "RemovalRequest", "Request", "ResetRequest", "held_tiers"]

logger = logging.getLogger("kvtier.server")

LOOKUP_WAIT_S = 0.25
"""For remote tiers' answers to a lookup: then it is answered with what is known."""
REMOVAL_WAIT_S = 10.0
"""For every tier to forget blocks."""
MAX_EPOCH = (1 << 32) - 2
"""Part of every namespace's digest, as 32 bits."""
ASKED_BYTES = 1
"""Length of the blocks of a lookup, which does not say: how many are asked for at once depends on it."""


class Answer(NamedTuple):
    """What ends a request, and the blocks that follow it."""

    message: ServerMessage
    payload: Sequence[memoryview] = ()


class Request(ABC):
    """One that has no answer yet. Loop's thread; nothing blocks."""

    def __init__(self, number: int) -> None:
        self.id = number

    @property
    def waits_since(self) -> float | None:
        """Since when it has waited for a lower tier to bring blocks; None for what does not."""
        return None

    @abstractmethod
    def poll(self) -> Answer | None:
        """The answer, once there is one; called no more then."""

    def cancel(self) -> bool:
        """Give it up; False where it goes on, since it cannot be."""
        return False

    def close(self) -> None:
        """Nobody wants the answer any more: let go of everything."""
        self.cancel()


def held_tiers(tenant: Tenant, namespace: bytes, digests: Sequence[bytes]) -> bytes:
    """Of each block a byte as in `Held.tiers`, from memory."""
    store = tenant.store
    held = store.host.committed(namespace, digests)
    if not store.lower or 0 not in held:
        return held
    tiers = bytearray(held)
    for place, lower in enumerate(store.lower):
        missing = [index for index, tier in enumerate(tiers) if not tier]
        if missing and lower.is_available:
            # As `make_key` joins them, of lengths that were checked before: thousands at once.
            found = lower.held(cast("list[Key]", [namespace + digests[index] for index in missing]))
            for index, is_held in zip(missing, found, strict=True):
                if is_held:
                    tiers[index] = place + 2
    return bytes(tiers)


def held_answer(number: int, tenant: Tenant, tiers: bytes) -> Held:
    """What is not held is missed: a client asks for no more than it was told is here."""
    tenant.store.counters.add_absent(len(tiers), tiers.count(0))
    return Held(number, tiers)


class LookupRequest(Request):
    """Which blocks are held, once the remote tiers have said what they know, or took too long to."""

    def __init__(
        self, number: int, tenant: Tenant, namespace: bytes, digests: Sequence[BlockDigest], clock: Clock
    ) -> None:
        super().__init__(number)
        self._tenant = tenant
        self._namespace = namespace
        self._digests = digests
        self._clock = clock
        self._begun_at = clock.now()
        self._tiers = held_tiers(tenant, namespace, digests)
        self._questions: Sequence[Question] = []
        if 0 in self._tiers and any(lower.is_remote and lower.is_available for lower in tenant.store.lower):
            stager = tenant.store.stager
            found = stager.locate(namespace, digests, ASKED_BYTES)
            self._questions = stager.ask(namespace, digests, ASKED_BYTES, found)

    def poll(self) -> Answer | None:
        waited_s = self._clock.now() - self._begun_at
        if 0 <= waited_s < LOOKUP_WAIT_S and not all(question.done for question in self._questions):
            return None
        if self._questions:
            self._tiers = held_tiers(self._tenant, self._namespace, self._digests)
        return Answer(held_answer(self.id, self._tenant, self._tiers))

    def cancel(self) -> bool:
        self._questions = []
        return True


class DurabilityRequest(Request):
    """Whether blocks are in a lower tier, once none is on its way there, or its time is over."""

    def __init__(self, number: int, lower: LowerTier, keys: Sequence[Key], max_wait_s: float, clock: Clock) -> None:
        super().__init__(number)
        self._watches = lower.write_behind.watches
        self._keys = keys
        self._clock = clock
        self._begun_at = clock.now()
        self._max_wait_s = max_wait_s
        self._ticket: Ticket[Durability] = lower.write_behind.watch(keys, lower.held)

    def poll(self) -> Answer | None:
        is_over = not 0 <= self._clock.now() - self._begun_at < self._max_wait_s
        known = self._ticket.poll()
        if known is None and not is_over:
            return None
        pending = self._watches.give_up(self._ticket)
        lost = self._ticket.poll()  # resolved by now, with what was known
        gone = set() if lost is None else lost.lost.keys()
        return Answer(Durable(self.id, bytes(2 if key in pending else int(key in gone) for key in self._keys)))

    def cancel(self) -> bool:
        self._watches.give_up(self._ticket)
        return True


class _Job(Request):
    """One that blocks, on the tenant's thread. It cannot be taken back: it is answered, whatever the client wants."""

    def __init__(self, number: int, tenant: Tenant, wake: Callable[[], None]) -> None:
        super().__init__(number)
        self._wake = wake
        self._result: Ticket[ServerMessage] = Ticket()
        if not tenant.executor.try_submit(self._run, urgent=False):
            self._result.resolve(Failed(number, FailureCode.FAILED, "too many resets and removals wait: try again"))

    def _run(self) -> None:
        try:
            self._result.resolve(self._do())
        except TierError as error:
            self._result.resolve(Failed(self.id, FailureCode.FAILED, str(error)[:1000]))
        except BaseException:
            logger.exception("a %s failed", type(self).__name__)
            self._result.resolve(Failed(self.id, FailureCode.FAILED, "the server could not do it; its log says more"))
        self._wake()

    @abstractmethod
    def _do(self) -> ServerMessage:
        """On the tenant's thread: may block."""

    def poll(self) -> Answer | None:
        message = self._result.poll()
        return None if message is None else Answer(message)


class ResetRequest(_Job):
    """A new epoch of the tenant's store."""

    def __init__(self, number: int, tenant: Tenant, wake: Callable[[], None], epoch: int) -> None:
        self._store = tenant.store
        self._epoch = epoch
        super().__init__(number, tenant, wake)

    def _do(self) -> ServerMessage:
        if self._store.epoch >= MAX_EPOCH:
            text = (
                f"no epoch is left behind {self._store.epoch}: stop the server, empty its lower tiers, start it again"
            )
            return Failed(self.id, FailureCode.INVALID, text)
        return Epoch(self.id, self._store.start_epoch(self._epoch))


class RemovalRequest(_Job):
    """Blocks forgotten in every tier. Each lower tier's own thread does it there; one that takes too long is waited
    for no longer, and forgets them when it comes to it."""

    def __init__(
        self,
        number: int,
        tenant: Tenant,
        wake: Callable[[], None],
        clock: Clock,
        namespace: bytes,
        digests: Sequence[BlockDigest],
    ) -> None:
        self._store = tenant.store
        self._clock = clock
        self._begun_at = clock.now()
        self._tenant = tenant
        self._namespace = namespace
        self._digests = digests
        self._lower: list[Ticket[int]] = []
        super().__init__(number, tenant, wake)

    def _do(self) -> ServerMessage:
        keys = [make_key(self._namespace, digest) for digest in self._digests]
        held = held_tiers(self._tenant, self._namespace, self._digests)
        num_host = self._store.host.remove(keys)
        for lower in self._store.lower:
            ticket: Ticket[int] = Ticket()
            if lower.is_available and lower.executor.try_submit(self._removal(lower, keys, ticket), urgent=True):
                self._lower.append(ticket)
        return Count(self.id, max(num_host, sum(map(bool, held))))

    def _removal(self, lower: LowerTier, keys: Sequence[Key], ticket: Ticket[int]) -> Callable[[], None]:
        def run() -> None:
            try:
                ticket.resolve(lower.tier.remove(keys))
            except BaseException:
                logger.exception("removing %d blocks from the %s tier failed", len(keys), lower.name)
                ticket.resolve(0)
            self._wake()

        return run

    def poll(self) -> Answer | None:
        answer = super().poll()
        if answer is None or not isinstance(answer.message, Count):
            return answer
        is_over = not 0 <= self._clock.now() - self._begun_at < REMOVAL_WAIT_S
        if not is_over and not all(ticket.done for ticket in self._lower):
            return None
        if any(not ticket.done for ticket in self._lower):
            text = f"a tier did not forget the blocks within {REMOVAL_WAIT_S:g} s; it does when it comes to it"
            return Answer(Failed(self.id, FailureCode.FAILED, text))
        number = max(answer.message.number, *(ticket.poll() or 0 for ticket in self._lower), 0)
        return Answer(Count(self.id, number))
