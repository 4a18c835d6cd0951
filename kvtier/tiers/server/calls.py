"""A connection for each call, and what is made of its failures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from kvtier.errors import ClosedError, TierError
from kvtier.protocol.messages import FailureCode
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import RefusedError, ServerError
from kvtier.tiers.server.notices import Notices
from kvtier.tiers.server.opening import ForeignError
from kvtier.tiers.server.pool import ConnectionPool

__all__ = ["Caller"]

_ADVICE = {
    FailureCode.DENIED: "; see server.token_file, and daemon.credentials of the server",
    FailureCode.BUSY: "; see daemon.max_clients of the server",
}

Answer = TypeVar("Answer")


class Caller:
    """Leases connections, counts failures, and tells those about which a person can do something. Any thread.

    Mutable state: `_errors`, guarded by `_lock`, a leaf; `closing` is only ever set.
    """

    def __init__(self, url: str, pool: ConnectionPool, notices: Notices) -> None:
        self._url = url
        self._pool = pool
        self._notices = notices
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self.closing = threading.Event()

    @property
    def errors(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._errors)

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """For one call alone. Raises a ServerError, which was counted and told; ClosedError where it is that the tier
        was closed."""
        with self.noting():
            connection = self._pool.acquire(deadline)
            try:
                yield connection
            finally:
                self._pool.release(connection)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A ServerError within is counted and told; ClosedError in its place where it is that the tier was closed."""
        try:
            yield
        except ServerError as error:
            if self.closing.is_set():
                raise ClosedError("the server tier is closed") from error
            self.note(error)
            raise

    def ask(self, ask: Callable[[Connection], Answer], deadline: float) -> Answer:
        """For calls that must not fail in silence: raises TierError where there is no answer."""
        try:
            with self.connection(deadline) as connection:
                return ask(connection)
        except ServerError as error:
            raise TierError(f"the server tier: {error}") from error

    def say(self, kind: str, text: str) -> None:
        """Something about which a person can do something, once in a while."""
        self._notices.say(kind, f"server.url = {self._url}: {text}")

    def note(self, error: ServerError) -> bool:
        """Count it, and say it where a person can do something about it; what passes by itself the guard tells.
        Whether it is said now, or was."""
        with self._lock:
            self._errors[error.kind] += 1
        if isinstance(error, ForeignError):
            self._notices.say("foreign", f"server.url = {self._url}: {error}")
        elif isinstance(error, RefusedError) and error.is_final and error.code != FailureCode.CLOSING:
            self._notices.say(error.kind, f"server.url = {self._url}: {error}{_ADVICE.get(error.code, '')}")
        else:
            return False
        return True
