"""What keeps a test from running where there is no Redis server."""

from __future__ import annotations

import pytest

from kvtier.errors import KVTierError
from kvtier.testing.redis_servers import require_redis_server

__all__ = ["needs_redis_server"]


def _reason() -> str:
    try:
        require_redis_server()
    except KVTierError as error:
        return str(error)
    return ""


_REASON = _reason()
needs_redis_server = pytest.mark.skipif(bool(_REASON), reason=_REASON)
"""Skips, and names the command that installs the server."""
