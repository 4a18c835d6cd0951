"""What the way up decides of a request, as people are told of it later."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.decisions import ADMITTED, FAILED, RECOMPUTED, Decision
from kvtier.fallbacks import Fallback
from kvtier.reasons import MissReason

__all__ = ["admitted", "given_up"]


def admitted(request_id: str, num_asked: int, served: Mapping[str, int], miss: MissReason | None) -> Decision:
    """The engine takes a request up: of `num_asked` blocks these land, by tier."""
    is_whole = sum(served.values()) >= num_asked
    return Decision(request_id, ADMITTED, num_asked, dict(served), "" if is_whole or miss is None else miss.value)


def given_up(fallback: Fallback) -> Decision:
    """A restore came to nothing."""
    return Decision(
        fallback.request_id,
        FAILED if fallback.is_fatal else RECOMPUTED,
        fallback.num_blocks,
        {},
        fallback.reason.value,
        fallback.tier,
        fallback.waited_s,
        fallback.limit_s,
    )
