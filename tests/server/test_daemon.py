"""The daemon as a process: ready, checked, drained, killed and warm again."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import Settings, load_settings
from kvtier.errors import ConfigError
from kvtier.protocol import messages as m
from kvtier.protocol.wire import pack
from kvtier.server import daemon as daemon_module
from kvtier.server.cli import main
from kvtier.server.daemon import Daemon
from tests.server.daemon_rig import (
    BLOCK_BYTES,
    NAMESPACE,
    TIMEOUT_S,
    Client,
    ServerProcess,
    make_blocks,
    short_directory,
    wait_for,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def without_rings() -> Iterator[None]:
    """Loops that a test ran are collected in it, not in another."""
    yield
    gc.collect()


def settings_for(directory: Path, **daemon: object) -> Settings:
    return load_settings(
        env={},
        overrides={
            "host": {"size": "32MiB", "slab": 1 << 20},
            "daemon": {"socket": str(directory / "kv.sock"), "http": "off", "dma_grace_s": 0.0, **daemon},
        },
    )


# ---- in this process -------------------------------------------------------------------------------------------------


def test_a_daemon_in_a_thread_serves_and_leaves_nothing(directory: Path) -> None:
    with Daemon(settings_for(directory)) as daemon:
        assert daemon.is_ready
        with Client.unix(directory / "kv.sock") as client:
            welcome = client.hello()
            assert (welcome.tenant, welcome.version, welcome.mapping_bytes) == ("default", 1, 0)
            blocks = make_blocks(0, 4)
            assert client.store(blocks) == [m.CommitOutcome.STORED] * 4
            assert client.fetch(list(blocks)) == list(blocks.values())
            snapshot = daemon.snapshot()
            assert snapshot.state == "serving"
            assert (snapshot.tenants[0].clients.unix, snapshot.tenants[0].stats.host_blocks) == (1, 4)
    assert not daemon.is_ready
    assert daemon.snapshot().state == "closed"
    assert not list(directory.iterdir())


def test_the_mapping_is_sealed_and_comes_with_welcome(directory: Path) -> None:
    with Daemon(settings_for(directory)), Client.unix(directory / "kv.sock") as client:
        welcome = client.hello(wants_mapping=True)
        assert welcome.mapping_bytes == 32 << 20
        (fd,) = client.fds
        assert os.fstat(fd).st_size == welcome.mapping_bytes
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (0, 4096, 64 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)


def test_what_cannot_start_raises_and_leaves_nothing(directory: Path) -> None:
    with Daemon(settings_for(directory)), pytest.raises(ConfigError, match=r"daemon\.socket = .*another kvtier-server"):
        Daemon(settings_for(directory)).start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        token = directory / "token"
        token.write_text("t" * 32)
        settings = settings_for(directory, listen=f"127.0.0.1:{port}", credentials=f"default=token:{token}")
        with pytest.raises(ConfigError, match=r"daemon\.listen = .*stop what listens there"):
            Daemon(settings).start()
    settings = settings_for(directory, credentials=f"default=token:{directory / 'none'}")
    with pytest.raises(ConfigError, match=r"daemon\.credentials: the token's file"):
        Daemon(settings).start()


def test_named_tenants_share_disk_and_memory_and_no_block(directory: Path) -> None:
    tokens = {}
    for name in ("a", "b"):
        tokens[name] = name * 32
        (directory / name).write_text(tokens[name])
    settings = load_settings(
        env={},
        overrides={
            "host.slab": 1 << 20,
            "disk": {"path": str(directory / "disk"), "size": 64 << 20, "min_free": 0},
            "daemon": {
                "socket": "off",
                "listen": "127.0.0.1:0",
                "http": "off",
                "tenants": {"a": 8 << 20, "b": 24 << 20},
                "credentials": f"a=token:{directory / 'a'},b=token:{directory / 'b'}",
            },
        },
    )
    blocks = make_blocks(0, 2)
    with Daemon(settings) as daemon:
        assert daemon.tcp_address is not None
        sizes = {tenant.name: tenant.store.settings.disk.size for tenant in daemon.tenants}
        assert sizes == {"a": 16 << 20, "b": 48 << 20}
        with Client.tcp(daemon.tcp_address) as one, Client.tcp(daemon.tcp_address) as other:
            assert one.hello(tokens["a"]).tenant == "a"
            assert other.hello(tokens["b"]).tenant == "b"
            one.store(blocks)
            assert one.fetch(list(blocks)) == list(blocks.values())  # control: it is there
            assert other.fetch(list(blocks)) == [None, None]
    assert sorted(path.name for path in (directory / "disk").iterdir()) == ["a", "b"]


def test_tenants_need_memory_that_is_there(directory: Path) -> None:
    for tenants, words in (
        ({"default": 1 << 50}, r"daemon\.tenants: .* more than there are"),
        ({"default": "8KiB"}, r"daemon\.tenants: 'default' has 8192 bytes, less than one slab \(host\.slab = "),
    ):
        with pytest.raises(ConfigError, match=words):
            Daemon(settings_for(directory, tenants=tenants))


# ---- a process of its own --------------------------------------------------------------------------------------------


def test_sigterm_drains_and_exits_0(directory: Path) -> None:
    with ServerProcess(directory) as server, server.connect() as client:
        client.hello()
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert client.failure().code == m.FailureCode.CLOSING
        assert server.wait() == 0
        assert time.monotonic() - began < 5
        assert "ready after" in server.text()
        assert not server.socket.exists()


def test_sigterm_while_it_starts_ends_it_and_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_slowly(*_: object, **__: object) -> list[object]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was not heeded")

    monkeypatch.setattr(daemon_module, "open_tenants", open_slowly)
    with pytest.raises(SystemExit) as ended:
        Daemon(settings_for(directory)).run()
    assert ended.value.code == 0
    assert list(directory.glob("kv.sock*")) in ([], [directory / "kv.sock.lock"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_due_is_on_disk_after_sigterm(directory: Path) -> None:
    blocks = make_blocks(0, 64)
    disk = {"disk.path": directory / "disk", "disk.size": "64MiB", "disk.min_free": 0}
    with ServerProcess(directory, disk) as server:
        with server.connect() as client:
            client.hello()
            client.store(blocks)
            assert server.stop() == 0
        server.start()
        with server.connect() as client:
            client.hello()
            assert client.fetch(list(blocks)) == list(blocks.values())


@pytest.mark.bug("HS17")
def test_killed_and_started_again_it_is_warm_from_disk(directory: Path) -> None:
    blocks = make_blocks(0, 64)
    disk = {"disk.path": directory / "disk", "disk.size": "64MiB", "disk.min_free": 0}
    with ServerProcess(directory, disk) as server:
        with server.connect() as client:
            welcome = client.hello()
            assert list(welcome.tiers) == ["disk"]
            client.store(blocks)
            durable = client.ask(m.WaitDurable, NAMESPACE, b"".join(blocks), "disk", 10_000)
            assert durable.lost == bytes(len(blocks))
            reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"x" * 32, bytes(32))
            assert reserved.outcomes == bytes([m.ReserveOutcome.RESERVED])
            server.kill()
        assert server.socket.exists()  # stale: replaced
        server.start()
        with server.connect() as client:
            client.hello()
            assert client.fetch(list(blocks)) == list(blocks.values())
            reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"x" * 32, bytes(32))
            assert reserved.outcomes == bytes([m.ReserveOutcome.RESERVED])  # nobody fills it any more


def queue_writes(client: Client) -> None:
    """Blocks that wait to be written for minutes: those before them are not paid for yet."""
    blocks = make_blocks(0, 64)
    client.store(blocks)
    durable = client.ask(m.WaitDurable, NAMESPACE, b"".join(blocks), "disk", 10_000)
    assert durable.lost == bytes(len(blocks))
    client.store(make_blocks(64, 64))


@pytest.mark.bug("HS10")
def test_a_second_sigterm_ends_it_at_once(directory: Path) -> None:
    disk = {"disk.path": directory / "disk", "disk.size": "64MiB", "disk.min_free": 0, "disk.max_write_rate": 4096}
    with ServerProcess(directory, {**disk, "daemon.drain_s": 60}) as server, server.connect() as client:
        client.hello()
        queue_writes(client)
        server.signal(signal.SIGTERM)
        server.wait_for("stopping")
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
        assert time.monotonic() - began < 2
        assert not server.socket.exists()


@pytest.mark.bug("HS10")
def test_draining_is_bounded_whatever_is_on_its_way(directory: Path) -> None:
    disk = {"disk.path": directory / "disk", "disk.size": "64MiB", "disk.min_free": 0, "disk.max_write_rate": 4096}
    with ServerProcess(directory, {**disk, "daemon.drain_s": 0.5}) as server, server.connect() as client:
        client.hello()
        queue_writes(client)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5
        assert "64 blocks were not written to a lower tier within daemon.drain_s = 0.5 s" in server.text()


def test_a_request_on_its_way_is_answered_before_the_goodbye(directory: Path) -> None:
    disk = {"disk.path": directory / "disk", "disk.size": "64MiB", "disk.min_free": 0, "disk.max_write_rate": 16384}
    with ServerProcess(directory, disk) as server, server.connect() as client:
        client.hello()
        first, blocks = make_blocks(0, 1), make_blocks(1, 1)
        client.store(first)
        client.ask(m.WaitDurable, NAMESPACE, b"".join(first), "disk", 10_000)
        client.store(blocks)  # a second later
        client.send(m.WaitDurable(99, NAMESPACE, b"".join(blocks), "disk", 600_000))
        server.signal(signal.SIGTERM)
        answer = client.receive()
        assert isinstance(answer, m.Durable), answer
        assert client.failure().code == m.FailureCode.CLOSING
        assert server.wait() == 0


def test_another_daemon_on_the_same_socket_is_refused(directory: Path) -> None:
    with ServerProcess(directory) as server:
        done = subprocess.run(server.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"daemon.socket = '{server.socket}': another kvtier-server listens there" in done.stderr
        with server.connect() as client:
            client.hello()


def test_what_another_program_listens_on_or_is_no_socket_is_not_replaced(directory: Path) -> None:
    server = ServerProcess(directory)
    server.socket.write_text("precious")
    done = subprocess.run(server.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, server.socket.read_text()) == (2, "precious")
    assert "is no socket" in done.stderr
    server.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(server.socket))
        other.listen()
        done = subprocess.run(server.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 2
        assert "another process listens there" in done.stderr


def test_a_directory_that_others_may_write_to_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    server = ServerProcess(directory)
    done = subprocess.run(server.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert f"chmod go-w {directory}" in done.stderr


def test_the_service_manager_is_told(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory / "notify"))
        manager.settimeout(TIMEOUT_S)
        env = {"NOTIFY_SOCKET": str(directory / "notify"), "WATCHDOG_USEC": "300000"}
        with ServerProcess(directory, env=env) as server:

            def told(word: str) -> list[str]:
                while word not in (lines := manager.recv(4096).decode().split("\n")):
                    pass
                return lines

            assert any(line.startswith("STATUS=serving default on ") for line in told("READY=1"))
            told("WATCHDOG=1")
            told("WATCHDOG=1")
            server.signal(signal.SIGHUP)
            assert any(line.startswith("MONOTONIC_USEC=") for line in told("RELOADING=1"))
            told("READY=1")
            server.signal(signal.SIGTERM)
            told("STOPPING=1")
            assert server.wait() == 0


def test_sighup_reads_tokens_and_settings_again(directory: Path) -> None:
    token = directory / "token"
    token.write_text("a" * 32)
    config = directory / "kvtier.toml"
    disk = f'[disk]\npath = "{directory / "disk"}"\nsize = "64MiB"\nmin_free = 0\n'
    config.write_text(f'{disk}max_write_rate = 1048576\n[daemon]\nlog_level = "info"\nmax_clients = 9\n')
    given = {"daemon.listen": "127.0.0.1:0", "daemon.credentials": f"default=token:{token}"}
    with ServerProcess(directory, given, config=config) as server:
        line = next(line for line in server.text().splitlines() if "ready after" in line)
        host, _, port = line.partition(" and ")[2].partition(", for")[0].rpartition(":")
        address = (host, int(port))
        with Client.tcp(address) as old:
            old.hello("a" * 32)
            token.write_text("b" * 32)
            config.write_text(f'{disk}max_write_rate = 2097152\n[daemon]\nlog_level = "debug"\nmax_clients = 8\n')
            server.signal(signal.SIGHUP)
            text = server.wait_for("in effect after a restart only: daemon.max_clients")
            assert "changed: disk.max_write_rate, daemon.log_level" in text
            old.ping()  # who is in stays in
            with Client.tcp(address) as client:
                client.send(m.Hello(1, list(m.VERSIONS), "test", "a" * 32, False))  # noqa: FBT003
                assert client.failure().code == m.FailureCode.DENIED
            with Client.tcp(address) as client:
                client.hello("b" * 32)
            config.write_text("[daemon]\nmax_clients = 0\n")
            server.signal(signal.SIGHUP)
            assert "daemon.max_clients = 0" in server.wait_for("stay as they are")
            with Client.tcp(address) as client:
                client.hello("b" * 32)


def test_descriptors_do_not_outlive_an_exec(directory: Path) -> None:
    server = ServerProcess(directory, {"disk.path": directory / "disk", "disk.min_free": 0})
    with server, server.connect() as client:
        client.hello(wants_mapping=True)
        inherited = []
        for info in Path(f"/proc/{server.pid}/fdinfo").iterdir():
            flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
            if not int(flags, 8) & os.O_CLOEXEC and int(info.name) > 2:
                inherited.append((info.name, str(Path(f"/proc/{server.pid}/fd/{info.name}").readlink())))
        assert not inherited


KILLED = """
import os, sys
from pathlib import Path
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, Client
from kvtier.protocol import messages as m
client = Client.unix(Path(sys.argv[1]))
client.hello(wants_mapping=True)
digests = b"".join(bytes([number]) * 32 for number in range(8))
client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, digests, bytes(len(digests)))
held = client.ask(m.Stage, NAMESPACE, BLOCK_BYTES, bytes.fromhex(sys.argv[2]), b"", 1000, False)
assert len(held.leases) == 4
os.kill(os.getpid(), 9)
"""


@pytest.mark.bug("LK10", "HS17")
def test_clients_that_are_killed_leave_nothing(directory: Path) -> None:
    blocks = make_blocks(0, 4)
    with ServerProcess(directory, {"daemon.dma_grace_s": 0.05}) as server, server.connect() as good:
        good.hello()
        good.store(blocks)

        def counts() -> tuple[object, object]:
            stats = good.ask(m.Stats).stats
            return stats["leases"], stats["quarantine"]["slots"]

        files = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        for _ in range(3):
            command = [sys.executable, "-c", KILLED, str(server.socket), b"".join(blocks).hex()]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
            wait_for("nothing held", lambda: counts() == (0, 0))
        wait_for("no descriptor more", lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) <= files)
        assert good.fetch(list(blocks)) == list(blocks.values())


def test_who_hangs_up_and_lives_keeps_its_slots_from_others(directory: Path) -> None:
    with ServerProcess(directory) as server, server.connect() as good:
        good.hello()
        with server.connect() as client:
            client.hello(wants_mapping=True)
            reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"x" * 32, bytes(32))
        wait_for("quarantine", lambda: good.ask(m.Stats).stats["quarantine"]["slots"] == 1)
        again = good.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"x" * 32, bytes(32))  # the key is free at once
        assert again.outcomes == bytes([m.ReserveOutcome.RESERVED])
        assert again.offsets != reserved.offsets
        with server.connect() as client:
            client.hello(wants_mapping=True)
            client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"y" * 32, bytes(32))
            client.send(m.Bye())
            assert client.receive() is None
        assert good.ask(m.Stats).stats["quarantine"]["slots"] == 1


GRANTED = """
import os, sys
from pathlib import Path
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, Client, make_blocks
from kvtier.frame import payload_checksum
from kvtier.protocol import messages as m
client = Client.unix(Path(sys.argv[1]))
client.hello(wants_mapping=True)
granted = client.ask(m.Grant, BLOCK_BYTES, 4)
((digest, block),) = make_blocks(77, 1).items()
os.pwrite(client.fds[0], block, granted.offsets[0])
named = granted.reservations[:1], digest, bytes(32), [payload_checksum(block)]
assert client.ask(m.Publish, NAMESPACE, BLOCK_BYTES, *named).outcomes == bytes([m.PublishOutcome.STORED])
print(*granted.offsets, flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.bug("LK10", "HS17")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_stops_with_granted_slots_leaves_its_blocks_to_all_and_its_slots_to_nobody(
    directory: Path, how: signal.Signals
) -> None:
    blocks = make_blocks(77, 1)
    grace_s = 600 if how == signal.SIGKILL else 0
    settings = {"host.size": "2MiB", "daemon.dma_grace_s": grace_s}
    with ServerProcess(directory, settings) as server, server.connect() as good:
        good.hello(wants_mapping=True)
        command = [sys.executable, "-c", GRANTED, str(server.socket), str(int(how))]
        client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout is not None
            offsets = set(map(int, client.stdout.readline().split()))
            assert len(offsets) == 4

            def held() -> tuple[object, object]:
                stats = good.ask(m.Stats).stats
                return stats["leases"], stats["quarantine"]["slots"]

            expected = (4, 4 if how == signal.SIGKILL else 0)
            wait_for("what it held", lambda: held() == expected)
            assert good.fetch(list(blocks)) == list(blocks.values())
            digests = b"".join(make_blocks(1000, 60))
            taken = good.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, digests, bytes(len(digests)))
            assert taken.offsets
            assert not offsets & set(taken.offsets)
            good.ask(m.Abort, taken.reservations)
            client.kill()
            if not grace_s:
                wait_for("nothing held", lambda: held() == (0, 0))
                assert good.fetch(list(blocks)) == list(blocks.values())
        finally:
            client.kill()
            client.communicate()


@pytest.mark.bug("HS17")
def test_who_hangs_up_within_a_payload_leaves_the_key_to_others(directory: Path) -> None:
    with Daemon(settings_for(directory)) as daemon, Client.unix(directory / "kv.sock") as good:
        good.hello()
        blocks = make_blocks(0, 2)
        with Client.unix(directory / "kv.sock") as client:
            client.hello()
            reserved = client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(blocks), bytes(32) * 2)
            commit = m.Commit(9, list(reserved.reservations), [1, 2])
            client.sock.sendall(pack(commit, 2 * BLOCK_BYTES) + bytes(BLOCK_BYTES + 100))
            again = good.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(blocks), bytes(32) * 2)
            assert again.outcomes == bytes([m.ReserveOutcome.BEING_STORED]) * 2
        wait_for("its slots", lambda: good.ask(m.Stats).stats["leases"] == 0)
        assert good.store(blocks) == [m.CommitOutcome.STORED] * 2
        assert good.fetch(list(blocks)) == list(blocks.values())
        daemon.check_integrity()


@pytest.mark.bug("AC09")
def test_three_times_what_the_pool_holds_goes_through_it_and_adds_up(directory: Path) -> None:
    with Daemon(settings_for(directory)) as daemon, Client.unix(directory / "kv.sock") as client:
        client.hello()
        batches = [make_blocks(64 * number, 64) for number in range(3 * (32 << 20) // (64 * BLOCK_BYTES))]
        for batch in batches:
            client.store(batch)
        stats = client.ask(m.Stats).stats
        assert stats["host_used_bytes"] <= stats["host_reserved_bytes"] == 32 << 20
        assert stats["stored_blocks"] - stats["evicted_blocks"] == stats["host_blocks"] > 0
        assert client.fetch(list(batches[-1])) == list(batches[-1].values())
        assert client.fetch(list(batches[0])) == [None] * 64
        daemon.check_integrity()


# ---- --check ---------------------------------------------------------------------------------------------------------


def check(server: ServerProcess, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*server.command, "--check", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_check_shows_settings_and_sizing_and_starts_nothing(directory: Path) -> None:
    server = ServerProcess(
        directory,
        {
            "disk.path": directory / "disk",
            "daemon.tenants": "a=8MiB,b=24MiB",
            "daemon.credentials": "a=uid:1,b=uid:2",
            "redis.password": "hunter2",
        },
    )
    done = check(server, "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["settings"]["daemon.credits"] == {"value": 64, "source": "default"}
    assert report["settings"]["host.slab"]["source"] == "--set host.slab"
    sizing = report["sizing"]
    assert sizing["tenants"]["b"]["memory_bytes"] == 24 << 20
    assert sizing["tenants"]["b"]["disk_bytes"] == 48 << 30
    assert sizing["tenants"]["b"]["disk_paths"] == [str(directory / "disk" / "b")]
    assert sizing["memory"]["pools_bytes"] == 32 << 20
    assert sizing["open_files"]["needed"] > 1024
    assert {"memlock", "huge_pages", "numa_nodes", "disks"} <= set(sizing)
    assert not list(directory.iterdir())
    text = check(server)
    assert text.returncode == 0
    assert "ready to start" in text.stdout
    assert "tenants.b.memory_bytes: 25165824 (0.02 GiB)" in text.stdout
    assert "hunter2" not in done.stdout + text.stdout
    assert "daemon.credits = 64  (default)" in text.stdout
    assert "restore.enabled" not in text.stdout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"daemon.listen": "0.0.0.0:9408"}, ["daemon.listen", "daemon.credentials", "daemon.tls_client_ca_file"]),
        ({"daemon.tenants": "default=1024TiB"}, ["daemon.tenants", "more than there are"]),
        ({"daemon.credentials": "default=token:/nowhere/token"}, ["/nowhere/token", "cannot be read"]),
        ({"daemon.tls_cert_file": "/nowhere/c", "daemon.tls_key_file": "/nowhere/k"}, ["daemon.tls_cert_file"]),
        ({"daemon.sockt": "x"}, ["daemon.sockt", "did you mean daemon.socket?"]),
        ({"disk.path": "/proc/version"}, ["disk.path", "'/proc/version' is no directory"]),
        ({"daemon.socket": "/proc/version"}, ["daemon.socket", "no socket"]),
        ({"daemon.socket": "run/kv.sock"}, ["daemon.socket", "run/kv.sock", "whole path", "begins with '/'"]),
        ({"daemon.socket": "/nowhere/at/all.sock"}, ["daemon.socket", "there is no directory '/nowhere'"]),
        ({"daemon.socket_group": "no-such-group"}, ["daemon.socket_group = 'no-such-group'", "groupadd no-such-group"]),
    ],
)
def test_check_says_what_is_wrong_and_exits_1(
    directory: Path, settings: dict[str, object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"host.size": "64MiB", "daemon.socket": directory / "kv.sock", **settings}
    with pytest.raises(SystemExit) as ended:
        main(["--check", "--json", *(f"--set={name}={value}" for name, value in given.items())])
    assert ended.value.code == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert all(word in fault for word in words), fault


def test_check_names_extras_that_are_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvtier.server.checking.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(
            ["--check", "--json", "--set=host.size=64MiB", f"--socket={directory / 's'}", "--set=redis.url=redis://a:1"]
        )
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault.partition("pip install ")[2] for fault in faults] == ["'kvtier[server]'", "'kvtier[redis]'"]


def test_check_warns_of_places_that_are_taken_or_closed(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.chmod(0o700)
    monkeypatch.setattr("kvtier.server.checking.os.access", lambda place, mode: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        given = {
            "host.size": "64MiB",
            "disk.path": directory / "disk",
            "daemon.socket": directory / "s",
            "daemon.socket_group": os.getgid(),
        }
        with pytest.raises(SystemExit) as ended:
            main(["--check", "--json", f"--http={http}", *(f"--set={name}={value}" for name, value in given.items())])
    assert ended.value.code == 0
    said = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert f"daemon.http = '{http}' is in use" in said
    assert said.count(f"nothing can be written in '{directory}', for this user") == 2
    assert "StateDirectory=" in said
    assert f"chmod g+x {directory}" in said
    assert "names no other user than this one" in said


@pytest.mark.parametrize("listens", [True, False])
def test_check_warns_of_a_socket_that_is_listened_on_and_of_none_left_behind(
    directory: Path, listens: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        if listens:
            other.listen()
        with pytest.raises(SystemExit) as ended:
            main(["--check", "--json", "--set=host.size=64MiB", f"--socket={path}"])
    assert ended.value.code == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    told = [each for each in warnings if "is listened on now" in each]
    assert len(told) == listens
    assert all(f"daemon.socket = '{path}'" in each for each in told)


def test_json_without_check_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json"])
    assert ended.value.code == 2
    assert "--json is for --check" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--set=daemon.socket", "--set=daemon.sockt=x", "--set=daemon.credits=0"])
def test_a_wrong_argument_is_named_in_one_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "daemon." in said


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_the_log_is_json_and_the_audit_names_peers_and_no_token(directory: Path) -> None:
    token = directory / "token"
    token.write_text("s3cret-" * 5)
    given = {
        "daemon.log_format": "json",
        "daemon.listen": "127.0.0.1:0",
        "daemon.credentials": f"default=token:{token},default=uid:{os.getuid()}",
    }
    with ServerProcess(directory, given) as server:
        ready = json.loads(next(line for line in server.text().splitlines() if "ready after" in line))
        assert {"time", "level", "logger", "message"} <= ready.keys()
        host, _, port = ready["message"].partition(" and ")[2].partition(", for")[0].rpartition(":")
        with server.connect() as client:
            client.hello()
        with Client.tcp((host, int(port))) as client:
            client.hello("s3cret-" * 5)
        with Client.tcp((host, int(port))) as client:
            client.send(m.Hello(1, list(m.VERSIONS), "test", "wr0ng-" * 5, False))  # noqa: FBT003
            client.failure()
        with server.connect() as client:
            client.send(m.Ping(1))
            client.failure()

        def audited() -> list[dict[str, object]]:
            lines = [json.loads(line) for line in server.text().splitlines()]
            found = [line for line in lines if line["logger"] == "kvtier.audit"]
            return found if len(found) == 4 else []

        lines = wait_for("four lines in the audit log", audited)
        assert [line["outcome"] for line in lines] == ["welcome", "welcome", "denied", "protocol"]
        assert [line["tenant"] for line in lines] == ["default", "default", "", ""]
        assert lines[0]["uid"] == os.getuid()
        assert lines[0]["pid"] == os.getpid()
        assert str(lines[2]["address"]).startswith("127.0.0.1:")
        server.stop()
        assert "s3cret" not in server.text()
        assert "wr0ng" not in server.text()
