"""`kvtier ping`, `stat`, `top`, `ls`, `flush` and `verify` of a daemon that runs: what they show, and how they fail."""

from __future__ import annotations

import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import __version__
from kvtier.cli import main
from kvtier.config import load_settings
from kvtier.live_tables import duration, rates
from kvtier.protocol import admin as a
from kvtier.protocol import messages as m
from kvtier.protocol.wire import pack
from kvtier.server.daemon import Daemon
from kvtier.server.opening import open_tenants
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, Client, make_blocks, short_directory, wait_for

BLOCKS = make_blocks(1, 12)


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path
    gc.collect()  # loops that a daemon ran


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def daemon(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """With a disk, and named by the environment."""
    overrides: dict[str, Any] = {
        "host": {"size": "8MiB", "slab": 1 << 20},
        "disk": {"path": [str(directory / "disk")], "size": "16MiB", "min_free": 1},
        "daemon": {"socket": str(directory / "kv.sock"), "http": "off", "dma_grace_s": 0.0},
    }
    monkeypatch.setenv("KVTIER_DAEMON__SOCKET", str(directory / "kv.sock"))
    with Daemon(load_settings(env={}, overrides=overrides), touch=False) as running:
        yield running


@pytest.fixture
def stored(daemon: Daemon) -> Daemon:
    """Twelve blocks in host memory and on disk."""
    with Client.unix(Path(daemon.settings.daemon.socket)) as client:
        client.hello()
        client.store(BLOCKS)
        client.send(m.Bye())
    (tenant,) = daemon.tenants
    assert tenant.store.flush(10.0) == 0
    return daemon


def run(args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args, commands=[])
    output = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, output.out, output.err


def show(args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """The JSON that a command prints, which ends well."""
    code, out, err = run([*args, "--json"], capsys)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


# ---- ping ------------------------------------------------------------------------------------------------------------


def test_ping_says_that_it_is_ready(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["ping"], capsys)
    assert code == 0
    assert f"kvtier-server {__version__} (pid {os.getpid()})" in out
    assert ": ready; up for " in out
    (report,) = show(["ping"], capsys)
    assert report["ready"] is True
    assert report["socket"] == daemon.settings.daemon.admin_path
    assert (report["daemon"], report["command"]) == (__version__, __version__)
    assert 0 < report["round_trip_ms"] < 20_000


def test_ping_says_why_it_is_not(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_state", "draining")
    code, out, _ = run(["ping"], capsys)
    assert code == 1
    assert "not ready: it was told to stop" in out
    code, out, _ = run(["ping", "--json"], capsys)
    assert (code, json.loads(out)["ready"], json.loads(out)["state"]) == (1, False, "draining")


def test_ping_of_a_daemon_that_starts_says_so(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()

    def open_later(*args: Any, **options: Any) -> Any:
        assert may_open.wait(20.0)
        return open_tenants(*args, **options)

    monkeypatch.setattr("kvtier.server.daemon.open_tenants", open_later)
    overrides = {"host.size": "1MiB", "host.slab": 1 << 20, "daemon.socket": str(directory / "s"), "daemon.http": "off"}
    daemon = Daemon(load_settings(env={}, overrides=overrides))
    starting = threading.Thread(target=daemon.start)
    starting.start()
    try:
        wait_for("its socket", (directory / "s.admin").exists)
        code, out, _ = run(["ping", "--socket", str(directory / "s.admin")], capsys)
    finally:
        may_open.set()
        starting.join()
        daemon.close()
    assert code == 1
    assert "not ready: the stores are being opened" in out


def test_ping_of_nobody_is_one_line_and_exit_code_one(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["ping", "--socket", str(directory / "none")], capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no kvtier-server at" in err
    code, out, err = run(["ping", "--socket", str(directory / "none"), "--json"], capsys)
    assert (code, json.loads(out)["state"], err) == (1, "unreachable", "")


# ---- stat and top ----------------------------------------------------------------------------------------------------


def test_stat_shows_what_is_counted(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    (document,) = show(["stat"], capsys)
    (tenant,) = document["tenants"]
    host, disk = tenant["tiers"]
    assert (document["state"], tenant["name"], tenant["stored_blocks"]) == ("serving", "default", len(BLOCKS))
    assert (host["blocks"], disk["blocks"], disk["due"], disk["pending"]) == (12, 12, 12, 0)
    code, out, _ = run(["stat", "--tenant", "default"], capsys)
    assert code == 0
    assert out.index("due so far") < out.index("of them pending")
    for words in ("serving; up for", "tenant default", "stored 12; ", "quarantine", "closed", "12 blocks, 192.0 KiB"):
        assert words in out, words


def test_a_tenant_that_is_none_is_named(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["stat", "--tenant", "nobody"], capsys)
    assert (code, out) == (2, "")
    assert "there is no tenant 'nobody'; there are: default" in err


def test_top_measures_an_interval_where_nobody_watches(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["top", "--interval", "0.05"], capsys)
    assert code == 0
    assert all(words in out for words in ("lookups", "GB restored", "default", "disk", "closed"))
    (row,) = show(["top", "--once", "--interval", "0.05"], capsys)
    assert row["seconds"] > 0
    assert [tier["tier"] for tier in row["tenants"][0]["tiers"]] == ["host", "disk"]


def test_top_goes_on_until_it_is_interrupted(
    stored: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([None, None, KeyboardInterrupt()])

    def pause(seconds: float) -> None:
        if (error := next(pauses)) is not None:
            raise error

    monkeypatch.setattr("kvtier.live_commands.time.sleep", pause)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.delenv("NO_COLOR")
    code, out, err = run(["top"], capsys)
    assert (code, err) == (0, "")
    assert out.count("fallbacks") == 2


def test_tables_fit_a_terminal(
    stored: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (["stat"], ["top", "--interval", "0.05"], ["ls"]):
        _, out, _ = run(command, capsys)
        tables = [line for line in out.splitlines() if line.startswith(("default", "disk", "host", "tenant", "tier"))]
        assert tables
        assert all(len(line) <= 80 for line in tables), out
        words = set(out.split())
        assert command != ["top", "--interval", "0.05"] or words >= {"restored", "fallbacks", "longest", "written"}


def document_of(uptime_s: float, **counts: Any) -> dict[str, Any]:
    tenant = {
        "name": "a",
        "lookups": 0,
        "asked_blocks": 0,
        "hit_blocks": 0,
        "stored_bytes": 0,
        "served_bytes": 0,
        "fallbacks": {},
        "waits": {"now": 1, "longest_s": 0.5, "count": 0, "seconds": 0.0},
        "tiers": [
            {"name": "host", "used_bytes": 5, "capacity_bytes": 10},
            {"name": "disk", "read_bytes": counts.pop("read", 0), "written_bytes": counts.pop("written", 0)},
        ],
        **counts,
    }
    return {"uptime_s": uptime_s, "state": "serving", "clients": 2, "problems": [], "tenants": [tenant]}


def test_rates_are_differences_by_time() -> None:
    before = document_of(10.0, lookups=5, asked_blocks=100, hit_blocks=50, stored_bytes=100, fallbacks={"timeout": 1})
    after = document_of(
        12.0,
        lookups=9,
        asked_blocks=140,
        hit_blocks=80,
        stored_bytes=500,
        served_bytes=4_000,
        fallbacks={"timeout": 2, "error": 3},
        read=600,
        written=200,
    )
    now = rates(before, after)
    (tenant,) = now["tenants"]
    assert now["seconds"] == 2.0
    assert (tenant["lookups_per_s"], tenant["hit_percent"], tenant["fallbacks_per_s"]) == (2.0, 75.0, 2.0)
    assert (tenant["stored_bytes_per_s"], tenant["restored_bytes_per_s"]) == (200.0, 2000.0)
    disk = tenant["tiers"][1]
    assert (disk["read_bytes_per_s"], disk["written_bytes_per_s"]) == (300.0, 100.0)
    assert tenant["tiers"][0]["read_bytes_per_s"] is None


def test_rates_of_a_daemon_that_was_started_again_count_from_its_start() -> None:
    now = rates(document_of(100.0, lookups=50), document_of(4.0, lookups=8))
    assert (now["seconds"], now["tenants"][0]["lookups_per_s"]) == (4.0, 2.0)
    assert now["tenants"][0]["hit_percent"] is None


def test_rates_of_a_tenant_that_is_new() -> None:
    before = {**document_of(1.0), "tenants": []}
    assert rates(before, document_of(2.0, lookups=8))["tenants"][0]["lookups_per_s"] == 8.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7322, "2 h 2 min"), (86_400, "1 d")]
)
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# ---- ls --------------------------------------------------------------------------------------------------------------


def test_ls_lists_namespaces_by_tier(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    rows = show(["ls"], capsys)
    assert [(row["tier"], row["namespace"], row["blocks"]) for row in rows] == [
        ("host", NAMESPACE.hex(), 12),
        ("disk", NAMESPACE.hex(), 12),
    ]
    assert rows[0]["bytes"] == 12 * BLOCK_BYTES
    assert [row["tier"] for row in show(["ls", "--tier", "disk"], capsys)] == ["disk"]
    assert {row["namespace"] for row in show(["ls", "--namespace", NAMESPACE.hex()], capsys)} == {NAMESPACE.hex()}
    assert not run(["ls", "--namespace", "00" * 16, "--json"], capsys)[1]
    code, out, _ = run(["ls"], capsys)
    assert code == 0
    assert NAMESPACE.hex() in out
    assert "24 blocks" in out


def test_ls_lists_every_block_within_a_limit(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {(NAMESPACE + digest).hex() for digest in BLOCKS}
    for tier in ("host", "disk"):
        rows = show(["ls", "--blocks", "--tier", tier, "--namespace", NAMESPACE.hex()], capsys)
        assert {row["key"] for row in rows} == keys
        assert {(row["tenant"], row["tier"], row["bytes"]) for row in rows} == {("default", tier, BLOCK_BYTES)}
    code, out, err = run(["ls", "--blocks", "--limit", "5"], capsys)
    assert (code, len(out.splitlines())) == (0, 5)
    assert "more than 5 blocks: raise --limit" in err


def test_a_namespace_that_is_none_is_refused(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["ls", "--blocks", "--namespace", "xyz"], capsys)
    assert code == 2
    assert "copy its 32 digits from `kvtier ls`" in err


# ---- flush -----------------------------------------------------------------------------------------------------------


def test_flush_writes_what_is_due(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["flush"], capsys) == [{"tenant": "default", "tier": "disk", "written": 0, "left": 0}]
    code, out, _ = run(["flush", "--tier", "disk", "--tenant", "default"], capsys)
    assert code == 0
    assert "disk: 0 blocks written, nothing is left to write" in out


def test_flush_that_does_not_end_in_time_is_exit_code_one(
    stored: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lower,) = stored.tenants[0].store.lower
    monkeypatch.setattr(type(lower), "flush", lambda self, timeout: 3)
    code, out, _ = run(["flush", "--wait", "0"], capsys)
    assert code == 1
    assert "3 blocks are not written" in out


def test_drop_forgets_when_it_is_told_twice(
    stored: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored.tenants[0].store
    for said in ("n\n", ""):  # or there is no terminal
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        code, _, err = run(["flush", "--drop"], capsys)
        assert code == 1
        assert "Forget all blocks of every tenant" in err
        assert "Nothing was forgotten: nobody said yes. Without a terminal, add --yes." in err
        assert store.host.num_blocks == 12
    assert show(["flush", "--drop", "--yes"], capsys) == [{"tenant": "default", "forgotten": 12, "epoch": 1}]
    assert (store.host.num_blocks, store.lower[0].tier.usage().num_blocks) == (0, 0)


def test_drop_spares_no_tier(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["flush", "--drop", "--yes", "--tier", "disk"], capsys)
    assert code == 2
    assert "leave --tier disk out" in err


def test_a_tier_that_is_none_is_no_empty_list(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["ls", "--tier", "diks"], capsys)
    assert (code, out) == (2, "")
    assert "--tier 'diks' is none: there are host, disk, redis" in err


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_what_is_whole(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = show(["verify", "--integrity"], capsys)
    assert [(tier["tier"], tier["blocks"], tier["damaged"]) for tier in report["tiers"]] == [
        ("host", 12, 0),
        ("disk", 12, 0),
    ]
    assert report["integrity"] == [{"tenant": "default", "problem": ""}, {"tenant": "", "problem": ""}]
    code, out, _ = run(["verify"], capsys)
    assert code == 0
    assert "host: 12 blocks compared, 192.0 KiB: 0 damaged" in out
    assert "counts" not in out


def test_verify_names_what_was_scribbled_over(stored: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    store = stored.tenants[0].store
    digest = list(BLOCKS)[4]
    with store.pool.owner("scribble") as owner:
        (held,) = store.host.lease_blocks([(NAMESPACE, digest)], owner)  # type: ignore[list-item]
        assert held is not None
        held.lease.view[5] ^= 1
    code, out, _ = run(["verify"], capsys)
    assert code == 1
    assert f"damaged, and forgotten: default: host: {(NAMESPACE + digest).hex()}" in out
    assert run(["verify"], capsys)[0] == 0


# ---- how they fail ---------------------------------------------------------------------------------------------------

ALL = [["stat"], ["top"], ["ls"], ["flush"], ["verify"], ["flush", "--drop", "--yes"]]


@pytest.mark.parametrize("command", ALL)
def test_where_nobody_listens_the_line_names_socket_and_way_out(
    command: list[str], directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_DAEMON__SOCKET", str(directory / "kv.sock"))
    code, out, err = run(command, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"no kvtier-server at {directory}/kv.sock.admin" in err
    assert "(daemon.socket, environment variable KVTIER_DAEMON__SOCKET)" in err
    assert "start kvtier-server" in err


def test_a_socket_that_a_killed_daemon_left_is_told_as_that(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "left"))
    _, _, err = run(["stat", "--socket", str(directory / "left")], capsys)
    assert "nobody listens on it: its daemon has ended" in err


def test_a_daemon_without_an_admin_socket_is_told_as_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_DAEMON__ADMIN_SOCKET", "off")
    code, _, err = run(["stat"], capsys)
    assert code == 2
    assert "KVTIER_DAEMON__ADMIN_SOCKET" in err
    assert "takes no commands" in err


def test_anothers_socket_is_told_as_whose_it_is(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (directory / "theirs").write_text("")
    _, _, err = run(["stat", "--socket", str(directory / "theirs")], capsys)
    assert f"(uid {os.geteuid()})'s, and you are " in err
    assert "ask as that user, or as root" in err


def test_the_engines_socket_is_not_this_one(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["stat", "--socket", daemon.settings.daemon.socket], capsys)
    assert code == 2
    assert "is no admin socket" in err
    assert ".admin" in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (pack(a.Failed(0, "version", "this kvtier-server 0.1 speaks version 9")), "this kvtier-server 0.1 speaks"),
        (pack(a.Failed(0, "denied", "this daemon is of user 7")), "this daemon is of user 7"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", f"this is kvtier {__version__}"),
        (pack(m.Pong(1)), f"this is kvtier {__version__}"),
        (b"", "closed the connection"),
        (pack(a.Greeted(1, "kvtier 0.1", 7)), "closed the connection"),
    ],
)
def test_whatever_answers_instead_is_one_line(
    answer: bytes, words: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / "odd"))
        listening.listen()

        def serve() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.recv(1 << 12)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        code, out, err = run(["stat", "--socket", str(directory / "odd")], capsys)
        thread.join()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("command", ["ping", "stat", "ls", "verify"])
def test_without_msgspec_the_line_says_what_to_install(command: str) -> None:
    code = f"import sys; sys.modules['msgspec'] = None; from kvtier.cli import main; main(['{command}'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvtier: asking a daemon needs the module msgspec: pip install 'kvtier[server]'\n"


def test_ls_and_verify_of_a_directory_need_no_daemon(
    stored: Daemon, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.close()
    rows = show(["ls", "--disk", str(directory / "disk")], capsys)
    assert {row["key"] for row in rows} == {(NAMESPACE + digest).hex() for digest in BLOCKS}
    assert show(["verify", "--disk", str(directory / "disk")], capsys)[0]["frames"] == 12


def test_a_command_that_is_interrupted_ends_its_work_in_the_daemon(
    stored: Daemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lower,) = stored.tenants[0].store.lower
    flushes: list[float] = []

    def flush(self: object, timeout: float) -> int:
        flushes.append(timeout)
        threading.Event().wait(timeout)
        return 3

    monkeypatch.setattr(type(lower), "flush", flush)
    # As at a terminal: what was started in the background of a script ignores the signal, and so do its children.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heeds}; from kvtier.cli import main; main()", "flush"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for("its flush", lambda: flushes)
        process.send_signal(2)
        assert process.wait(20) in (1, 130)
    wait_for("its end", lambda: not any("admin-command" in thread.name for thread in threading.enumerate()))
    assert len(flushes) < 10
    monkeypatch.undo()  # else the daemon's own last flush takes its whole time


def test_help_of_each_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ping", "stat", "top", "ls", "flush", "verify"):
        code, out, _ = run([name, "--help"], capsys)
        assert code == 0
        assert "--socket" in out
        assert "--json" in out
    code, out, _ = run(["flush", "--help"], capsys)
    assert "Nothing is forgotten: that is what --drop does" in " ".join(out.split())
