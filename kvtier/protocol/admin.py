"""What an operator's command and kvtier-server say to each other on the admin socket. See docs/protocol.md.

Frames are those of `wire`, without payload; a message is an array as in `messages`, of types that only this socket
has: who knocks at the wrong one is told so. The first message is Greet. Then one request at a time: its answers come
one behind the other, as many as there is something to say, each bounded, and Ended or Failed is the last. Progress may
stand between them. Closing the connection ends what is under way.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.keys import DIGEST_BYTES, NAMESPACE_BYTES
from kvtier.protocol.fields import (
    MAX_BLOCKS,
    Id,
    NamespaceDigest,
    RequestName,
    ShortText,
    Size,
    Text,
    TierCounts,
    TierNames,
    Versions,
    WaitMs,
    check_counts,
    check_digests,
)
from kvtier.protocol.messages import Failed

__all__ = [
    "ADMIN_VERSIONS",
    "MAX_ADMIN_BYTES",
    "MAX_DOCUMENT_BYTES",
    "AdminAnswer",
    "AdminRequest",
    "AskBlocks",
    "AskDecisions",
    "AskDrop",
    "AskFlush",
    "AskHealth",
    "AskNamespaces",
    "AskStatus",
    "AskVerify",
    "BlockRows",
    "Damage",
    "DecisionRow",
    "Dropped",
    "Ended",
    "Failed",
    "Flushed",
    "Greet",
    "Greeted",
    "Health",
    "Integrity",
    "NamespaceRow",
    "Progress",
    "StatusPart",
    "Verified",
]

ADMIN_VERSIONS = (1,)
"""Of these messages, that this kvtier speaks; the latest last."""
MAX_ADMIN_BYTES = 1 << 12
"""Of a request."""
MAX_DOCUMENT_BYTES = 1 << 19
"""Of one part of the status."""

Document = Annotated[bytes, Meta(max_length=MAX_DOCUMENT_BYTES)]
Limit = Annotated[int, Meta(ge=1, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0)]
SomeNamespace = Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)]
SomeKey = Annotated[bytes, Meta(max_length=NAMESPACE_BYTES + DIGEST_BYTES)]
RowDigests = Annotated[bytes, Meta(max_length=MAX_BLOCKS * DIGEST_BYTES)]
Lengths = Annotated[list[Size], Meta(max_length=MAX_BLOCKS)]


def _check_namespace(namespace: bytes) -> None:
    if len(namespace) not in (0, NAMESPACE_BYTES):
        raise ValueError(f"`namespace` of {len(namespace)} bytes: {NAMESPACE_BYTES}, or 0 for all")


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """id: names a request; its answers have the same. tenant: empty for all. tier: `host`, `disk` and so on."""


# ---- what an operator's command says ---------------------------------------------------------------------------------


class Greet(_Message, tag=128, frozen=True):
    """The first message. versions: of these messages, that the command speaks. Answered by Greeted."""

    versions: Versions
    software: ShortText


class AskHealth(_Message, tag=129, frozen=True):
    """Answered by Health."""

    id: Id


class AskStatus(_Message, tag=130, frozen=True):
    """Answered by StatusPart: the daemon's own, then each tenant's."""

    id: Id
    tenant: ShortText = ""


class AskNamespaces(_Message, tag=131, frozen=True):
    """Answered by NamespaceRow: for each tenant what each tier holds of each namespace."""

    id: Id
    tenant: ShortText = ""


class AskBlocks(_Message, tag=132, frozen=True):
    """Answered by BlockRows, of `limit` blocks at most. namespace: of these alone, or empty."""

    id: Id
    limit: Limit
    tenant: ShortText = ""
    tier: ShortText = ""
    namespace: SomeNamespace = b""

    def __post_init__(self) -> None:
        _check_namespace(self.namespace)


class AskFlush(_Message, tag=133, frozen=True):
    """Write what is due below host memory, and wait for it, `max_wait_ms` in all. Answered by Flushed for each lower
    tier. tier: that one alone."""

    id: Id
    max_wait_ms: WaitMs
    tenant: ShortText = ""
    tier: ShortText = ""


class AskDrop(_Message, tag=134, frozen=True):
    """Forget every block, in every tier, and begin a new epoch. Answered by Dropped for each tenant."""

    id: Id
    tenant: ShortText = ""


class AskVerify(_Message, tag=135, frozen=True):
    """Compare blocks with their checksums and forget those that differ. Answered by Damage for each of these, Verified
    for each tier, and, where `integrity` asks for it, Integrity for each tenant and the daemon."""

    id: Id
    integrity: bool
    tenant: ShortText = ""
    tier: ShortText = ""


class AskDecisions(_Message, tag=136, frozen=True):
    """What was decided of requests with this name, of late. Answered by DecisionRow for each, oldest first."""

    id: Id
    request: RequestName
    tenant: ShortText = ""


# ---- what the daemon says --------------------------------------------------------------------------------------------


class Greeted(_Message, tag=160, frozen=True):
    """version: of these messages, from here on."""

    version: Size
    software: ShortText
    pid: Size


class Health(_Message, tag=161, frozen=True):
    """state: starting, serving, draining or closed. reason: why it is not ready, for people."""

    id: Id
    is_ready: bool
    state: ShortText
    reason: Text
    uptime_s: Seconds


class StatusPart(_Message, tag=162, frozen=True):
    """Of what `/status.json` has. document: JSON; of the daemon (`tenant` is empty) all but its `tenants`, else one of
    these."""

    id: Id
    tenant: ShortText
    document: Document


class NamespaceRow(_Message, tag=163, frozen=True):
    """namespace: its digest; empty where the tier cannot tell whose blocks it holds. nbytes: in host memory of blocks,
    below of what they take there."""

    id: Id
    tenant: ShortText
    tier: ShortText
    namespace: SomeNamespace
    blocks: Size
    nbytes: Size

    def __post_init__(self) -> None:
        _check_namespace(self.namespace)


class BlockRows(_Message, tag=164, frozen=True):
    """Blocks of one namespace in one tier. lengths: of each, in bytes."""

    id: Id
    tenant: ShortText
    tier: ShortText
    namespace: NamespaceDigest
    digests: RowDigests
    lengths: Lengths

    def __post_init__(self) -> None:
        check_digests(self.digests)
        check_counts(digests=len(self.digests) // DIGEST_BYTES, lengths=len(self.lengths))


class Flushed(_Message, tag=165, frozen=True):
    """blocks_left: that are due in this tier and were not written in time, or could not be."""

    id: Id
    tenant: ShortText
    tier: ShortText
    blocks_left: Size
    written: Size
    """Blocks written meanwhile."""


class Dropped(_Message, tag=166, frozen=True):
    """blocks: of host memory, that are forgotten. epoch: that began."""

    id: Id
    tenant: ShortText
    blocks: Size
    epoch: Size


class Damage(_Message, tag=167, frozen=True):
    """A block was not what its checksum says, and is forgotten. key: namespace digest and block digest."""

    id: Id
    tenant: ShortText
    tier: ShortText
    key: SomeKey
    problem: Text


class Verified(_Message, tag=168, frozen=True):
    """Of one tier. blocks, nbytes: that were compared, those of `damaged` blocks included. skipped: why it was not
    looked at, or empty."""

    id: Id
    tenant: ShortText
    tier: ShortText
    blocks: Size
    nbytes: Size
    damaged: Size
    skipped: Text


class Integrity(_Message, tag=169, frozen=True):
    """Whether what the daemon counts agrees. tenant: whose store, or empty for connections and quarantine. problem:
    what does not, or empty."""

    id: Id
    tenant: ShortText
    problem: Text


class Progress(_Message, tag=170, frozen=True):
    """Not at the end yet. done: blocks looked at, or written."""

    id: Id
    done: Size


class Ended(_Message, tag=171, frozen=True):
    """That was all. is_cut: a bound of the request left something out."""

    id: Id
    is_cut: bool


class DecisionRow(_Message, tag=172, frozen=True):
    """As a client told it by `Tell`, so many seconds ago. client: which one."""

    id: Id
    tenant: ShortText
    client: Text
    age_s: Seconds
    fate: ShortText
    asked: Size
    tiers: TierNames
    served: TierCounts
    reason: ShortText
    waited_for: ShortText
    waited_s: Seconds
    limit_s: Seconds

    def __post_init__(self) -> None:
        check_counts(tiers=len(self.tiers), served=len(self.served))


AdminRequest = Greet | AskHealth | AskStatus | AskNamespaces | AskBlocks | AskFlush | AskDrop | AskVerify | AskDecisions
AdminAnswer = (
    Greeted
    | Health
    | StatusPart
    | NamespaceRow
    | BlockRows
    | Flushed
    | Dropped
    | Damage
    | Verified
    | Integrity
    | Progress
    | Ended
    | DecisionRow
    | Failed
)
