"""What a fault is, for whatever tier: how it begins and ends, and what it needs to stand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier_connectors.bench.ground import Ground, RedisKind, ServerKind

__all__ = ["NO_FAULT", "Change", "FaultCase"]

Change = Callable[[Ground], None]


def _nothing(ground: Ground) -> None:
    del ground


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A fault. needs_restart: it happens while no process has the tier open. is_endless: nothing ends it.

    tier: whose it is. lasts_s: how long it goes on beyond the traffic that meets it. is_met_again: the conversations
    from before it are asked for again and again meanwhile. on_small_disk: on a file system of its own with less room
    than the tier may take, where one can be mounted. redis, server: what Redis, and what kvtier-server it is done to;
    None: of no matter.
    """

    name: str
    injected: str
    begin: Change = _nothing
    end: Change = Ground.heal
    tier: str = "disk"
    needs_restart: bool = False
    is_endless: bool = False
    lasts_s: float = 0.0
    is_met_again: bool = False
    on_small_disk: bool = False
    redis: RedisKind | None = None
    server: ServerKind | None = None


NO_FAULT = FaultCase("none", "nothing: what the others are compared with")
