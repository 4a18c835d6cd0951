"""Why a call to a kvtier-server came to nothing. None of these leaves the tier."""

from __future__ import annotations

from kvtier.protocol.messages import FailureCode

__all__ = ["DeadlineError", "GarbledError", "LostError", "RefusedError", "ServerError", "plain"]

MAX_SHOWN = 300


class ServerError(Exception):
    """The connection is of no more use, unless it says otherwise; `kind` is what failures are counted by."""

    kind = "connection"


class LostError(ServerError):
    """It was cut, or could not be made."""


class DeadlineError(ServerError):
    """The call's time is over."""

    kind = "timeout"


class GarbledError(ServerError):
    """What came is not what a kvtier-server sends, or not at this time."""

    kind = "protocol"


class RefusedError(ServerError):
    """The server said that it does not do it. is_final: to whatever this connection asks."""

    def __init__(self, address: object, code: str, text: str, *, is_final: bool) -> None:
        super().__init__(f"{address} answered {plain(code)}: {plain(text)}")
        known = {getattr(FailureCode, name) for name in vars(FailureCode) if name.isupper()}
        self.kind = code if code in known else "refused"
        self.code = code
        self.text = plain(text)
        self.is_final = is_final


def plain(text: str) -> str:
    """What another process says, fit for one line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_SHOWN])
