"""What a client and kvtier-server say to each other, message by message. See docs/protocol.md.

A message is a msgpack array: its type's number, then the fields in their order. Types and bounds of every field are
checked as it is decoded, and that lists of one message agree in their length; what has a field too many, too few or of
another type is no message. Whoever makes a message whose lists do not agree gets a ValueError. Digests travel as one
string of 32 bytes each, outcomes as one of a byte each: thousands of blocks are a few objects.
"""

from __future__ import annotations

from kvtier.protocol.fields import (
    MAX_BLOCKS,
    MAX_HELLO_BYTES,
    MAX_LOOKUP_BLOCKS,
    MAX_MESSAGE_BYTES,
    MAX_WAIT_MS,
    VERSIONS,
    AnyMessage,
    BlockBytes,
    Checksums,
    Credits,
    Digests,
    Handles,
    Id,
    IdOrNone,
    ManyDigests,
    ManyOutcomes,
    NamedCounts,
    NamespaceDigest,
    Offsets,
    Outcomes,
    Parent,
    ShortText,
    Size,
    Text,
    TierNames,
    Token,
    Versions,
    WaitMs,
    check_counts,
    check_digests,
    check_outcomes,
)
from kvtier.protocol.outcomes import (
    CommitOutcome,
    DurableOutcome,
    FailureCode,
    PublishOutcome,
    ReserveOutcome,
    StageOutcome,
)
from kvtier.protocol.storing import Abort, Commit, Committed, Grant, Granted, Publish, Published, Reserve, Reserved
from kvtier.protocol.telling import Tell

__all__ = [
    "MAX_BLOCKS",
    "MAX_HELLO_BYTES",
    "MAX_LOOKUP_BLOCKS",
    "MAX_MESSAGE_BYTES",
    "MAX_WAIT_MS",
    "VERSIONS",
    "Abort",
    "Bye",
    "Cancel",
    "ClientMessage",
    "Commit",
    "CommitOutcome",
    "Committed",
    "Count",
    "Done",
    "Durable",
    "DurableOutcome",
    "Epoch",
    "Failed",
    "FailureCode",
    "Grant",
    "Granted",
    "Held",
    "Hello",
    "Lookup",
    "Ping",
    "Pong",
    "Publish",
    "PublishOutcome",
    "Published",
    "Release",
    "Remove",
    "Reserve",
    "ReserveOutcome",
    "Reserved",
    "ServerMessage",
    "Stage",
    "StageOutcome",
    "Staged",
    "StartEpoch",
    "Stats",
    "StatsAnswer",
    "Tell",
    "Touch",
    "WaitDurable",
    "Welcome",
]


# ---- what a client says ----------------------------------------------------------------------------------------------


class Hello(AnyMessage, tag=1, frozen=True):
    """The first message. versions: of the protocol, that the client speaks. token: of its tenant, or empty.
    wants_mapping: to have the pool's memory, where the connection can carry a descriptor."""

    id: Id
    versions: Versions
    software: ShortText
    token: Token
    wants_mapping: bool

    def __repr__(self) -> str:
        token = "..." if self.token else ""
        return (
            f"Hello(id={self.id}, versions={self.versions}, software={self.software!r}, token={token!r}, "
            f"wants_mapping={self.wants_mapping})"
        )


class Ping(AnyMessage, tag=2, frozen=True):
    """Answered by Pong."""

    id: Id


class Lookup(AnyMessage, tag=3, frozen=True):
    """Which of these blocks are held. Changes nothing. Answered by Held. request: whose prompt it is, for people."""

    id: Id
    namespace: NamespaceDigest
    digests: ManyDigests
    request: ShortText = ""

    def __post_init__(self) -> None:
        check_digests(self.digests)


class Stage(AnyMessage, tag=7, frozen=True):
    """Blocks of `block_bytes` to be had: leased in the pool once they are in host memory, or sent. Answered by Staged.

    parent: of the first block, or empty. max_wait_ms: for blocks that come from lower tiers; what is not there by then
    is a miss. inline: to be sent as payload, and no lease; the only way without a mapping.
    """

    id: Id
    namespace: NamespaceDigest
    block_bytes: BlockBytes
    digests: Digests
    parent: Parent
    max_wait_ms: WaitMs
    inline: bool
    request: ShortText = ""

    def __post_init__(self) -> None:
        check_digests(self.digests, self.parent)


class Release(AnyMessage, tag=8, frozen=True):
    """Nothing reads these slots any more. Answered by Done, unless id is 0."""

    id: IdOrNone
    leases: Handles


class Cancel(AnyMessage, tag=9, frozen=True):
    """The answer to a request is not wanted any more: it is answered by Failed, or as if nothing were, if it is done.
    No answer of its own."""

    target: Id


class Remove(AnyMessage, tag=10, frozen=True):
    """Forget blocks, in every tier. Answered by Count."""

    id: Id
    namespace: NamespaceDigest
    digests: ManyDigests

    def __post_init__(self) -> None:
        check_digests(self.digests)


class Touch(AnyMessage, tag=11, frozen=True):
    """A prompt used these blocks, whoever served them. No answer."""

    namespace: NamespaceDigest
    digests: ManyDigests
    parent: Parent

    def __post_init__(self) -> None:
        check_digests(self.digests, self.parent)


class WaitDurable(AnyMessage, tag=12, frozen=True):
    """Whether blocks are safe in a lower tier, once none is on its way there. Answered by Durable."""

    id: Id
    namespace: NamespaceDigest
    digests: Digests
    tier: ShortText
    max_wait_ms: WaitMs

    def __post_init__(self) -> None:
        check_digests(self.digests)


class StartEpoch(AnyMessage, tag=13, frozen=True):
    """Forget every block of the tenant, in every tier, and remember the epoch. Answered by Epoch."""

    id: Id
    epoch: Size


class Stats(AnyMessage, tag=14, frozen=True):
    """Answered by StatsAnswer."""

    id: Id


class Bye(AnyMessage, tag=15, frozen=True):
    """The client reads and writes no slot any more, and says nothing more. No answer."""


# ---- what the server says --------------------------------------------------------------------------------------------


class Welcome(AnyMessage, tag=64, frozen=True):
    """version: of the protocol, from here on. mapping_bytes: of the memory whose descriptor comes with this message;
    0: none does. checksums: whether blocks are to be verified by theirs. credits: requests that may be without an
    answer at once. max_payload_bytes: of one message."""

    id: Id
    version: Size
    software: ShortText
    tenant: ShortText
    mapping_bytes: Size
    checksums: bool
    epoch: Size
    credits: Credits
    max_payload_bytes: Size
    capacity_bytes: Size
    tiers: TierNames
    """Below host memory, in the order in which they are asked."""


class Failed(AnyMessage, tag=65, frozen=True):
    """In place of an answer. id 0: of the connection, which ends. code: of FailureCode."""

    id: IdOrNone
    code: ShortText
    text: Text


class Pong(AnyMessage, tag=66, frozen=True):
    id: Id


class Held(AnyMessage, tag=67, frozen=True):
    """tiers: a byte a block: 0 not held, 1 in host memory, 2 and on: in the lower tier of Welcome at that number less
    2."""

    id: Id
    tiers: ManyOutcomes


class Staged(AnyMessage, tag=70, frozen=True):
    """outcomes: of StageOutcome, a byte a block. leases, offsets, checksums: of those that are OK, in their order;
    of blocks that follow as payload leases and offsets are empty."""

    id: Id
    outcomes: Outcomes
    leases: Handles
    offsets: Offsets
    checksums: Checksums

    def __post_init__(self) -> None:
        check_outcomes(self.outcomes, StageOutcome.FULL)
        check_counts(ok=self.outcomes.count(StageOutcome.OK), checksums=len(self.checksums))
        check_counts(leases=len(self.leases), offsets=len(self.offsets))
        if self.leases:
            check_counts(leases=len(self.leases), checksums=len(self.checksums))


class Done(AnyMessage, tag=71, frozen=True):
    id: Id


class Count(AnyMessage, tag=72, frozen=True):
    """number: blocks that were there."""

    id: Id
    number: Size


class Durable(AnyMessage, tag=73, frozen=True):
    """lost: of DurableOutcome, a byte a block."""

    id: Id
    lost: Outcomes

    def __post_init__(self) -> None:
        check_outcomes(self.lost, DurableOutcome.LATE)


class Epoch(AnyMessage, tag=74, frozen=True):
    """The epoch that the tenant is in now: that asked for, or a later one."""

    id: Id
    epoch: Size


class StatsAnswer(AnyMessage, tag=75, frozen=True):
    """stats: counts by name; see docs/protocol.md."""

    id: Id
    stats: NamedCounts


ClientMessage = (
    Hello
    | Ping
    | Lookup
    | Reserve
    | Commit
    | Abort
    | Stage
    | Release
    | Cancel
    | Remove
    | Touch
    | WaitDurable
    | StartEpoch
    | Stats
    | Bye
    | Tell
    | Grant
    | Publish
)
ServerMessage = (
    Welcome
    | Failed
    | Pong
    | Held
    | Reserved
    | Committed
    | Staged
    | Done
    | Count
    | Durable
    | Epoch
    | StatsAnswer
    | Granted
    | Published
)
