"""The processes of the server benchmarks: a kvtier-server, clients that begin together, plain sockets' other ends."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.errors import KVTierError
from kvtier.protocol.admin import AskFlush, Flushed
from kvtier.protocol.messages import MAX_MESSAGE_BYTES, VERSIONS, Hello, Ping, Pong, ServerMessage, Welcome
from kvtier.protocol.wire import Message, Receiver, pack
from kvtier.server.admin_client import AdminClient
from kvtier_connectors.bench.server_worker import command_of

__all__ = ["Clients", "PlainEnd", "RawClient", "Server", "apart"]

START_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 30.0
POLL_S = 0.001
SERVER_NICENESS = -10
"""As in packaging/kvtier-server.service."""


def put_first(pid: int) -> None:
    """Have a process served by the CPUs before its clients, as our systemd unit does, where we may: one that serves
    several is all that these wait for. Both kvtier-server and what it is compared with."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, SERVER_NICENESS)


@contextmanager
def apart(*pids: int) -> Iterator[None]:
    """On this thread's CPU nothing of these processes, which share another: as beside an engine, which keeps its own
    busy. Left to itself the kernel puts one on its caller's CPU and another not, and a question and its answer take
    twice as long between two CPUs. With one CPU alone nothing changes."""
    mine = os.sched_getaffinity(0)
    others = {pid: os.sched_getaffinity(pid) for pid in pids}
    if len(mine) < 2:
        yield
        return
    first, second, *_ = sorted(mine)
    try:
        os.sched_setaffinity(0, {first})
        for pid in others:
            _keep_to(pid, {second})
        yield
    finally:
        os.sched_setaffinity(0, mine)
        for pid, cpus in others.items():
            _keep_to(pid, cpus)


def _keep_to(pid: int, cpus: set[int]) -> None:
    """All of its threads, if it is still there."""
    with suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


class Child:
    """A process that tells on lines of JSON how far it is. A bench that ends ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.opened = self.hear()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KVTierError(f"a process of the benchmark ended with {self._process.wait()}; it said why above")
        heard: dict[str, Any] = json.loads(line)
        return heard

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True, slots=True)
class Work:
    """What every client does at once. check: compare what came back, outside of the time."""

    side: str
    way: str
    check: bool = False


class Clients:
    """Processes, each with blocks of its own, which do the same at the same time."""

    def __init__(self, number: int, block_bytes: int, num_blocks: int, **sides: object) -> None:
        """sides: see `server_worker`: url and token_file, own, port."""
        task = {"block_bytes": block_bytes, "num_blocks": num_blocks, **sides}
        self._gigabytes = number * num_blocks * block_bytes / 1e9
        with ExitStack() as stack:
            self._children = []
            for _ in range(number):
                child = Child(command_of(**task))
                stack.callback(child.close)
                self._children.append(child)
            self._stack = stack.pop_all()

    def seconds(self, work: Work) -> float:
        """From the first that began to the last that ended."""
        for child in self._children:
            child.tell(json.dumps(asdict(work)))
        for child in self._children:
            child.hear()
        for child in self._children:
            child.tell("")
        heard = [child.hear() for child in self._children]
        return float(max(each["ended"] for each in heard) - min(each["began"] for each in heard))

    def rate(self, side: str, way: str) -> float:
        """GB/s of all together."""
        return self._gigabytes / self.seconds(Work(side, way))

    def check(self, side: str) -> None:
        """That what was stored comes back, to the bit; AssertionError, in the client, otherwise."""
        self.seconds(Work(side, "restore", check=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class PlainEnd(Child):
    """The other end of a plain socket: of a stream of `num_bytes` at a time, or of an echo."""

    def __init__(self, *, num_bytes: int | None = None, path: Path | None = None) -> None:
        if path is None:
            super().__init__(command_of(serve="sink", num_bytes=num_bytes))
        else:
            super().__init__(command_of(serve="echo", path=str(path)))
        put_first(self._process.pid)

    @property
    def port(self) -> int:
        return int(self.opened["port"])


class Server:
    """A kvtier-server with a socket, a port and a token of its own, and nothing on any disk but these, unless it is
    given one. It may be killed, stopped and started again, on the same socket and port."""

    def __init__(self, pool_bytes: int, *, checksums: bool = True, disk_bytes: int = 0) -> None:
        """disk_bytes: of a disk tier below its memory, which outlives a kill; 0: none."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-server-")
        where = Path(self._directory.name)
        self.socket = where / "socket"
        self._log = where / "log"
        self.token_file = where / "token"
        self.token_file.write_text(secrets.token_hex(32))
        self.token_file.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        settings = {
            "host.size": pool_bytes,
            "disk.path": where / "disk" if disk_bytes else "none",
            "disk.size": disk_bytes or "1GiB",
            "disk.min_free": "1MiB",
            "redis.url": "none",
            "server.url": "none",
            "daemon.socket": self.socket,
            "daemon.listen": f"127.0.0.1:{self._port}",
            "daemon.credentials": f"default=uid:{os.getuid()},default=token:{self.token_file}",
            "daemon.tenants": "none",
            "daemon.http": "off",
            "daemon.checksums": str(checksums).lower(),
            "daemon.log_level": "warning",
        }
        command = [sys.executable, "-P", "-c", "from kvtier.server.cli import main; main()"]
        self._command = command + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        self._start()

    def _start(self) -> None:
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        put_first(self._process.pid)
        try:
            self.client = self._connect(began + START_TIMEOUT_S)
            self.client.ping()
            self.start_s = time.monotonic() - began
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unix_url(self) -> str:
        return f"kvtier+unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"kvtier+tcp://127.0.0.1:{self._port}"

    def _connect(self, deadline: float) -> RawClient:
        while True:
            try:
                return RawClient(self.socket)
            except OSError:
                if self._process.poll() is not None:
                    said = self._log.read_text(errors="replace").strip()
                    raise KVTierError(
                        f"kvtier-server ended with {self._process.returncode} as it started: {said}"
                    ) from None
                if time.monotonic() > deadline:
                    raise KVTierError(f"kvtier-server did not listen within {START_TIMEOUT_S:g} s") from None
                time.sleep(POLL_S)

    def flush(self) -> int:
        """Have it write what is due to its disk; how many blocks were not written within half a minute."""
        with AdminClient(f"{self.socket}.admin", "kvtier bench") as admin:
            answers = list(admin.ask(AskFlush(admin.next_id(), int(FLUSH_TIMEOUT_S * 1000))))
        return sum(answer.blocks_left for answer in answers if isinstance(answer, Flushed))

    def kill(self) -> None:
        """By SIGKILL. Idempotent."""
        self.client.close()
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Kill it, if it still runs, and start it anew; returns when it serves."""
        self.kill()
        self._start()

    def stop(self) -> None:
        """By SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """By SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.close()


class RawClient:
    """The least client that says hello and pings: one socket, one question at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
            self._receiver: Receiver[ServerMessage] = Receiver(
                ServerMessage, max_message_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=0
            )
            answer = self._ask(pack(Hello(1, list(VERSIONS), "kvtier bench", "", wants_mapping=False)))
            assert isinstance(answer, Welcome), f"kvtier-server said {answer}"
        except BaseException:
            self._socket.close()
            raise
        self._ping = pack(Ping(1))

    def ping(self) -> None:
        assert isinstance(self._ask(self._ping), Pong)

    def _ask(self, frame: bytes) -> object:
        self._socket.sendall(frame)
        while (event := self._receiver.next_event()) is None:
            received = self._socket.recv_into(self._receiver.buffer())
            assert received, "kvtier-server closed the connection"
            self._receiver.received(received)
        assert isinstance(event, Message)
        return event.message

    def close(self) -> None:
        self._socket.close()
