"""Why a block was not served or not stored: every miss and every drop carries one of these."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DropReason", "MissReason"]


class MissReason(StrEnum):
    """Why a block of a prompt was not restored. The values are metric labels: stable, lower case."""

    ABSENT = "absent"
    """No tier holds it, and none is known to have held it lately."""
    EVICTED = "evicted"
    """A tier held it and gave its room to another block: the tier is too small for this traffic."""
    BEING_STORED = "being_stored"
    """Its copy down has not ended yet."""
    RESTORE_OFF = "restore_off"
    """Restoring is switched off, by setting or for this request."""
    NO_ROOM = "no_room"
    """The engine had no GPU blocks for it when it was asked for."""
    LAND_FAILED = "land_failed"
    """The copy up failed, or its slot was no longer the block's: the engine recomputes."""
    TIER_ERROR = "tier_error"
    """The store raised, or a lower tier failed to read it; the error is logged and counted by type."""
    RESET = "reset"
    """The cache was reset while the request ran: its KV is of before, what is stored of after."""
    TIMEOUT = "timeout"
    """A lower tier had not brought it to host memory when the request's wait was over."""
    DAMAGED = "damaged"
    """What a lower tier held was not what had been written; it is forgotten there."""
    TIER_DOWN = "tier_down"
    """The lower tier that holds it is sick; it is asked again after a pause."""
    NOT_STAGED = "not_staged"
    """A lower tier holds it, and was not asked to bring it: it came there after the request did, the request waits for
    nothing, or its prompt is more than half of host memory."""
    HOST_FULL = "host_full"
    """Every slot of the host pool was leased, so that it could not be staged."""
    BACKLOG = "backlog"
    """More was to be read from the lower tier than its queue takes."""
    LIMIT = "limit"
    """The request's `max_restore_tokens` was used up before it."""


class DropReason(StrEnum):
    """Why a due block was not stored. The values are metric labels: stable, lower case."""

    HOST_FULL = "host_full"
    """Nothing in the host pool could be evicted for it: every slot is leased."""
    ALREADY_STORED = "already_stored"
    """Another store of the same key came first; its bytes are as good."""
    ORPHAN = "orphan"
    """An ancestor is in no tier and no longer in the GPU pool, so no prompt could ever reach it."""
    OVERTAKEN = "overtaken"
    """The engine reused the GPU block before its copy began."""
    BACKLOG = "backlog"
    """The transfer queue, or the lower tier's, was full."""
    COPY_FAILED = "copy_failed"
    """The copy down raised."""
    RESET = "reset"
    """The cache was reset while the copy was under way."""
    CLOSED = "closed"
    """The connector or store was closed first."""
    TIER_ERROR = "tier_error"
    """The store raised, or the lower tier failed; the error is logged and counted by type."""
    TIER_FULL = "tier_full"
    """The lower tier could make no room: its file system is full, or every segment is being read."""
    TIER_DOWN = "tier_down"
    """The lower tier is sick; it is tried again after a pause."""
    EVICTED = "evicted"
    """It left host memory before it was written down."""
