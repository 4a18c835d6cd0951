"""Clients of a daemon that hang, wait or stand still, each in its own way: nobody else waits for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from kvtier.protocol import messages as m
from kvtier.protocol.admin import AskHealth
from kvtier.protocol.wire import pack
from kvtier.server.admin_client import AdminClient
from tests.server.daemon_rig import (
    BLOCK_BYTES,
    NAMESPACE,
    ServerProcess,
    make_blocks,
    short_directory,
    wait_for,
)

ROOT = Path(__file__).parents[2]
SOON_S = 0.1
NUM_ASKED = 20
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HANGS = """
import os, signal, sys
from pathlib import Path
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, Client
from kvtier.protocol import messages as m
client = Client.unix(Path(sys.argv[1]))
client.hello(wants_mapping=True)
client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"h" * 32, bytes(32))
client.send(m.Stage(7, NAMESPACE, BLOCK_BYTES, bytes.fromhex(sys.argv[2]), b"", 5000, False))
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def verify_soon(what: str, ask: Callable[[], object]) -> None:
    """Each of many times but for a few, where the machine has other work."""
    times = []
    for _ in range(NUM_ASKED):
        began = time.monotonic()
        ask()
        times.append(time.monotonic() - began)
    assert median(times) < SOON_S, f"{what}: {times}"


@pytest.mark.bug("HS12")
def test_a_client_that_hangs_holds_up_neither_clients_nor_health_nor_operators(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    health = f"http://127.0.0.1:{port}/healthz"
    settings = {
        "disk.path": directory / "disk",
        "disk.size": "64MiB",
        "disk.min_free": 0,
        "disk.max_write_rate": 4096,
        "daemon.http": f"127.0.0.1:{port}",
    }
    with ServerProcess(directory, settings) as server, server.connect() as good:
        good.hello()
        blocks = make_blocks(0, 8)
        good.store(blocks)
        command = [sys.executable, "-c", HANGS, str(server.socket), b"".join(blocks).hex()]
        hanging = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        with server.connect() as waiting, server.connect() as halfway, server.connect() as deaf:
            try:
                wait_for("it stands still, holding slots", lambda: state_of(hanging.pid) == "T")
                waiting.hello()  # for a write that takes minutes
                waiting.store(make_blocks(100, 64))
                due = b"".join(make_blocks(100, 64))
                waiting.send(m.WaitDurable(9, NAMESPACE, due, "disk", 600_000))
                halfway.hello()  # half of a payload, and no more
                reserved = halfway.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"p" * 32, bytes(32))
                commit = pack(m.Commit(9, list(reserved.reservations), [1]), BLOCK_BYTES)
                halfway.sock.sendall(commit + bytes(BLOCK_BYTES // 2))
                deaf.hello()  # asks, and reads no answer
                for number in range(30):
                    deaf.send(m.Stage(1 + number, NAMESPACE, BLOCK_BYTES, b"".join(blocks), b"", 5000, True))  # noqa: FBT003

                fresh = iter(range(1000, 2000))
                verify_soon("a block is stored", lambda: good.store(make_blocks(next(fresh), 1)))
                verify_soon("blocks are read", lambda: good.fetch(list(blocks)))
                verify_soon("health is told", lambda: DIRECT.open(health, timeout=5).read())

                def come_and_go() -> None:
                    with server.connect() as another:
                        another.hello()
                        another.ping()

                verify_soon("others come and go", come_and_go)
                with AdminClient(f"{server.socket}.admin", "the test") as admin:
                    verify_soon("an operator is answered", lambda: list(admin.ask(AskHealth(admin.next_id()))))
                assert good.fetch(list(blocks)) == list(blocks.values())
            finally:
                hanging.send_signal(signal.SIGKILL)
                hanging.wait()
        with server.connect() as last:
            last.hello()
            wait_for("nothing is held", lambda: last.ask(m.Stats).stats["quarantine"]["slots"] == 0)
