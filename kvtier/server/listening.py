"""Where a daemon listens, and who it takes in: Unix sockets that are its alone, TCP, TLS, and the peer as known."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import grp
import logging
import os
import socket
import ssl
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from kvtier.clock import Clock
from kvtier.config import DaemonSettings
from kvtier.config.serving import split_address
from kvtier.errors import ConfigError
from kvtier.server.peers import Peer, Process

__all__ = [
    "Listener",
    "UnixSocket",
    "group_number",
    "listen_tcp",
    "shut_out",
    "tcp_peer",
    "tls_context",
    "unix_peer",
]

logger = logging.getLogger("kvtier.server")

BACKLOG = 4096
"""Connects that wait for the loop; the system's own limit (net.core.somaxconn) may be lower."""
ACCEPTS_A_TURN = 64
PAUSE_S = 0.25
"""After a connect that could not be taken for want of open files."""
LOG_PERIOD_S = 10.0
SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("iII")
# Of a peer that has gone without a word: found out within half a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class UnixSocket:
    """A socket in the file system that this process alone listens on; its user alone may open it, or one group too.

    A lock file beside it says whose it is. What a daemon that was killed left behind is replaced; what another one
    listens on, or what is no socket, never is.
    """

    def __init__(self, path: str, setting: str, group: str | None = None) -> None:
        """Blocks for as long as a connect to a socket of this machine takes. Raises ConfigError naming `setting`, or
        `daemon.socket_group` for a group that is none, or none of this process's.

        group: name or number of the one whose members may open it besides its owner.
        """
        self.path = Path(path)
        self._setting = setting
        self._group = group
        self._gid = -1 if group is None else group_number(group)
        self._lock = self._take_lock()
        try:
            self._remove_stale()
            self.sock = self._bind()
        except BaseException:
            os.close(self._lock)
            raise
        self._inode = self.path.stat().st_ino

    def close(self) -> None:
        """Stop listening and remove the file, if it still is this one's. Idempotent."""
        if self.sock.fileno() < 0:
            return
        self.sock.close()
        self.unlink()
        os.close(self._lock)

    def unlink(self) -> None:
        """Remove the files only: for whoever is about to end at once."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        with contextlib.suppress(OSError):
            self._lock_path.unlink()

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._setting} = {str(self.path)!r}: {reason}")

    def _take_lock(self) -> int:
        self._check_directory()
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise self._refusal(
                    f"its lock file cannot be opened ({error.strerror}); make the directory this user's, or choose "
                    "another path"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_ino == self._lock_path.stat().st_ino:
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise self._refusal("another kvtier-server listens there; stop it, or choose another path") from None
            except FileNotFoundError:  # its last holder has just removed it: once more
                pass
            os.close(lock)

    def _check_directory(self) -> None:
        directory = self.path.parent
        try:
            self._make_directory(directory)
            found = directory.stat()
        except OSError as error:
            raise self._refusal(
                f"the directory cannot be used ({error.strerror}); make it, for the daemon's user, or choose another "
                "path"
            ) from error
        if found.st_uid not in (0, os.geteuid()):
            raise self._refusal(
                f"{str(directory)!r} is user {found.st_uid}'s, who could put a socket of theirs in its place; choose a "
                f"directory of user {os.geteuid()}'s"
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise self._refusal(
                f"others may write to {str(directory)!r} and put a socket of theirs in its place; "
                f"`chmod go-w {directory}`, or choose another directory"
            )

        if self._group is not None and (problem := shut_out(directory, self._group)):
            logger.warning("%s", problem)

    def _make_directory(self, directory: Path) -> None:
        """Unless there is one: what is there is its owner's to arrange."""
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            return
        if self._group is not None:
            self._give_to_group(directory, 0o710)

    def _give_to_group(self, path: Path, mode: int) -> None:
        try:
            os.chown(path, -1, self._gid)
        except OSError as error:
            raise ConfigError(
                f"daemon.socket_group = {self._group!r}: {str(path)!r} cannot be given to it ({error.strerror}); add "
                "the daemon's user to that group (`usermod -aG`, or SupplementaryGroups= of the service), or name one "
                "of its own"
            ) from error
        path.chmod(mode)

    def _remove_stale(self) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise self._refusal("there is a file that is no socket; move it away, or choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex(str(self.path))
        if code not in (errno.ECONNREFUSED, errno.ENOENT):
            raise self._refusal(
                f"another process listens there ({os.strerror(code) if code else 'it took a connection'}); stop it, or "
                "choose another path"
            )
        self.path.unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.bind(str(self.path))
            self.path.chmod(0o600)
            if self._group is not None:
                self._give_to_group(self.path, 0o660)
            sock.listen(BACKLOG)  # nobody can connect before this
        except ConfigError:
            sock.close()
            self.path.unlink(missing_ok=True)
            raise
        except OSError as error:
            sock.close()
            raise self._refusal(f"it cannot be listened on ({error.strerror or error}); choose another path") from error
        return sock


def group_number(group: str) -> int:
    """Of a group's name or number, as `daemon.socket_group` has it; raises ConfigError for a name that is none."""
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"daemon.socket_group = {group!r} is no group of this machine; `groupadd {group}`, or correct it"
        ) from None


def shut_out(directory: Path, group: str) -> str:
    """What keeps members of `daemon.socket_group` from a socket in that directory, as far as its mode says, and what to
    do; empty: nothing does."""
    found, gid = directory.stat(), group_number(group)
    if found.st_mode & 0o001 or (found.st_gid == gid and found.st_mode & 0o010):
        return ""
    return (
        f"daemon.socket_group = {group!r} may open the socket, but not pass through {str(directory)!r}: `chgrp {group} "
        f"{directory} && chmod g+x {directory}` (RuntimeDirectoryMode=0710 of the service), unless an ACL lets it in"
    )


def listen_tcp(address: str) -> socket.socket:
    """A socket that listens on 'host:port'; raises ConfigError naming `daemon.listen`."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError as error:
        raise ConfigError(f"daemon.listen = {address!r} is no address of this machine ({error}); correct it") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"daemon.listen = {address!r} cannot be listened on ({error.strerror or error}); stop what listens there, "
            "or choose another address or port"
        ) from error
    return sock


def tls_context(settings: DaemonSettings) -> ssl.SSLContext | None:
    """What `daemon.listen` shows and asks for; None without TLS. Raises ConfigError naming what cannot be used."""
    if not settings.tls_cert_file or not settings.tls_key_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"daemon.tls_cert_file = {settings.tls_cert_file!r} and daemon.tls_key_file = {settings.tls_key_file!r} "
            f"cannot be used ({error}); name PEM files that belong together, the key without a password"
        ) from error
    if settings.tls_client_ca_file:
        try:
            context.load_verify_locations(settings.tls_client_ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"daemon.tls_client_ca_file = {settings.tls_client_ca_file!r} cannot be used ({error}); name a PEM "
                "file of the certificates that sign clients'"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """In place of OpenSSL's own question at the terminal."""
    raise ValueError("the key asks for a password")


def unix_peer(sock: socket.socket) -> Peer:
    """Who is at the other end, by the kernel's word."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        process: Process | None = Process(pid, pidfd)
    except OSError:  # a kernel before 6.5, or it has ended already
        process = Process.open(pid)
    return Peer("unix", "unix", uid=uid, pid=pid, process=process)


def tcp_peer(sock: socket.socket) -> Peer:
    """Who is at the other end; TLS says more later. Sets the connection up for short answers and a peer that dies."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    host, port = sock.getpeername()[:2]
    return Peer("tcp", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class Listener:
    """Takes connections in, many at a time, and hands each on. Loop's thread; owns no socket."""

    def __init__(self, sock: socket.socket, on_connect: Callable[[socket.socket], None], clock: Clock) -> None:
        """on_connect: owns the connection's socket from then on; must not raise."""
        self._sock = sock
        self._on_connect = on_connect
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_PERIOD_S
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Take no more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait_after(error)
                return
            sock.settimeout(0.0)
            self._on_connect(sock)

    def _wait_after(self, error: OSError) -> None:
        """The connect stays in the queue, and would wake the loop at once again."""
        now = self._clock.now()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            logger.warning(
                "a connection could not be taken (%s): raise the limit of open files (ulimit -n, or LimitNOFILE= of "
                "the service), or lower daemon.max_clients",
                error.strerror or error,
            )
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._sock, self._accept)
