"""What a failure beside the engine may look like."""

from __future__ import annotations

from asyncio import CancelledError

__all__ = ["CAUGHT"]

CAUGHT = (Exception, CancelledError)
"""Everything but what ends the process. A tier's cancelled task raises CancelledError, which is no Exception."""
