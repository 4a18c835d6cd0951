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
    """The store raised; the error is logged and counted by type."""
    RESET = "reset"
    """The cache was reset while the request ran: its KV is of before, what is stored of after."""


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
    """The transfer queue was full."""
    COPY_FAILED = "copy_failed"
    """The copy down raised."""
    RESET = "reset"
    """The cache was reset while the copy was under way."""
    CLOSED = "closed"
    """The connector or store was closed first."""
    TIER_ERROR = "tier_error"
    """The store raised; the error is logged and counted by type."""
