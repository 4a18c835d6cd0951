"""What a client that has said who it is may ask for, message by message."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from kvtier.decisions import Decision
from kvtier.errors import ConfigError, ProtocolError
from kvtier.keys import DIGEST_BYTES, BlockDigest, make_key
from kvtier.protocol import messages
from kvtier.protocol.messages import (
    ClientMessage,
    CommitOutcome,
    Committed,
    Done,
    Failed,
    FailureCode,
    Granted,
    Pong,
    Published,
    PublishOutcome,
    Reserved,
    ServerMessage,
    StatsAnswer,
)
from kvtier.protocol.wire import MAX_PAYLOAD_BYTES
from kvtier.server.hub import Hub
from kvtier.server.requests import (
    MAX_EPOCH,
    Answer,
    DurabilityRequest,
    LookupRequest,
    RemovalRequest,
    Request,
    ResetRequest,
    held_answer,
    held_tiers,
)
from kvtier.server.slots import Slots
from kvtier.server.stages import StageRequest
from kvtier.server.stats import tenant_stats
from kvtier.server.tenants import Tenant

__all__ = ["Dialogue", "Send"]

logger = logging.getLogger("kvtier.server")

MAX_TEXT = 1000
NO_PARENT = bytes(DIGEST_BYTES)

Send = Callable[[ServerMessage, Sequence[memoryview], int | None], None]
"""Queues a message: with it the payload that follows it on the connection, block by block, and a descriptor to go with
it (of Welcome only). Never blocks and never calls the session. The views are of slots: they may be read until the
session is told by `payload_sent` that it may let go of them, or has ended."""


@lru_cache(maxsize=64)
def _splitter(number: int) -> struct.Struct:
    return struct.Struct(f"{DIGEST_BYTES}s" * number)


def _split(joined: bytes) -> Sequence[BlockDigest]:
    """Digests that stand one behind the other."""
    return _splitter(len(joined) // DIGEST_BYTES).unpack(joined)


def _chained(digests: bytes, parents: bytes) -> list[tuple[BlockDigest, BlockDigest | None]]:
    """Blocks, each with the one before it."""
    above = [None if parent == NO_PARENT else parent for parent in _split(parents)]
    return list(zip(_split(digests), above, strict=True))


class Dialogue:
    """One client's requests, its slots, and the answers. Loop's thread; nothing blocks.

    Whatever `handle` raises, nothing was done: ConfigError and LayoutError for a request that cannot be met,
    ProtocolError for one after which the connection makes no sense.

    Mutable state: the requests without an answer, and the Commit whose payload is on its way.
    """

    def __init__(self, hub: Hub, tenant: Tenant, slots: Slots, name: str, send: Send, *, is_mapped: bool) -> None:
        """slots: this object's from now on. name: the client's, for messages."""
        self.tenant = tenant
        self.slots = slots
        self.is_mapped = is_mapped
        self._hub = hub
        self._settings = hub.settings
        self._clock = hub.clock
        self._name = name
        self._send = send
        self._requests: dict[int, Request] = {}
        self.payload: messages.Commit | None = None
        """Whose payload is on its way."""

    @property
    def num_requests(self) -> int:
        """Without an answer."""
        return len(self._requests) + (self.payload is not None)

    @property
    def must_poll(self) -> bool:
        return bool(self._requests or self.slots.num_filling)

    @property
    def max_payload_bytes(self) -> int:
        """Of one message."""
        return min(self.tenant.max_payload_bytes, MAX_PAYLOAD_BYTES)

    def is_free_for(self, number: int, max_requests: int) -> bool:
        """Whether a message with this id may come now, for all that came before it."""
        return self.payload is None and number not in self._requests and len(self._requests) < max_requests

    def is_unanswered(self, number: int) -> bool:
        return number in self._requests

    def waits(self) -> Iterator[float]:
        """Since when each stage has waited for a lower tier. Any thread."""
        for request in list(self._requests.values()):
            if (since := request.waits_since) is not None:
                yield since

    def handle(self, message: ClientMessage, payload_bytes: int) -> Sequence[memoryview] | None:
        """As `Session.handle`, of any message but Hello and Bye."""
        tenant, slots = self.tenant, self.slots
        match message:
            case messages.Commit():
                return self._commit(message, payload_bytes, slots)
            case messages.Lookup():
                self._lookup(message, tenant)
            case messages.Reserve():
                self._reserve(message, slots)
            case messages.Stage():
                self._stage(message, tenant, slots)
            case messages.Grant():
                self._grant(message, slots)
            case messages.Publish():
                self._publish(message, slots)
            case messages.Release():
                slots.release(message.leases)
                self._done(message.id, slots, message.leases)
            case messages.Abort():
                slots.abort(message.reservations)
                self._done(message.id, slots, message.reservations)
            case messages.Ping():
                self._answer(Pong(message.id))
            case messages.Touch():
                self._touch(message, tenant)
            case _:
                self._handle_rare(message, tenant)
        return None

    def payload_end(self) -> None:
        """The payload that `handle` gave memory for is whole."""
        message, self.payload = self.payload, None
        self.slots.receiving = ()
        if message is not None:
            self._commit_now(message, self.slots)

    def poll(self) -> int:
        """Answer what ended, void what is overdue; how many slots were."""
        for request in list(self._requests.values()):
            self._poll_request(request)
        return self.slots.void(self._clock.now() - self._settings.reservation_s) if self.slots.num_filling else 0

    def drop_requests(self) -> None:
        """Nobody wants an answer any more."""
        self.payload = None
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.close()

    def fail(self, number: int, code: str, text: str) -> None:
        """Answer a request in this way; one that wants no answer goes to the log."""
        if number:
            self._send(Failed(number, code, text[:MAX_TEXT]), (), None)
        else:
            logger.info("%s: %s", self._name, text)

    # ---- message by message --------------------------------------------------------------------------------------

    def _handle_rare(self, message: ClientMessage, tenant: Tenant) -> None:
        hub = self._hub
        match message:
            case messages.Cancel():
                self._cancel(message.target)
            case messages.Tell():
                self._tell(message, tenant)
            case messages.Remove():
                digests = _split(message.digests)
                self._begin(RemovalRequest(message.id, tenant, hub.wake, self._clock, message.namespace, digests))
            case messages.WaitDurable():
                lower = tenant.store.tier(message.tier)
                keys = [make_key(message.namespace, digest) for digest in _split(message.digests)]
                self._begin(DurabilityRequest(message.id, lower, keys, message.max_wait_ms / 1000, self._clock))
            case messages.StartEpoch():
                if message.epoch > MAX_EPOCH:
                    raise ConfigError(f"an epoch is {MAX_EPOCH} at most, not {message.epoch}")
                self._begin(ResetRequest(message.id, tenant, hub.wake, message.epoch))
            case messages.Stats():
                counts = hub.client_counts(tenant.name)
                stats = tenant_stats(tenant.store, counts, hub.quarantine.counts(tenant.name))
                self._answer(StatsAnswer(message.id, stats))
            case _:
                raise AssertionError(f"{type(message).__name__} has no handler")

    def _lookup(self, message: messages.Lookup, tenant: Tenant) -> None:
        digests = _split(message.digests)
        held = held_tiers(tenant, message.namespace, digests)
        if 0 in held and any(lower.is_remote and lower.is_available for lower in tenant.store.lower):
            self._begin(LookupRequest(message.id, tenant, message.namespace, digests, self._clock))
        else:
            self._answer(held_answer(message.id, tenant, held))

    def _reserve(self, message: messages.Reserve, slots: Slots) -> None:
        given = slots.reserve(
            message.namespace,
            _chained(message.digests, message.parents),
            message.block_bytes,
            message.ttl_ms / 1000 or None,
            self._clock.now(),
        )
        self._answer(Reserved(message.id, *given))

    def _commit(self, message: messages.Commit, payload_bytes: int, slots: Slots) -> Sequence[memoryview] | None:
        handles = message.reservations
        self._check_given(handles, slots)
        if self.is_mapped or not handles:
            self._commit_now(message, slots)
            return None
        targets = slots.targets(handles)
        if targets is None:  # of some it is not known any more how long they are: none of the payload can be placed
            slots.abort(handles)
            self._answer(Committed(message.id, bytes([CommitOutcome.VOID]) * len(handles)))
            return None
        wanted = sum(map(len, targets))
        if wanted != payload_bytes:
            raise ProtocolError(f"{payload_bytes} bytes follow Commit {message.id}, whose blocks have {wanted}")
        self.payload = message
        slots.receiving = handles
        return targets

    def _commit_now(self, message: messages.Commit, slots: Slots) -> None:
        outcomes, nbytes = slots.commit(message.reservations, message.checksums if self._settings.checksums else None)
        self._count_stored(outcomes.count(CommitOutcome.STORED), nbytes)
        self._answer(Committed(message.id, outcomes))

    def _grant(self, message: messages.Grant, slots: Slots) -> None:
        if not self.is_mapped:
            raise ConfigError("without a mapping no slot can be filled in place: reserve, then commit")
        self._answer(Granted(message.id, *slots.grant(message.block_bytes, message.number)))

    def _publish(self, message: messages.Publish, slots: Slots) -> None:
        if not self.is_mapped:
            raise ConfigError("without a mapping no slot is granted, and none can be published")
        self._check_given(message.reservations, slots)
        outcomes, nbytes = slots.publish(
            message.namespace,
            _chained(message.digests, message.parents),
            message.block_bytes,
            message.reservations,
            message.checksums if self._settings.checksums else None,
            message.ttl_ms / 1000 or None,
        )
        self._count_stored(outcomes.count(PublishOutcome.STORED), nbytes)
        self._answer(Published(message.id, outcomes))

    def _stage(self, message: messages.Stage, tenant: Tenant, slots: Slots) -> None:
        digests = _split(message.digests)
        if len(set(digests)) != len(digests):
            raise ConfigError("a block is named twice: ask for it once")
        if not (message.inline or self.is_mapped):
            raise ConfigError("without a mapping blocks are sent: ask for them inline")
        if message.inline and len(digests) * message.block_bytes > self.max_payload_bytes:
            raise ConfigError(
                f"{len(digests)} blocks of {message.block_bytes} bytes are more than the {self.max_payload_bytes} "
                f"bytes of one payload: ask for fewer at once"
            )
        self._begin(StageRequest(message, digests, tenant, slots, self._clock))

    def _touch(self, message: messages.Touch, tenant: Tenant) -> None:
        if tenant.store.lower:
            digests = _split(message.digests)
            for lower in tenant.store.lower:
                lower.note_use(message.namespace, digests, BlockDigest(message.parent) if message.parent else None)

    def _tell(self, message: messages.Tell, tenant: Tenant) -> None:
        served = dict(zip(message.tiers, message.served, strict=True))
        waited_s, limit_s = message.waited_ms / 1000, message.limit_ms / 1000
        decision = Decision(
            message.request, message.fate, message.asked, served, message.reason, message.tier, waited_s, limit_s
        )
        tenant.store.decisions.note(decision, self._name)

    def _done(self, number: int, slots: Slots, handles: Sequence[int]) -> None:
        if number and slots.was_given(handles):
            self._answer(Done(number))
        elif number:
            self.fail(number, FailureCode.INVALID, "handles that were never given; the others are let go of")

    def _cancel(self, target: int) -> None:
        request = self._requests.get(target)
        if request is not None and request.cancel():
            del self._requests[target]
            self._answer(Failed(target, FailureCode.CANCELLED, "as the client asked"))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self._requests[request.id] = request
        self._poll_request(request)

    def _poll_request(self, request: Request) -> None:
        try:
            answer = request.poll()
        except Exception:
            logger.exception("%s: a %s failed", self._name, type(request).__name__)
            request.close()
            answer = Answer(Failed(request.id, FailureCode.FAILED, "the server could not do it; its log says more"))
        if answer is not None:
            del self._requests[request.id]
            self._send(answer.message, answer.payload, None)

    @staticmethod
    def _check_given(handles: Sequence[int], slots: Slots) -> None:
        if not slots.was_given(handles) or len(set(handles)) != len(handles):
            raise ConfigError("reservations that were never given, or one of them twice")

    def _count_stored(self, blocks: int, nbytes: int) -> None:
        counters = self.tenant.store.counters
        with counters.lock:
            counters.stored_blocks += blocks
            counters.stored_bytes += nbytes

    def _answer(self, message: ServerMessage) -> None:
        self._send(message, (), None)
