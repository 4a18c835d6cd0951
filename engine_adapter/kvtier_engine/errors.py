"""What the engine refuses before anything is scheduled."""

from __future__ import annotations

from kvtier.errors import KVTierError

__all__ = ["EmptyPromptError", "PromptTooLongError", "RequestError"]


class RequestError(KVTierError, ValueError):
    """A request that cannot be served as it is; nothing of it was scheduled."""


class EmptyPromptError(RequestError):
    """The prompt has no token."""


class PromptTooLongError(RequestError):
    """The prompt and one token of output do not fit the model length, and never will."""
