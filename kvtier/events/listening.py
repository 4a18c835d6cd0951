"""Addresses to listen on, bound by ZeroMQ, with errors that name the setting."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

import zmq

from kvtier.errors import ConfigError

__all__ = ["bind", "remove"]

IPC = "ipc://"
OWNER_ONLY = 0o600


def bind(listener: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """Listen on `endpoint`; the address that it came to. Raises ConfigError where that cannot be.

    A Unix socket is its owner's alone. What stands in its place is replaced only if it is a socket that nobody listens
    on any more: ZeroMQ itself would delete any file, and take over from who listens there.
    """
    try:
        if endpoint.startswith(IPC):
            _check_free(Path(endpoint.removeprefix(IPC)))
        if "[" in endpoint:
            listener.setsockopt(zmq.IPV6, 1)
        listener.bind(endpoint)
        bound: str = listener.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.startswith(IPC):
            Path(endpoint.removeprefix(IPC)).chmod(OWNER_ONLY)
        return bound
    except (OSError, zmq.ZMQError) as error:
        reason = (error.strerror or str(error)).partition(" (addr=")[0]
        raise ConfigError(f"{setting} = {endpoint!r} cannot be listened on: {reason}; {_way_out(error)}") from error
    except (TypeError, ValueError) as error:  # no text that could be an address
        raise ConfigError(f"{setting} = {endpoint!r} is no address: {error}") from error


def remove(endpoint: str) -> None:
    """Remove the file of a Unix socket that is listened on still, so that it is nobody else's: ZeroMQ leaves it."""
    if endpoint.startswith(IPC):
        Path(endpoint.removeprefix(IPC)).unlink(missing_ok=True)


def _check_free(path: Path) -> None:
    """Raises OSError where listening at the path would take it from others."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "a file is there that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")


def _way_out(error: OSError | zmq.ZMQError) -> str:
    if error.errno in (errno.EADDRINUSE, errno.EEXIST):
        return "each engine needs an address of its own"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "name a port above 1023, or a directory that this user may write to"
    return "name an address of this machine, such as tcp://127.0.0.1:5557 or ipc:///path"
