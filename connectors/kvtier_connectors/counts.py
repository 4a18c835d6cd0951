"""What a connector counts, as a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.metrics import LedgerSnapshot, RestoreStatus

__all__ = ["ConnectorStats"]


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """One moment of a connector. Counters run from its opening."""

    ledger: LedgerSnapshot
    """Where every due block went."""
    restore: RestoreStatus
    """What was decided for those who asked for a restore, and how long they wait."""
    landed_blocks: int
    """Blocks restored into the GPU pool and handed to the engine."""
    failed_landings: int
    """Blocks that were to land and did not."""
    readmissions: int
    """Admissions of a request that had been admitted before; their lookups are in no hit rate."""
    stale_results: int
    """Copy results for jobs unknown or over; ignored."""
    live_requests: int
    """Requests started and not finished."""
    in_flight_blocks: int
    """Blocks being copied, down or up."""
