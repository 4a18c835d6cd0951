"""What a daemon answers its operator. Sans-I/O: a request in, answers out, a slice of the work between two of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError
from kvtier.lower import LowerTier
from kvtier.protocol.admin import (
    ADMIN_VERSIONS,
    MAX_DOCUMENT_BYTES,
    AdminAnswer,
    AdminRequest,
    AskBlocks,
    AskDecisions,
    AskDrop,
    AskFlush,
    AskHealth,
    AskNamespaces,
    AskStatus,
    AskVerify,
    BlockRows,
    DecisionRow,
    Dropped,
    Ended,
    Failed,
    Flushed,
    Greet,
    Greeted,
    Health,
    NamespaceRow,
    Progress,
    StatusPart,
)
from kvtier.protocol.messages import FailureCode
from kvtier.server.inventory import HOST, block_slices, count_namespaces
from kvtier.server.status import Watched, status_document
from kvtier.server.tenants import Tenant
from kvtier.server.verifying import check_integrity, verify_host, verify_lower

__all__ = ["Administered", "Operations"]

FLUSH_SLICE_S = 0.5
"""After which a flush looks whether anyone still waits for it."""
MAX_TEXT = 1024

Answers = Generator[AdminAnswer | None, None, None]
"""None: a slice is done, and there is nothing to say of it."""


class Administered(Watched, Protocol):
    """A daemon as its operator needs it. Called from threads of their own, several at once."""

    @property
    def tenants(self) -> Sequence[Tenant]:
        """Those whose stores are open."""

    def check_integrity(self) -> None:
        """Raises IntegrityError where connections and quarantine disagree with what they hold. Waits for the loop,
        and raises TimeoutError where that does not answer."""


class _RefusedError(Exception):
    """A request that cannot be met, whoever asks."""


class Operations:
    """Answers requests. A generator each: what it does until its next answer takes some milliseconds, but for waits
    that are named; one that is closed stops there. Several may run at once, on threads other than the loop's.

    Nothing that a message says is run, and the only text taken from one is compared with names.
    """

    def __init__(self, daemon: Administered) -> None:
        self._daemon = daemon
        self._makers: dict[type, Callable[..., Answers]] = {
            AskHealth: self._health,
            AskStatus: self._status,
            AskNamespaces: self._namespaces,
            AskBlocks: self._blocks,
            AskFlush: self._flush,
            AskDrop: self._drop,
            AskVerify: self._verify,
            AskDecisions: self._decisions,
        }

    def greet(self, request: AdminRequest) -> Greeted | Failed:
        """The answer to a connection's first message; Failed is the connection's end."""
        if not isinstance(request, Greet):
            return Failed(0, FailureCode.PROTOCOL, f"{type(request).__name__} came before Greet")
        common = set(request.versions) & set(ADMIN_VERSIONS)
        if not common:
            return Failed(
                0,
                FailureCode.VERSION,
                f"this kvtier-server {__version__} speaks version {_listed(ADMIN_VERSIONS)} of the admin messages, and "
                f"{request.software} speaks {_listed(request.versions)}: use the kvtier of the daemon's version",
            )
        return Greeted(max(common), f"kvtier {__version__}", os.getpid())

    def answers(self, request: AdminRequest) -> Answers:
        """The answers to what was asked after Greet, Ended or Failed the last."""
        make = self._makers.get(type(request))
        if make is None:
            yield Failed(0, FailureCode.PROTOCOL, f"{type(request).__name__} came in the middle of a connection")
            return
        assert not isinstance(request, Greet)
        try:
            yield from make(request)
        except _RefusedError as refusal:
            yield Failed(request.id, FailureCode.INVALID, str(refusal)[:MAX_TEXT])
        except KVTierError as error:  # such as a store that is closing, or a reset that a tier could not remember
            yield Failed(request.id, FailureCode.FAILED, str(error)[:MAX_TEXT])

    # ---- how it is

    def _health(self, request: AskHealth) -> Answers:
        now = self._daemon.snapshot()
        reason = "" if self._daemon.is_ready else now.reason or now.state
        yield Health(request.id, self._daemon.is_ready, now.state, reason[:MAX_TEXT], max(0.0, now.uptime_s))
        yield Ended(request.id, is_cut=False)

    def _status(self, request: AskStatus) -> Answers:
        document = status_document(self._daemon.snapshot())
        tenants = document.pop("tenants")
        names = [tenant["name"] for tenant in tenants]
        if request.tenant and request.tenant not in names:
            raise _no_tenant(request.tenant, names)
        document["problems"] = [each for each in document["problems"] if request.tenant in ("", each["tenant"])]
        yield StatusPart(request.id, "", _encoded(document))
        for tenant in tenants:
            if request.tenant in ("", tenant["name"]):
                yield StatusPart(request.id, tenant["name"], _encoded(tenant))
        yield Ended(request.id, is_cut=False)

    def _decisions(self, request: AskDecisions) -> Answers:
        for tenant in self._named(request.tenant):
            for past in tenant.store.decisions.find(request.request):
                decision, age_s = past.decision, max(0.0, tenant.store.clock.now() - past.at_s)
                yield DecisionRow(
                    request.id,
                    tenant.name,
                    past.client[:MAX_TEXT],
                    age_s,
                    decision.fate,
                    decision.asked,
                    list(decision.served),
                    list(decision.served.values()),
                    decision.reason,
                    decision.tier,
                    decision.waited_s,
                    decision.limit_s,
                )
        yield Ended(request.id, is_cut=False)

    # ---- what it holds

    def _namespaces(self, request: AskNamespaces) -> Answers:
        for tenant in self._named(request.tenant):
            for count in count_namespaces(tenant.store):
                yield None if count is None else NamespaceRow(request.id, tenant.name, *count)
        yield Ended(request.id, is_cut=False)

    def _blocks(self, request: AskBlocks) -> Answers:
        left = request.limit
        is_cut = False
        for tenant in self._named(request.tenant):
            _check_tier(tenant, request.tier)
            for tier, namespace, rows in block_slices(tenant.store, request.tier, request.namespace):
                is_cut = len(rows) > left
                part = rows[:left]
                left -= len(part)
                if part:
                    digests = b"".join(digest for digest, _ in part)
                    lengths = [length for _, length in part]
                    yield BlockRows(request.id, tenant.name, tier, namespace, digests, lengths)
                yield None
                if is_cut:
                    break
            if is_cut:
                break
        yield Ended(request.id, is_cut=is_cut)

    # ---- what it is to do

    def _flush(self, request: AskFlush) -> Answers:
        """Waits in slices of FLUSH_SLICE_S."""
        clock_left = request.max_wait_ms / 1000
        for tenant in self._named(request.tenant):
            clock = tenant.store.clock
            for lower in self._lower(tenant, request.tier):
                before = lower.write_behind.ledger.snapshot().stored
                while True:
                    begun_at, wait_s = clock.now(), min(FLUSH_SLICE_S, max(0.0, clock_left))
                    left = lower.flush(wait_s)
                    took_s = max(0.0, clock.now() - begun_at)
                    clock_left -= took_s
                    written = lower.write_behind.ledger.snapshot().stored - before
                    if not left or clock_left <= 0 or took_s < wait_s:  # in less time: nothing is left to wait for
                        break
                    yield Progress(request.id, written)
                yield Flushed(request.id, tenant.name, lower.name, left, written)
        yield Ended(request.id, is_cut=False)

    def _drop(self, request: AskDrop) -> Answers:
        """Waits for lower tiers to remember it, as `Store.reset` does."""
        for tenant in self._named(request.tenant):
            forgotten = tenant.store.reset()
            yield Dropped(request.id, tenant.name, forgotten, tenant.store.epoch)
        yield Ended(request.id, is_cut=False)

    def _verify(self, request: AskVerify) -> Answers:
        for tenant in self._named(request.tenant):
            _check_tier(tenant, request.tier)
            if request.tier in ("", HOST):
                yield from verify_host(request.id, tenant.name, tenant.store)
            for lower in tenant.store.lower:
                if request.tier in ("", lower.name):
                    yield from verify_lower(request.id, tenant.name, lower)
            if request.integrity:
                yield check_integrity(request.id, tenant.name, tenant.store.check_integrity)
        if request.integrity:
            yield check_integrity(request.id, "", self._daemon.check_integrity)
        yield Ended(request.id, is_cut=False)

    # ---- names

    def _named(self, name: str) -> Sequence[Tenant]:
        tenants = self._daemon.tenants
        found = [tenant for tenant in tenants if name in ("", tenant.name)]
        if name and not found:
            raise _no_tenant(name, [tenant.name for tenant in tenants])
        return found

    @staticmethod
    def _lower(tenant: Tenant, tier: str) -> Sequence[LowerTier]:
        if tier == HOST:
            raise _RefusedError("blocks are written from host memory to the tiers below it: name one of those, or none")
        _check_tier(tenant, tier)
        return [lower for lower in tenant.store.lower if tier in ("", lower.name)]


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))


def _no_tenant(name: str, names: Sequence[str]) -> _RefusedError:
    return _RefusedError(f"there is no tenant {name!r}; there are: {', '.join(names) or 'none yet'}")


def _check_tier(tenant: Tenant, tier: str) -> None:
    if tier not in ("", HOST):
        try:
            tenant.store.tier(tier)
        except ConfigError as error:
            raise _RefusedError(f"tenant {tenant.name!r}: {error}") from None


def _encoded(document: object) -> bytes:
    data = json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _RefusedError(
            f"a part of the status takes {len(data)} bytes, over {MAX_DOCUMENT_BYTES}: ask /status.json"
        )
    return data
