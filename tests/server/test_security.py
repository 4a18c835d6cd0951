"""Who may come in, and what whoever comes in wrongly gets: an end to his connection, and to no other's."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KVTierError
from kvtier.protocol import messages as m
from kvtier.protocol.wire import MAGIC, pack
from kvtier.server.cli import main
from kvtier.server.listening import UnixSocket
from kvtier.testing.redis_servers import TlsFiles, make_tls_files
from tests.server.daemon_rig import (
    BLOCK_BYTES,
    NAMESPACE,
    TIMEOUT_S,
    Client,
    ServerProcess,
    make_blocks,
    resident_bytes,
    short_directory,
    wait_for,
)

TOKEN = "a-token-of-some-length"
SLACK_BYTES = 24 << 20
"""By which a process may grow that was sent nonsense: buffers of connections that are open at once."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        (path / "token").write_text(TOKEN)
        yield path


def tcp_settings(directory: Path) -> dict[str, object]:
    return {
        "daemon.listen": "127.0.0.1:0",
        "daemon.credentials": f"default=token:{directory / 'token'},default=uid:{os.getuid()}",
    }


def tcp_address(server: ServerProcess) -> tuple[str, int]:
    line = next(line for line in server.text().splitlines() if "ready after" in line)
    host, _, port = line.rpartition(" and ")[2].partition(",")[0].rpartition(":")
    return host, int(port)


# ---- credentials -----------------------------------------------------------------------------------------------------


@pytest.mark.bug("SE03")
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"])
def test_tcp_without_a_credential_is_refused_at_start(
    directory: Path, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--socket={directory / 'kv.sock'}", f"--listen={listen}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in (listen, "daemon.credentials", "daemon.tls_client_ca_file"))


@pytest.mark.bug("SE03")
def test_by_default_only_the_owners_socket_and_loopback_are_open(directory: Path) -> None:
    with ServerProcess(directory, {"daemon.http": "127.0.0.1:0"}) as server:
        inodes = set()
        for path in Path(f"/proc/{server.pid}/fd").iterdir():
            target = str(path.readlink())
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
        for family in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{server.pid}/net/{family}").read_text().splitlines()[1:]]
            for row in rows:
                if row[9] in inodes:
                    assert row[1].startswith("0100007F:"), row
        assert server.socket.stat().st_mode & 0o777 == 0o600


def test_a_token_over_tcp(directory: Path) -> None:
    with ServerProcess(directory, tcp_settings(directory)) as server:
        address = tcp_address(server)
        with Client.tcp(address) as client:
            welcome = client.hello(TOKEN, wants_mapping=True)
            assert (welcome.tenant, welcome.mapping_bytes) == ("default", 0)
            assert not client.fds
            blocks = make_blocks(0, 8)
            client.store(blocks)
            assert client.fetch(list(blocks)) == list(blocks.values())
        for wrong in ("", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "x" * 512):
            with Client.tcp(address) as client:
                client.send(m.Hello(1, list(m.VERSIONS), "test", wrong, False))  # noqa: FBT003
                failed = client.failure()
                assert failed.code == m.FailureCode.DENIED
                assert TOKEN not in failed.text
        with server.connect() as client:
            client.hello()


def test_another_user_is_denied_on_the_unix_socket(directory: Path) -> None:
    settings = {"daemon.credentials": f"default=uid:{os.getuid() + 1}"}
    with ServerProcess(directory, settings) as server, server.connect() as client:
        client.send(m.Hello(1, list(m.VERSIONS), "test", TOKEN, True))  # noqa: FBT003
        assert client.failure().code == m.FailureCode.DENIED
        assert not client.fds


def test_a_group_may_open_the_engines_socket_and_no_other(directory: Path) -> None:
    place = directory / "run"
    settings = {"daemon.socket": place / "kv.sock", "daemon.socket_group": os.getgid()}
    server = ServerProcess(directory, settings)
    server.socket = place / "kv.sock"
    with server:
        modes = {path.name: path.stat().st_mode & 0o777 for path in place.iterdir()}
        assert modes.pop("kv.sock") == 0o660
        assert set(modes.values()) == {0o600}, modes
        assert (place.stat().st_mode & 0o777, place.stat().st_gid) == (0o710, os.getgid())
        assert (place / "kv.sock").stat().st_gid == os.getgid()
        with server.connect() as client:
            client.hello()


def test_a_group_that_cannot_be_had_or_is_shut_out_is_told(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(directory / "kv.sock")
    with pytest.raises(ConfigError, match="'no-such-group' is no group of this machine; `groupadd no-such-group`"):
        UnixSocket(path, "daemon.socket", "no-such-group")
    if os.geteuid():
        with pytest.raises(ConfigError, match="SupplementaryGroups="):
            UnixSocket(path, "daemon.socket", "0")
    assert not (directory / "kv.sock").exists()
    directory.chmod(0o700)
    opened = UnixSocket(path, "daemon.socket", str(os.getgid()))
    opened.close()
    assert f"chmod g+x {directory}" in caplog.text


NOBODY = 65_534
ASKS = """
import os, socket, sys
os.setgroups([int(sys.argv[2])] if sys.argv[2] else []); os.setgid(NOBODY); os.setuid(NOBODY)
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.connect(sys.argv[1])
    except PermissionError:
        sys.exit(13)
    sock.sendall(bytes.fromhex(sys.argv[3]))
    sys.exit(0 if b"denied" not in sock.recv(4096) else 1)
""".replace("NOBODY", str(NOBODY))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("group", "credentials", "code"),
    [(12345, NOBODY, 0), (12345, 0, 1), ("", NOBODY, 13)],
    ids=["in both", "in no credential", "not in the group"],
)
def test_an_engine_of_another_user_needs_the_group_and_a_credential(
    directory: Path, group: int | str, credentials: int, code: int
) -> None:
    directory.chmod(0o711)
    settings = {"daemon.socket_group": 12345, "daemon.credentials": f"default=uid:{credentials}"}
    hello = pack(m.Hello(1, list(m.VERSIONS), "test", "", True)).hex()  # noqa: FBT003
    with ServerProcess(directory, settings) as server:
        command = [sys.executable, "-c", ASKS, str(server.socket), str(group), hello]
        done = subprocess.run(command, timeout=TIMEOUT_S, check=False)
    assert done.returncode == code


@pytest.mark.bug("US05")
def test_a_version_of_another_time_is_told_both(directory: Path) -> None:
    with ServerProcess(directory) as server, server.connect() as client:
        client.send(m.Hello(1, [77, 99], "future 9.1", "", False))  # noqa: FBT003
        failed = client.failure()
        assert failed.code == m.FailureCode.VERSION
        assert all(word in failed.text for word in ("77", "99", "1", "future 9.1", "kvtier"))


def is_welcome(address: tuple[str, int], context: ssl.SSLContext | None) -> bool:
    """Whether a connection gets so far; with TLS 1.3 a client is told that it may not only when it reads."""
    try:
        with Client.tcp(address, context) as client:
            client.send(m.Hello(1, list(m.VERSIONS), "test", "", False))  # noqa: FBT003
            return isinstance(client.receive(), m.Welcome)
    except (OSError, KVTierError):
        return False


def mtls_settings(tls: TlsFiles) -> dict[str, object]:
    return {
        "daemon.listen": "127.0.0.1:0",
        "daemon.tls_cert_file": tls.server_cert_file,
        "daemon.tls_key_file": tls.server_key_file,
        "daemon.tls_client_ca_file": tls.ca_file,
        "daemon.credentials": "default=cert:kvtier testing client",
    }


def test_a_certificate_over_tls(directory: Path, tls: TlsFiles) -> None:
    with ServerProcess(directory, mtls_settings(tls)) as server:
        address = tcp_address(server)
        with Client.tcp(address, tls.client_context()) as client:
            assert client.hello().tenant == "default"
            blocks = make_blocks(0, 64)
            client.store(blocks)
            assert client.fetch(list(blocks)) == list(blocks.values())
        anonymous = ssl.create_default_context(cafile=str(tls.ca_file))
        assert not is_welcome(address, anonymous)
        assert not is_welcome(address, None)
        with Client.tcp(address, tls.client_context()) as client:
            client.hello()


def test_a_certificate_of_another_name_or_authority_is_denied(
    directory: Path, tls: TlsFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**mtls_settings(tls), "daemon.credentials": "default=cert:another name"}
    with ServerProcess(directory, settings) as server:
        with Client.tcp(tcp_address(server), tls.client_context()) as client:
            client.send(m.Hello(1, list(m.VERSIONS), "test", TOKEN, False))  # noqa: FBT003
            assert client.failure().code == m.FailureCode.DENIED
        other = make_tls_files(tmp_path_factory.mktemp("other"))
        context = ssl.create_default_context(cafile=str(tls.ca_file))
        context.load_cert_chain(other.client_cert_file, other.client_key_file)
        assert not is_welcome(tcp_address(server), context)


def test_certificates_are_read_again_by_sighup(
    directory: Path, tls: TlsFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("ca_file", "server_cert_file", "server_key_file")
    for name in names:
        shutil.copy(getattr(tls, name), directory / name)
    settings = {
        **mtls_settings(tls),
        "daemon.tls_cert_file": directory / "server_cert_file",
        "daemon.tls_key_file": directory / "server_key_file",
        "daemon.tls_client_ca_file": directory / "ca_file",
    }
    other = make_tls_files(tmp_path_factory.mktemp("rotated"))
    with ServerProcess(directory, settings) as server:
        address = tcp_address(server)
        with Client.tcp(address, tls.client_context()) as old:
            old.hello()
            for name in names:
                shutil.copy(getattr(other, name), directory / name)
            server.signal(signal.SIGHUP)
            server.wait_for("settings read again")
            assert is_welcome(address, other.client_context())
            assert not is_welcome(address, tls.client_context())
            old.ping()
            (directory / "server_key_file").write_text("no key")
            server.signal(signal.SIGHUP)
            assert "daemon.tls_key_file" in server.wait_for("stay as they are")
            assert is_welcome(address, other.client_context())


@pytest.mark.bug("SE05")
def test_secrets_are_in_no_page_and_no_log(directory: Path) -> None:
    settings = {
        **tcp_settings(directory),
        "daemon.http": "127.0.0.1:0",
        "redis.url": "redis://127.0.0.1:1",
        "redis.password": "hunter2-of-redis",
        "daemon.log_level": "debug",
    }
    env = {"SOME_SECRET": "hunter2-of-the-environment"}
    with ServerProcess(directory, settings, env=env) as server:
        line = next(line for line in server.text().splitlines() if "/status.json" in line)
        host, _, port = line.rpartition(" ")[2].rpartition(":")
        for path in ("/", "/status.json", "/metrics", "/healthz", "/none"):
            with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                page = b"".join(iter(lambda sock=sock: sock.recv(1 << 16), b""))  # type: ignore[misc]
            assert page.startswith(b"HTTP/1.1 404" if path == "/none" else b"HTTP/1.1 200")
            assert b"hunter2" not in page
            assert TOKEN.encode() not in page
        with server.connect() as client:
            client.hello()
            assert "hunter2" not in str(client.ask(m.Stats))
        server.stop()
        assert "hunter2" not in server.text()
        assert TOKEN not in server.text()


# ---- what is no message ----------------------------------------------------------------------------------------------

# What `pickle.dumps` makes of a call of os.system.
PICKLE = (
    b"\x80\x04\x95\x2a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"
    b"\x8c\x0ftouch /tmp/pwned\x94\x85\x94R\x94."
)
HELLO = pack(m.Hello(1, list(m.VERSIONS), "test", "", False))  # noqa: FBT003
NONSENSE = {
    "random": os.urandom(4096),
    "zeros": bytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "pickle": PICKLE,
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "a message of 4 GiB": MAGIC + struct.pack("<II", (1 << 32) - 1, 0),
    "a message of 1 GiB": MAGIC + struct.pack("<II", 1 << 30, 0),
    "a payload before Hello": MAGIC + struct.pack("<II", 16, 1 << 31) + bytes(16),
    "an empty message": MAGIC + struct.pack("<II", 0, 0),
    "no msgpack": MAGIC + struct.pack("<II", 5, 0) + b"\xc1\xc1\xc1\xc1\xc1",
    "deep msgpack": MAGIC + struct.pack("<II", 900, 0) + b"\x91" * 900,
    "a pickle in a frame": MAGIC + struct.pack("<II", len(PICKLE), 0) + PICKLE,
    "another message than Hello": pack(m.Ping(1)),
    "a Hello without versions": MAGIC + struct.pack("<II", 6, 0) + b"\x96\x01\x01\x90\xa0\xa0",
    "a Hello, then random": HELLO + os.urandom(512),
    "a Hello, then a Hello": HELLO + HELLO,
    "a Hello, then a huge payload": HELLO + MAGIC + struct.pack("<II", 8, (1 << 32) - 1) + bytes(8),
    "a server's message": pack(m.Pong(1)),
}


def is_ended(client: Client) -> bool:
    """Whether all that still comes is why the connection ends, and then its end."""
    try:
        while (answer := client.receive()) is not None:
            if isinstance(answer, m.Failed) and answer.id == 0:
                return client.receive() is None
    except ConnectionResetError:
        return True
    return False


@pytest.mark.bug("SE01", "SE11", "US05")
def test_nonsense_ends_its_own_connection_at_once_and_no_other(directory: Path) -> None:
    blocks = make_blocks(0, 4)
    with ServerProcess(directory, tcp_settings(directory)) as server, server.connect() as good:
        good.hello()
        good.store(blocks)
        address = tcp_address(server)
        before = resident_bytes(server.pid)
        for _ in range(20):
            for name, data in NONSENSE.items():
                for client in (server.connect(), Client.tcp(address)):
                    with client:
                        client.sock.sendall(data)
                        began = time.monotonic()
                        assert is_ended(client), name
                        assert time.monotonic() - began < 1, name
            good.ping()
        assert good.fetch(list(blocks)) == list(blocks.values())
        assert resident_bytes(server.pid) - before < SLACK_BYTES
        assert not Path("/tmp/pwned").exists()  # noqa: S108
        assert "Traceback" not in server.text()


def test_what_came_instead_is_named(directory: Path) -> None:
    with ServerProcess(directory) as server:
        for name, word in (
            ("http", "HTTP"),
            ("tls", "TLS"),
            ("pickle", "pickle"),
            ("another message than Hello", "Hello"),
        ):
            with server.connect() as client:
                client.sock.sendall(NONSENSE[name])
                failed = client.failure()
                assert failed.code == m.FailureCode.PROTOCOL
                assert word in failed.text


@pytest.mark.bug("SE11")
def test_who_is_silent_trickles_or_does_not_read_is_let_go_and_the_others_served(directory: Path) -> None:
    settings = {**tcp_settings(directory), "daemon.client_timeout_s": 1.0}
    blocks = make_blocks(0, 64)
    with ServerProcess(directory, settings) as server, server.connect() as good, contextlib.ExitStack() as stack:
        good.hello()
        good.store(blocks)
        before = resident_bytes(server.pid)
        silent = [stack.enter_context(Client.tcp(tcp_address(server))) for _ in range(10)]
        silent += [stack.enter_context(server.connect()) for _ in range(10)]
        trickles = [stack.enter_context(server.connect()) for _ in range(10)]
        late = [stack.enter_context(server.connect()) for _ in range(10)]
        for client in late:
            client.hello()
            client.sock.sendall(pack(m.Ping(2))[:-1])  # a frame that is never finished
        greedy = stack.enter_context(server.connect())
        greedy.hello()
        with contextlib.suppress(BrokenPipeError):
            for number in range(2, 40):
                greedy.send(m.Stage(number, NAMESPACE, BLOCK_BYTES, b"".join(blocks), b"", 1000, True))  # noqa: FBT003
        deadline = time.monotonic() + 3.0
        at = 0  # a byte of Hello each, twenty a second: not whole in the time
        while time.monotonic() < deadline:
            for client in trickles:
                with contextlib.suppress(OSError):
                    client.sock.send(HELLO[at : at + 1])
            at += 1
            good.ping()
            time.sleep(0.05)
        for client in (*silent, *trickles, *late):
            client.sock.settimeout(TIMEOUT_S)
            assert client.failure().code == m.FailureCode.PROTOCOL
        got = 0
        while data := _read(greedy.sock):  # what was on its way, then the end
            got += len(data)
        assert got < len(blocks) * BLOCK_BYTES
        assert good.fetch(list(blocks)) == list(blocks.values())
        assert resident_bytes(server.pid) - before < SLACK_BYTES
        _no_leases(good)


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def _no_leases(client: Client) -> None:
    """Nothing is held for connections that are over."""
    wait_for("no leases", lambda: client.ask(m.Stats).stats["leases"] == 0)


def test_more_clients_than_allowed_are_told_and_later_ones_served(directory: Path) -> None:
    with ServerProcess(directory, {"daemon.max_clients": 3}) as server:
        inside = [server.connect() for _ in range(3)]
        for client in inside:
            client.hello()
        with server.connect() as client:
            failed = client.failure()
            assert (failed.code, "daemon.max_clients" in failed.text) == (m.FailureCode.BUSY, True)
        inside.pop().close()

        def served() -> bool:
            with server.connect() as client:
                with contextlib.suppress(BrokenPipeError):  # turned away already
                    client.send(m.Hello(1, list(m.VERSIONS), "test", "", False))  # noqa: FBT003
                return isinstance(client.receive(), m.Welcome)

        wait_for("a place", served)
        for client in inside:
            client.ping()
            client.close()


def test_who_says_nothing_gives_its_place_to_who_does(directory: Path) -> None:
    settings = {**tcp_settings(directory), "daemon.max_clients": 3}
    with ServerProcess(directory, settings) as server, contextlib.ExitStack() as stack:
        inside = stack.enter_context(server.connect())
        inside.hello()
        silent = [stack.enter_context(Client.tcp(tcp_address(server))) for _ in range(2)]

        def served() -> Client | None:
            client = stack.enter_context(server.connect())
            with contextlib.suppress(BrokenPipeError):  # turned away already
                client.send(m.Hello(1, list(m.VERSIONS), "test", "", False))  # noqa: FBT003
            return client if isinstance(client.receive(), m.Welcome) else None

        newcomer = wait_for("a place", served, 5)  # long before daemon.client_timeout_s
        assert not _read(silent[0].sock)
        newcomer.ping()
        inside.ping()


def test_more_open_files_than_allowed_harm_nobody_who_is_in(directory: Path) -> None:
    with ServerProcess(directory) as server, server.connect() as good:
        good.hello()
        open_now = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_now + 8, hard))
        crowd = [server.connect() for _ in range(20)]
        server.wait_for("ulimit -n")
        good.ping()
        for client in crowd:
            client.close()

        def served() -> bool:
            with server.connect() as client:
                client.hello()
                return True

        assert wait_for("a place", served)
        good.ping()


# ---- crowds ----------------------------------------------------------------------------------------------------------


def connect_in_sequence(server: ServerProcess, count: int) -> None:
    for number in range(count):
        with server.connect() as client:
            if number % 2:
                client.hello()


def connect_at_once(server: ServerProcess, count: int) -> None:
    clients = [server.connect() for _ in range(count)]
    for client in clients:
        client.send(m.Hello(1, list(m.VERSIONS), "test", "", False))  # noqa: FBT003
    for client in clients:
        assert isinstance(client.receive(), m.Welcome)
    for number, client in enumerate(clients):
        client.send(m.Ping(2 + number))
    for client in clients:
        assert isinstance(client.receive(), m.Pong)
        client.close()


@pytest.mark.parametrize(
    ("in_sequence", "at_once"), [(1000, 300), pytest.param(10_000, 1000, marks=[pytest.mark.soak, pytest.mark.slow])]
)
def test_crowds_come_and_go_and_leave_nothing(directory: Path, in_sequence: int, at_once: int) -> None:
    with ServerProcess(directory) as server, server.connect() as good:
        good.hello()
        connect_in_sequence(server, 200)
        connect_at_once(server, at_once)
        good.ping()
        wait_for("only one connection", lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 40)
        before, files = resident_bytes(server.pid), len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        began = time.monotonic()
        connect_in_sequence(server, in_sequence)
        connect_at_once(server, at_once)
        print(f"{in_sequence} connects in sequence and {at_once} at once: {time.monotonic() - began:.2f} s")
        good.ping()
        wait_for("no descriptor more", lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) <= files)
        assert resident_bytes(server.pid) - before < SLACK_BYTES
        assert "Traceback" not in server.text()
