"""What the tier over a kvtier-server counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ServerSnapshot"]


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """The tier at one moment, from memory; counters run from its opening."""

    num_blocks: int
    """Blocks that this process stored, and has not removed or missed since."""
    used_bytes: int
    """Their bytes."""
    capacity_bytes: int
    """Host memory that the server has for this tenant, as it told at the last connect."""
    mapped_bytes: int
    """Memory of the server that is mapped here now."""
    connections: int
    """Connections open now."""
    connects: int
    """Connections made."""
    disconnects: int
    """Connections that were closed for cause: cut, late, or with an answer unread."""
    errors: Mapping[str, int]
    """Failures by kind: the server's code for it, or timeout, connection or protocol."""
    damaged: int
    """Blocks that were not what had been stored; the server was told to forget them."""
    epoch: int
    server: str
    """The software and the tenant at the other end, as last told; empty before that."""
