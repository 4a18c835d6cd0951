"""A daemon as a process, and a client that says to it what it likes, byte by byte if need be."""

from __future__ import annotations

import array
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from kvtier.frame import payload_checksum
from kvtier.protocol import messages as m
from kvtier.protocol.wire import PayloadEnd, Receiver, pack

TIMEOUT_S = 20.0
BLOCK_BYTES = 16 << 10
NAMESPACE = b"n" * 16
SLAB = 1 << 20

T = TypeVar("T")


def wait_for(what: str, ask: Callable[[], T | None], timeout_s: float = TIMEOUT_S) -> T:
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)
    return answer


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name)


def resident_bytes(pid: int) -> int:
    """What the process has in memory, without the pool that it shares."""
    text = Path(f"/proc/{pid}/status").read_text()
    (kib,) = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(kib) * 1024


class ServerProcess:
    """`kvtier-server` in a process of its own, with these settings and no others. Killed at the end if need be."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> None:
        self.socket = directory / "kv.sock"
        self.log = directory / "log"
        given: dict[str, object] = {
            "host.size": "32MiB",
            "host.slab": SLAB,
            "daemon.socket": self.socket,
            "daemon.http": "off",
            "daemon.dma_grace_s": 0,
            **(settings or {}),
        }
        command = [sys.executable, "-m", "kvtier.server"]
        if config is not None:
            command += ["--config", str(config)]
        self.command = command + [f"--set={name}={value}" for name, value in given.items()]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        self._env = {**kept, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def start(self, *, wait: bool = True) -> Self:
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        if wait:
            self.wait_for("ready after")
        return self

    def wait_for(self, words: str) -> str:
        """Until the log has these words; the log."""
        process = self.process

        def ask() -> str | None:
            text = self.text()
            if words not in text:
                assert process is None or process.poll() is None, f"it ended with {process.returncode}: {self.text()}"
                return None
            return text

        return wait_for(f"{words!r} in the log", ask)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def connect(self, **options: Any) -> Client:
        return Client.unix(self.socket, **options)


class Client:
    """One connection, spoken step by step. Blocks TIMEOUT_S at most."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.sock = sock
        self.receiver: Receiver[m.ServerMessage] = Receiver(m.ServerMessage, max_payload_bytes=1 << 30)
        self.fds: list[int] = []
        self.payload = bytearray()
        self._ids = iter(range(1, 1 << 30))

    @classmethod
    def unix(cls, path: Path) -> Client:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(path))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @classmethod
    def tcp(cls, address: tuple[str, int], context: ssl.SSLContext | None = None) -> Client:
        sock = socket.create_connection(address, TIMEOUT_S)
        try:
            return cls(context.wrap_socket(sock, server_hostname=address[0]) if context else sock)
        except BaseException:
            sock.close()
            raise

    def send(self, message: m.ClientMessage, *payload: bytes) -> None:
        self.sock.sendall(pack(message, sum(map(len, payload))) + b"".join(payload))

    def receive(self) -> m.ServerMessage | None:
        """The next message, with its payload in `payload`; None: the connection is over."""
        while True:
            event = self.receiver.next_event()
            if event is None:
                if not self._read():
                    return None
            elif not isinstance(event, PayloadEnd):
                self.payload = bytearray(event.payload_bytes)
                if event.payload_bytes:
                    self.receiver.take_payload([memoryview(self.payload)])
                    while self.receiver.next_event() is None:
                        assert self._read(), "the connection ended within a payload"
                return event.message

    def _read(self) -> int:
        buffer = self.receiver.buffer()
        try:
            if isinstance(self.sock, ssl.SSLSocket):
                nbytes = self.sock.recv_into(buffer)
            else:
                room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
                nbytes, ancillary, _, _ = self.sock.recvmsg_into([buffer], room)
                for _, _, data in ancillary:
                    self.fds += array.array("i", data[: len(data) // 4 * 4])
        except ConnectionResetError:
            nbytes = 0
        self.receiver.received(nbytes)
        return nbytes

    def ask(self, kind: type[Any], *fields: Any, payload: Sequence[bytes] = ()) -> Any:
        """Send a request and return its answer."""
        number = next(self._ids)
        self.send(kind(number, *fields), *payload)
        answer = self.receive()
        assert answer is not None, "the connection is over"
        return answer

    def hello(self, token: str = "", *, wants_mapping: bool = False) -> m.Welcome:
        answer = self.ask(m.Hello, list(m.VERSIONS), "test", token, wants_mapping)
        assert isinstance(answer, m.Welcome), answer
        return answer

    def ping(self) -> None:
        assert isinstance(self.ask(m.Ping), m.Pong)

    def store(self, blocks: Mapping[bytes, bytes]) -> list[int]:
        """Store blocks by payload, digest to bytes; the outcomes of Commit."""
        digests = b"".join(blocks)
        reserved = self.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, digests, bytes(32) * len(blocks))
        assert isinstance(reserved, m.Reserved), reserved
        assert set(reserved.outcomes) == {m.ReserveOutcome.RESERVED}, reserved
        data = list(blocks.values())
        checksums = [payload_checksum(block) for block in data]
        committed = self.ask(m.Commit, list(reserved.reservations), checksums, payload=data)
        assert isinstance(committed, m.Committed), committed
        return list(committed.outcomes)

    def fetch(self, digests: Sequence[bytes], max_wait_ms: int = 5000) -> list[bytes | None]:
        """Blocks by payload; None for one that did not come."""
        staged = self.ask(m.Stage, NAMESPACE, BLOCK_BYTES, b"".join(digests), b"", max_wait_ms, True)  # noqa: FBT003
        assert isinstance(staged, m.Staged), staged
        data = [bytes(self.payload[at : at + BLOCK_BYTES]) for at in range(0, len(self.payload), BLOCK_BYTES)]
        assert [payload_checksum(block) for block in data] == list(staged.checksums)
        rest = iter(data)
        return [next(rest) if outcome == m.StageOutcome.OK else None for outcome in staged.outcomes]

    def failure(self) -> m.Failed:
        """What the connection ends with; then it is over."""
        answer = self.receive()
        assert isinstance(answer, m.Failed), answer
        assert answer.id == 0
        assert self.receive() is None
        return answer

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_blocks(first: int, count: int) -> dict[bytes, bytes]:
    """Digest to bytes, told from each other by their content."""
    return {
        number.to_bytes(4, "little") * 8: number.to_bytes(4, "little") * (BLOCK_BYTES // 4)
        for number in range(first, first + count)
    }
