"""Asking a live daemon: the operator's end of the admin socket."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kvtier import __version__
from kvtier.errors import KVTierError, ProtocolError
from kvtier.protocol.admin import (
    ADMIN_VERSIONS,
    AdminAnswer,
    AdminRequest,
    AskHealth,
    Ended,
    Failed,
    Greet,
    Greeted,
    Progress,
)
from kvtier.protocol.messages import MAX_MESSAGE_BYTES, FailureCode
from kvtier.protocol.wire import Message, Receiver, pack

__all__ = ["AdminClient", "AdminError", "NoDaemonError"]

SHORT_TIMEOUT_S = 10.0
"""For a greeting, and for whether it serves: what a daemon that is alive says at once."""
ANSWER_TIMEOUT_S = 120.0
"""Between two answers: longer than anything that a daemon waits for in between."""


class AdminError(KVTierError):
    """A daemon did not do what it was asked; the message says why, and what to do."""


class NoDaemonError(AdminError):
    """None can be reached at this socket."""


class AdminClient:
    """One connection to a daemon's admin socket. Blocks, on the caller's thread; closing it ends what was asked.

    is_cut: whether the last request's bound left something out. Mutable state: everything; one thread.
    """

    def __init__(self, path: str, source: str) -> None:
        """path: the admin socket's. source: where that comes from, for messages. Raises NoDaemonError where nobody can
        be reached, AdminError for one who speaks otherwise or does not want to."""
        self.path = path
        self.is_cut = False
        self._source = source
        self._number = 0
        self._receiver: Receiver[AdminAnswer] = Receiver(
            AdminAnswer, max_message_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=0
        )
        if path == "off":
            raise NoDaemonError(
                f"{source} says that the daemon takes no commands: start kvtier-server with daemon.admin_socket set, "
                "or name its socket with --socket"
            )
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(SHORT_TIMEOUT_S)
            self._connect()
            self.daemon = self._greet()
        except BaseException:
            self._sock.close()
            raise

    def ask(self, request: AdminRequest) -> Iterator[AdminAnswer]:
        """The answers as they come, Ended left out; to be read to their end before the next request. Raises AdminError
        where the daemon refuses, or is gone."""
        self.is_cut = False
        self._sock.settimeout(SHORT_TIMEOUT_S if isinstance(request, AskHealth) else ANSWER_TIMEOUT_S)
        self._send(request)
        while True:
            answer = self._receive()
            if isinstance(answer, Failed):
                raise AdminError(f"kvtier-server at {self.path}: {answer.text}")
            if isinstance(answer, Ended):
                self.is_cut = answer.is_cut
                return
            if not isinstance(answer, Progress):
                yield answer

    def next_id(self) -> int:
        self._number += 1
        return self._number

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _connect(self) -> None:
        try:
            self._sock.connect(self.path)
        except PermissionError as error:
            raise NoDaemonError(
                f"the socket {self.path} ({self._source}) is {_owner(Path(self.path))}'s, and you are "
                f"{_user(os.geteuid())}: ask as that user, or as root"
            ) from error
        except OSError as error:
            reason = {
                errno.ENOENT: "there is no such socket",
                errno.ECONNREFUSED: "nobody listens on it: its daemon has ended",
                errno.ENOTSOCK: "it is no socket",
            }.get(error.errno or 0, error.strerror or str(error))
            raise NoDaemonError(
                f"no kvtier-server at {self.path} ({self._source}): {reason}; start kvtier-server, or name the admin "
                "socket of one that runs with --socket or KVTIER_DAEMON__ADMIN_SOCKET"
            ) from error

    def _greet(self) -> Greeted:
        with contextlib.suppress(AdminError):  # turned away already: it says why
            self._send(Greet(list(ADMIN_VERSIONS), f"kvtier {__version__}"))
        try:
            answer = self._receive()
        except ProtocolError as error:
            raise AdminError(
                f"what listens at {self.path} ({self._source}) is no kvtier-server's admin socket, or another "
                f"version's (this is kvtier {__version__}): {error}"
            ) from error
        if isinstance(answer, Greeted):
            return answer
        if not isinstance(answer, Failed):
            raise AdminError(f"kvtier-server at {self.path} said {type(answer).__name__} in place of a greeting")
        if answer.code == FailureCode.PROTOCOL:
            raise AdminError(
                f"{self.path} ({self._source}) is no admin socket, or another version's (this is kvtier "
                f"{__version__}): it is that of engines with .admin behind it, unless daemon.admin_socket says another"
            )
        raise AdminError(f"kvtier-server at {self.path}: {answer.text}")

    def _send(self, request: AdminRequest) -> None:
        try:
            self._sock.sendall(pack(request))
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self) -> AdminAnswer:
        begun_at = time.monotonic()
        while (event := self._receiver.next_event()) is None:
            try:
                nbytes = self._sock.recv_into(self._receiver.buffer())
            except TimeoutError as error:
                raise AdminError(
                    f"kvtier-server at {self.path} has not answered for {time.monotonic() - begun_at:.0f} s: it, or a "
                    "device of its, hangs; its log says more"
                ) from error
            except OSError as error:
                raise self._gone(error) from error
            if not nbytes:
                raise self._gone(None)
            self._receiver.received(nbytes)
        assert isinstance(event, Message), "no answer has a payload"
        message: AdminAnswer = event.message
        return message

    def _gone(self, error: OSError | None) -> AdminError:
        reason = f" ({error.strerror or error})" if error is not None else ""
        return AdminError(f"kvtier-server at {self.path} closed the connection{reason}: it ends, or has ended")


def _owner(path: Path) -> str:
    """Of a socket, or where it cannot be seen of the directory that hides it."""
    for each in (path, *path.parents):
        try:
            return _user(each.stat().st_uid)
        except OSError:
            continue
    return "another user"


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
