"""Payloads that come late, slowly, in pieces or not whole: the loop hears of much at once, and of the end of each."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import ssl
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.config import Settings, load_settings
from kvtier.frame import payload_checksum
from kvtier.protocol import messages as m
from kvtier.protocol.wire import BUFFER_BYTES, pack
from kvtier.server.daemon import Daemon
from kvtier.server.serving import LINGER_S, LOW_WATER_BYTES, MIN_PAYLOAD_RATE, Connection
from kvtier.testing import FakeClock
from kvtier.testing.redis_servers import TlsFiles
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, Client, make_blocks, short_directory, wait_for

TOKEN = "a-token-of-some-length"
TIMEOUT_S = 10.0
SOON_S = 10.0
NUM_BLOCKS = 3 * LOW_WATER_BYTES // BLOCK_BYTES
"""Of a payload that the loop hears of in several parts."""
BLOCKS = make_blocks(0, NUM_BLOCKS)


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        (path / "token").write_text(TOKEN)
        (path / "token").chmod(0o600)
        yield path
    gc.collect()  # loops that a test ran are collected in it, not in another


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def daemon(directory: Path, clock: FakeClock) -> Iterator[Daemon]:
    with Daemon(settings_for(directory), clock=clock) as daemon:
        yield daemon
        daemon.check_integrity()


def settings_for(directory: Path, **more: object) -> Settings:
    settings = {
        "listen": "127.0.0.1:0",
        "credentials": f"default=token:{directory / 'token'}",
        "socket": "off",
        "http": "off",
        "client_timeout_s": TIMEOUT_S,
    }
    return load_settings(env={}, overrides={"host": {"size": "32MiB", "slab": 1 << 20}, "daemon": settings | more})


def tcp(daemon: Daemon) -> Client:
    assert daemon.tcp_address is not None
    client = Client.tcp(daemon.tcp_address)
    client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.hello(TOKEN)
    return client


def sockets(daemon: Daemon) -> list[socket.socket]:
    """Of its connections, in the order in which they came."""
    gate = daemon._gate
    assert gate is not None
    return [connection._sock for connection in [*gate._connections]]


def low_water(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def under_way(daemon: Daemon) -> Connection | None:
    """The connection with a payload that is not whole."""
    gate = daemon._gate
    assert gate is not None
    return next((each for each in [*gate._connections] if each._receiver.payload_bytes_left), None)


def has_come(daemon: Daemon, nbytes_left: int) -> None:
    """Wait until all of the only payload but so much has come, and the loop waits for more of it."""

    def ask() -> bool:
        connection = under_way(daemon)
        if connection is None:
            return False
        unread = connection._receiver.payload_bytes_left
        waiting = int.from_bytes(fcntl.ioctl(connection._sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        return unread - waiting == nbytes_left and waiting < low_water(connection._sock) == min(unread, LOW_WATER_BYTES)

    wait_for(f"all of the payload but {nbytes_left} bytes", ask, SOON_S)


def commit_of(client: Client, blocks: dict[bytes, bytes], *, is_void: bool = False) -> tuple[bytes, bytes]:
    """The frame of a Commit and its payload; is_void: of reservations that were given back."""
    reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(blocks), bytes(32) * len(blocks))
    assert isinstance(reserved, m.Reserved), reserved
    handles = list(reserved.reservations)
    assert len(handles) == len(blocks)
    if is_void:
        client.ask(m.Abort, handles)
    payload = b"".join(blocks.values())
    return pack(m.Commit(1000, handles, [payload_checksum(each) for each in blocks.values()]), len(payload)), payload


def is_committed(client: Client, *, is_void: bool = False) -> None:
    outcome = m.CommitOutcome.VOID if is_void else m.CommitOutcome.STORED
    answer = client.receive()
    assert isinstance(answer, m.Committed), answer
    assert (answer.id, set(answer.outcomes), len(answer.outcomes)) == (1000, {outcome}, NUM_BLOCKS)


def leased(client: Client) -> int:
    return int(client.ask(m.Stats).stats["leases"])


# ---- a payload's end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("last", [[1], [1, 1, 1], [7, 4000, 1], [LOW_WATER_BYTES - 1, 1], [LOW_WATER_BYTES, 1]])
def test_the_last_bytes_of_a_payload_may_come_late_and_one_by_one(
    daemon: Daemon, last: list[int], is_void: bool
) -> None:
    with tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS, is_void=is_void)
        at = len(payload) - sum(last)
        client.sock.sendall(frame + payload[:at])
        left = sum(last)
        for nbytes in last:
            has_come(daemon, left)
            client.sock.sendall(payload[at : at + nbytes])
            at += nbytes
            left -= nbytes
        is_committed(client, is_void=is_void)
        client.ping()
        wait_for("the mark is as it was", lambda: low_water(sockets(daemon)[0]) == 1)
        assert client.fetch(list(BLOCKS)[:64]) == ([None] * 64 if is_void else list(BLOCKS.values())[:64])
        assert leased(client) == 0


@pytest.mark.parametrize("is_void", [False, True])
def test_within_a_payload_the_loop_hears_of_much_at_once(daemon: Daemon, is_void: bool) -> None:
    with tcp(daemon) as client:
        (sock,) = sockets(daemon)
        assert low_water(sock) == 1
        frame, payload = commit_of(client, BLOCKS, is_void=is_void)
        client.sock.sendall(frame)
        wait_for("much", lambda: low_water(sock) == LOW_WATER_BYTES, SOON_S)
        client.sock.sendall(payload[:-1000])
        has_come(daemon, 1000)
        client.sock.sendall(payload[-1000:])
        is_committed(client, is_void=is_void)
        wait_for("one byte", lambda: low_water(sock) == 1)


@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("rest", [0, 1, BUFFER_BYTES, 2 * LOW_WATER_BYTES])
def test_messages_right_behind_a_payload_are_all_answered(daemon: Daemon, is_void: bool, rest: int) -> None:
    """rest: of the payload, sent with them."""
    with tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS, is_void=is_void)
        at = len(payload) - rest
        client.sock.sendall(frame + payload[:at])
        if rest:
            has_come(daemon, rest)
        pings = b"".join(pack(m.Ping(2000 + i)) for i in range(5))
        client.sock.sendall(payload[at:] + pings)
        is_committed(client, is_void=is_void)
        assert [client.receive() for _ in range(5)] == [m.Pong(2000 + i) for i in range(5)]


def test_one_payload_right_behind_another(daemon: Daemon) -> None:
    with tcp(daemon) as client:
        other = make_blocks(1000, NUM_BLOCKS)
        frames = [commit_of(client, BLOCKS), commit_of(client, other, is_void=True)]
        client.sock.sendall(b"".join(frame + payload for frame, payload in frames) + pack(m.Ping(2000)))
        is_committed(client)
        is_committed(client, is_void=True)
        assert client.receive() == m.Pong(2000)
        assert low_water(sockets(daemon)[0]) == 1


# ---- a payload without an end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("left", [1, LOW_WATER_BYTES, 2 * LOW_WATER_BYTES + 1])
def test_an_end_within_a_payload_is_one_connections_alone(daemon: Daemon, left: int, is_void: bool) -> None:
    with tcp(daemon) as good, tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS, is_void=is_void)
        client.sock.sendall(frame + payload[:-left])
        has_come(daemon, left)
        client.sock.shutdown(socket.SHUT_WR)
        if is_void:
            is_committed(client, is_void=True)  # said before the payload came
        assert client.receive() is None
        wait_for("its connection is over", lambda: len(sockets(daemon)) == 1)
        assert leased(good) == 0
        good.store(BLOCKS)  # no key of it is held
        assert good.fetch(list(BLOCKS)[:64]) == list(BLOCKS.values())[:64]


def test_who_is_reset_within_a_payload_leaves_nothing(daemon: Daemon) -> None:
    with tcp(daemon) as good, tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS)
        client.sock.sendall(frame + payload[:-100])
        has_come(daemon, 100)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sock.close()
        wait_for("its connection is over", lambda: len(sockets(daemon)) == 1)
        assert leased(good) == 0
        good.store(BLOCKS)


def test_who_is_turned_away_within_a_payload_can_read_why(daemon: Daemon) -> None:
    with tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS)
        client.sock.sendall(frame + payload[:-100])
        has_come(daemon, 100)
        (sock,) = sockets(daemon)
        gate, loop = daemon._gate, daemon._loop
        assert gate is not None
        assert loop is not None
        loop.call_soon_threadsafe(gate.fail_all, m.FailureCode.CLOSING, "the test says so")
        assert client.failure().text == "the test says so"
        assert low_water(sock) == 1
        client.sock.sendall(payload[-100:])  # thrown away
        client.close()
        wait_for("the connection is over", lambda: not sockets(daemon))


def test_who_sends_a_payload_of_another_length_can_read_why(daemon: Daemon) -> None:
    with tcp(daemon) as good, tcp(daemon) as client:
        reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(BLOCKS), bytes(32) * NUM_BLOCKS)
        frame = pack(m.Commit(1000, list(reserved.reservations), [0] * NUM_BLOCKS), NUM_BLOCKS * BLOCK_BYTES - 1)
        client.sock.sendall(frame + bytes(2 * LOW_WATER_BYTES))
        failed = client.failure()
        assert (failed.code, "whose blocks have" in failed.text) == (m.FailureCode.PROTOCOL, True), failed
        good.ping()


@pytest.mark.parametrize("is_void", [False, True])
def test_a_payload_that_stands_still_ends_its_connection(daemon: Daemon, clock: FakeClock, is_void: bool) -> None:
    with tcp(daemon) as good, tcp(daemon) as client:
        frame, payload = commit_of(client, BLOCKS, is_void=is_void)
        client.sock.sendall(frame + payload[:-100])
        has_come(daemon, 100)
        if is_void:
            is_committed(client, is_void=True)
        clock.advance(TIMEOUT_S + len(payload) / MIN_PAYLOAD_RATE - 0.1)
        good.ping()
        assert len(sockets(daemon)) == 2
        clock.advance(0.2)
        assert "the rest of a message did not come" in client.failure().text
        clock.advance(2 * LINGER_S)
        wait_for("nothing is held", lambda: leased(good) == 0)
        good.store(BLOCKS)


# ---- other connections -----------------------------------------------------------------------------------------------


class Marks:
    """Every low water that any connection had, by what `SO_RCVLOWAT` says after each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[int] = set()
        self.num_looks = 0
        work = Connection._work

        def looked(connection: Connection) -> None:
            work(connection)
            self.seen.add(low_water(connection._sock))
            self.num_looks += connection._receiver.payload_bytes_left > 0

        monkeypatch.setattr(Connection, "_work", looked)


def test_over_tls_the_loop_hears_of_every_byte(directory: Path, tls: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch)
    files = {"tls_cert_file": str(tls.server_cert_file), "tls_key_file": str(tls.server_key_file)}
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    with Daemon(settings_for(directory, **files)) as daemon, ExitStack() as stack:
        assert daemon.tcp_address is not None
        client = stack.enter_context(Client.tcp(daemon.tcp_address, context))
        client.hello(TOKEN)
        send_in_pieces(client)
    assert marks.num_looks
    assert marks.seen == {1}


def test_on_a_unix_socket_the_loop_hears_of_every_byte(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch)
    only = {"socket": str(directory / "kv.sock"), "listen": "off", "credentials": f"default=uid:{os.getuid()}"}
    with Daemon(settings_for(directory, **only)), Client.unix(directory / "kv.sock") as client:
        client.hello()
        send_in_pieces(client)
    assert marks.num_looks
    assert marks.seen == {1}


def send_in_pieces(client: Client) -> None:
    for is_void in (False, True):
        frame, payload = commit_of(client, BLOCKS if not is_void else make_blocks(1000, NUM_BLOCKS), is_void=is_void)
        client.sock.sendall(frame)
        for at in range(0, len(payload), 100_000):
            client.sock.sendall(payload[at : at + 100_000])
        is_committed(client, is_void=is_void)
        client.ping()
