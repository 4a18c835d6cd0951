"""What the engine refuses before anything is scheduled."""

from __future__ import annotations

from typing import ClassVar

from kvtier.errors import KVTierError, TokenError

__all__ = ["BadTokenError", "EmptyPromptError", "PromptTooLongError", "RequestError"]


class RequestError(KVTierError, ValueError):
    """A request that cannot be served as it is; nothing of it was scheduled.

    http_status, code: what to answer, for whoever serves it over HTTP.
    """

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "BadRequestError"


class EmptyPromptError(RequestError):
    """The prompt has no token."""


class PromptTooLongError(RequestError):
    """The prompt and one token of output do not fit the model length, and never will."""


class BadTokenError(RequestError, TokenError):
    """The prompt has something that is not one of the model's tokens."""
