"""What the Redis tier counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RedisSnapshot"]


@dataclass(frozen=True, slots=True)
class RedisSnapshot:
    """The Redis tier at one moment, from memory; counters run from its opening."""

    num_blocks: int
    """Blocks that this process stored, and has not removed or missed since."""
    used_bytes: int
    """Their frames."""
    capacity_bytes: int
    """What the masters may use together: their maxmemory, or all memory of a machine where that is not set."""
    server_used_bytes: int
    """Memory that the masters used together, for all their clients, as last asked."""
    connections: int
    """Connections open now."""
    connects: int
    """Connections made."""
    disconnects: int
    """Connections that were closed for cause: cut, late, or with a reply unread."""
    redirects: int
    """Blocks and epochs that were found on another node of the cluster than thought."""
    errors: Mapping[str, int]
    """Failures by kind: an error reply's first word, timeout, connection, protocol or oversize."""
    damaged: int
    """Blocks that were not what had been written; they were removed."""
    full_backoffs: int
    """Times that a server without memory was left alone with blocks for a while."""
    epoch: int
    nodes: Mapping[str, str]
    """Servers known now, by address, and what each is."""
