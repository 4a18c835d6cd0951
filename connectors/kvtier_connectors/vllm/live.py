"""A vLLM request between its arrival and its end, and the load that it waits for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm.v1.request import Request

__all__ = ["Live", "Load"]


@dataclass(eq=False)
class Load:
    """One load of a request: the destinations that vLLM was promised, and how many copies write them yet."""

    request_id: str
    blocks: tuple[int, ...]
    num_copying: int
    num_good: int | None = None
    """The first blocks that hold their bytes; None until that is known."""


@dataclass(eq=False)
class Live:
    """A request between its arrival and its end."""

    request: Request
    num_preemptions: int = 0
    """As vLLM counts them, when it last came to wait."""
    num_local: int = 0
    """Leading blocks that vLLM's prefix cache had when it last asked."""
    num_published: int = 0
    is_counted: bool = False
    """It was admitted since it last came to wait."""
    has_given_up: bool = False
    """A load failed, or it waited for GPU blocks for too long: nothing more is promised until it is preempted, so that
    it is admitted by its first chunk."""
    load: Load | None = None
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """Forwards under way: the plan's serial, and how many of its tokens are computed when it has ended."""
