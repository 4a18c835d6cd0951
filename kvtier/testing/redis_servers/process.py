"""A child process that cannot outlive this one, a directory that cannot either, and ports that nobody else gets."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.clock import Clock
from kvtier.errors import KVTierError
from kvtier.testing.redis_servers.installed import require_program
from kvtier.testing.redis_servers.waiting import wait_until

__all__ = ["ChildProcess", "held_port", "scratch_directory"]

SIGNAL_TIMEOUT_S = 10.0
PORT_TRIES = 100
BUS_OFFSET = 10_000
# The parent may have died before the child asked to be told: then it has another parent by now.
UNLESS_ORPHAN = '[ "$PPID" = "$0" ] && exec "$@"'
# Of a process killed a moment ago a file may still come into the directory: then rm fails, and tries again.
REMOVE_AT_EOF = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$0" && break; sleep 0.2; done'


class ChildProcess:
    """Runs `command`, again after each `kill` if so asked. SIGKILL when the process that owns this object dies.

    Output is appended to `log`. Signals of the terminal do not reach it: the owner ends it in its own order.
    Mutable state: `_process`, by whichever thread calls; one at a time.
    """

    def __init__(self, command: Sequence[str], log: Path, clock: Clock) -> None:
        setpriv = require_program("setpriv", "util-linux", "a server that ends with the process that started it")
        # The kernel kills a child when the thread that began it ends, so a thread that lives as long begins it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="kvtier-child")
        self._command = [setpriv, "--pdeathsig", "KILL", "sh", "-c", UNLESS_ORPHAN, str(os.getpid()), *command]
        self._log = log
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """KVTierError when it does not run."""
        if self._process is None or self._process.poll() is not None:
            raise KVTierError("the server does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Also while it is stopped."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the system has begun it, which says nothing of what it has done yet."""
        assert not self.is_running
        self._process = self._starter.submit(self._spawn).result()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """SIGSTOP: it does nothing more until `cont`, but its connections stay. Returns when it stands still."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        stat = Path(f"/proc/{pid}/stat")

        def stands() -> bool:
            return stat.read_text().rpartition(")")[2].split()[0] == "T"

        wait_until(f"process {pid} stops", stands, SIGNAL_TIMEOUT_S, self._clock)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL. Returns when it is gone; at once when it did not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SIGNAL_TIMEOUT_S)

    def close(self) -> None:
        """`kill`, and no start afterwards."""
        self.kill()
        self._starter.shutdown()


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A fresh directory, removed at the end, or by a process of its own when this one dies before that."""
    made = Path(tempfile.mkdtemp(prefix="kvtier-redis-"))
    remover = subprocess.Popen(
        ["sh", "-c", REMOVE_AT_EOF, str(made)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield made
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()


@contextmanager
def held_port(*, with_bus: bool = False) -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else is given for the time, whether or not the server runs that is to have it.

    with_bus: the port 10,000 above it too, where the nodes of a cluster talk.
    """
    with ExitStack() as stack:
        for _ in range(PORT_TRIES):
            with ExitStack() as tried:
                upper = tried.enter_context(_bound(0))
                port = number = upper.getsockname()[1]
                if with_bus:
                    port = number - BUS_OFFSET
                    if port <= BUS_OFFSET or not _try_bind(tried, port):
                        continue
                stack.enter_context(tried.pop_all())
                break
        else:
            raise KVTierError(f"no free port of 127.0.0.1 was found in {PORT_TRIES} tries")
        yield port


def _try_bind(stack: ExitStack, port: int) -> bool:
    try:
        stack.enter_context(_bound(port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _bound(port: int) -> socket.socket:
    """Bound, not listening: a server that reuses addresses, as Redis does, can listen there, and no other is sent."""
    bound = socket.socket()
    with contextlib.ExitStack() as stack:
        stack.callback(bound.close)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        stack.pop_all()
    return bound
