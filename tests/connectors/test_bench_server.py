"""kvtier-server's benchmark on sizes too small to say anything of speed: what it prints, and that it is measured."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.errors import KVTierError
from kvtier_connectors.bench import server_figures
from kvtier_connectors.bench.good import GOOD
from kvtier_connectors.bench.server_figures import ServerSizes
from kvtier_connectors.bench.server_rig import SERVER_NICENESS, Clients, Server, Work, apart, put_first

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = ServerSizes(moved_bytes=16 * MIB, lookup_blocks=500, pings=20, started_bytes=256 * MIB)
FIGURES = [
    *(
        f"server.{way}{suffix}.{move}.c{number}"
        for suffix in ("", ".unchecked")
        for ways in (("unix", "place"), ("tcp",))
        for number in (1, 4)
        for way in ways
        for move in ("store", "restore")
    ),
    "server.lookup",
    "server.ping",
    "server.start",
]


class SmallPool(ServerSizes):
    """Room for a slab of each client's layout, however little is moved."""

    @property
    def pool_bytes(self) -> int:
        return 256 * MIB


def test_every_figure_is_printed_and_no_process_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallPool(**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__})
    monkeypatch.setattr(server_figures, "ServerSizes", lambda: small)
    with pytest.raises(SystemExit) as exited:
        main(["bench", "server", "--shape", "smollm2", "--json", "--runs", "1"])
    assert exited.value.code == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == FIGURES
    for line in lines:
        assert line["figure"] in GOOD
        assert math.isfinite(line["value"])
        assert line["value"] > 0
        assert line["limit"] > 0
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_bytes_that_come_back_wrong_end_the_benchmark(tmp_path: Path) -> None:
    with Server(256 * MIB) as server, Clients(1, 64 << 10, 8, url=server.unix_url) as clients:
        clients.seconds(Work("server", "store"))
        clients.check("server")
        clients.seconds(Work("server", "renew"))
        with pytest.raises(KVTierError, match="a process of the benchmark ended"):
            clients.check("server")


# ---- CPUs ------------------------------------------------------------------------------------------------------------

SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is shared by all")
THREADED = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of two threads."""
    command = [sys.executable, "-c", THREADED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def cpus_of(pid: int) -> list[set[int]]:
    """Of each of its threads."""
    return [os.sched_getaffinity(int(thread.name)) for thread in sorted(Path(f"/proc/{pid}/task").iterdir())]


@SEVERAL
@pytest.mark.parametrize("fails", [False, True])
def test_processes_are_kept_apart_and_let_go(other: subprocess.Popen[bytes], fails: bool) -> None:
    mine, theirs = os.sched_getaffinity(0), cpus_of(other.pid)
    assert len(theirs) == 2
    try:
        with apart(other.pid):
            (here,) = os.sched_getaffinity(0)
            first, again = cpus_of(other.pid)
            assert first == again
            assert len(first) == 1
            assert here not in first
            if fails:
                raise KeyError("it fails within")
    except KeyError:
        assert fails
    assert os.sched_getaffinity(0) == mine
    assert cpus_of(other.pid) == theirs


def test_with_one_cpu_nothing_is_kept_apart(other: subprocess.Popen[bytes]) -> None:
    mine, theirs = os.sched_getaffinity(0), cpus_of(other.pid)
    only = {min(mine)}
    os.sched_setaffinity(0, only)
    try:
        with apart(other.pid):
            assert os.sched_getaffinity(0) == only
            assert cpus_of(other.pid) == theirs
        assert os.sched_getaffinity(0) == only
        assert cpus_of(other.pid) == theirs
    finally:
        os.sched_setaffinity(0, mine)


@SEVERAL
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_process_that_ends_meanwhile_leaves_the_others_where_they_were(
    other: subprocess.Popen[bytes], is_first: bool, is_reaped: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ending:
        assert ending.stdout is not None
        assert ending.stdout.readline() == b"ready\n"
        mine, theirs = os.sched_getaffinity(0), cpus_of(other.pid)
        try:
            with apart(*((ending.pid, other.pid) if is_first else (other.pid, ending.pid))):
                ending.send_signal(signal.SIGKILL)
                if is_reaped:
                    ending.wait()
                else:
                    os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)
            assert os.sched_getaffinity(0) == mine
            assert cpus_of(other.pid) == theirs
        finally:
            os.sched_setaffinity(0, mine)


def test_who_may_not_put_a_process_first_does_nothing(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, other.pid)
    asked: list[tuple[int, int, int]] = []

    def refused(which: int, who: int, priority: int) -> None:
        asked.append((which, who, priority))
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    put_first(other.pid)
    assert asked == [(os.PRIO_PROCESS, other.pid, SERVER_NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, other.pid) == before
