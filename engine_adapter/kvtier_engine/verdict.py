"""What a step came to, and what is wrong when it came to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = ["SchedulerStats", "Stall", "Verdict"]


class Verdict(Enum):
    """What a step came to."""

    OK = "ok"
    """Tokens are to be computed."""
    IDLE = "idle"
    """No request is unfinished."""
    WAIT = "wait"
    """Nothing can be computed until something under way ends, or a wait's time is over."""
    STALL = "stall"
    """Requests are unfinished, nothing can be computed, nothing is under way and no time runs out: a bug, or blocks
    that are pinned for ever."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The state of a scheduler that can do nothing. Blocks: free + used + held = the pool's."""

    num_running: int
    num_waiting: int
    num_free: int
    num_used: int
    num_held: int
    """Blocks that nobody references, kept by pins alone."""
    request_id: str
    """Who runs and gets no block, else who has waited longest: failed when the next step stalls too."""
    num_needed: int
    """Blocks that it lacks."""
    holders: Mapping[str, int]
    """Who keeps blocks by pins, and how many."""

    def describe(self) -> str:
        holders = ", ".join(f"{count} by {holder}" for holder, count in sorted(self.holders.items()))
        total = self.num_free + self.num_used + self.num_held
        return (
            f"no progress is possible: {self.num_running} running, {self.num_waiting} waiting, {self.num_free} of "
            f"{total} blocks free, {self.num_used} used, {self.num_held} held; request {self.request_id!r} needs "
            f"{self.num_needed} more; pinned: {holders or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One moment of a scheduler. Counters run from its start."""

    running: int
    """Requests with a slot that compute."""
    restoring: int
    """Requests with a slot whose blocks are landing."""
    waiting: int
    """Requests without a slot: `waiting_for_place + waiting_for_stage`."""
    waiting_for_place: int
    """Of these, those that lack a slot or blocks."""
    waiting_for_stage: int
    """Of these, those whose blocks are on their way to host memory."""
    restore_capacity_waits: int
    """Of those that lack blocks, restores that were refused and whose bound runs."""
    blocks_free: int
    blocks_used: int
    blocks_held: int
    """Kept from reuse by copies alone."""
    preemptions: int
    """Times that a request lost its blocks to another."""
    stalls: int
    """Times that no progress was possible."""
