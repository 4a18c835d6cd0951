"""What a request, or one block of it, came to: the values of `messages`' codes and outcome bytes."""

from __future__ import annotations

__all__ = ["CommitOutcome", "DurableOutcome", "FailureCode", "PublishOutcome", "ReserveOutcome", "StageOutcome"]


class FailureCode:
    """Why a request, or the connection, came to nothing."""

    PROTOCOL = "protocol"
    """What came is no message, or not at this time. The connection ends."""
    VERSION = "version"
    """No version of the protocol in common. The connection ends."""
    DENIED = "denied"
    """Not with this credential. The connection ends."""
    BUSY = "busy"
    """Too many clients, or too many requests without an answer. The connection ends."""
    CLOSING = "closing"
    """The server is going down. The connection ends."""
    CANCELLED = "cancelled"
    """As asked."""
    INVALID = "invalid"
    """The request cannot be met, whoever asks: an unknown handle or tier, a block that fits nowhere."""
    FAILED = "failed"
    """The server could not do it; its log says more."""


class ReserveOutcome:
    """Of one block, in `Reserved.outcomes`."""

    RESERVED = 0
    ALREADY_STORED = 1
    BEING_STORED = 2
    """Another client fills it: ask again."""
    FULL = 3
    """There is no room for it now, or the client holds as much as it may."""


class CommitOutcome:
    """Of one block, in `Committed.outcomes`."""

    STORED = 0
    """A stage finds it now."""
    VOID = 1
    """A reset came first, or its time was over: it is not findable."""


class PublishOutcome:
    """Of one block, in `Published.outcomes`."""

    STORED = 0
    """A stage finds it now, and the client holds a lease of it."""
    ALREADY_STORED = 1
    """Host memory holds this block: the slot stays as it was granted."""
    BEING_STORED = 2
    """Another client fills it; the slot stays as it was granted."""
    FULL = 3
    """A quota leaves no room for it; the slot stays as it was granted."""
    VOID = 4
    """No slot for blocks of this length is granted under this number."""


class StageOutcome:
    """Of one block, in `Staged.outcomes`."""

    OK = 0
    MISS = 1
    """No tier holds it, or with another length."""
    DAMAGED = 2
    ERROR = 3
    """A tier failed."""
    REFUSED = 4
    """A tier is sick, the block is too far behind the others, or the client holds as much as it may."""
    TIMEOUT = 5
    """It was not there in time. With no time given: a lower tier holds it."""
    FULL = 6
    """There was no slot for it."""


class DurableOutcome:
    """Of one block, in `Durable.lost`."""

    DURABLE = 0
    """It is in the tier."""
    LOST = 1
    """It is not, and is not on its way there."""
    LATE = 2
    """It was still on its way when the time was over."""
