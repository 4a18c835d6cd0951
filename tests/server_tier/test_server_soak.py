"""A daemon with a small pool over a disk, and dozens of client processes that are killed and stopped at random: no
wrong byte, and nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvtier.protocol import messages as m
from tests.server.daemon_rig import ServerProcess, resident_bytes, short_directory
from tests.server_tier.rig import get, opened, put, until
from tests.server_tier.soak_clients import START_S, ClientProcess, ClientProcesses

SHORT_S, SHORT_CLIENTS = 8.0, 16
LONG_CLIENTS = 64
MAX_STOPPED = 4
TICK_S = 0.05
KILL_RATE, STOP_RATE, CONT_RATE = 0.15, 0.3, 0.03  # a tick
MAX_STOP_S = 3.0
SETTLE_S = 60.0
GROWTH_BYTES = 8 << 20  # of the daemon's own memory, from the third quarter of a long run to the last
SETTINGS = {"host.size": "8MiB", "disk.size": "48MiB", "disk.min_free": 0}


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def held_files(pid: int) -> Counter[str]:
    """The daemon's descriptors by kind; the disk's files, of which there may be more or fewer, left out."""
    kinds: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            kind = re.sub(r"[\d/].*", "", str(path.readlink()))
            if kind:
                kinds[kind] += 1
    return kinds


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


class Havoc:
    """What is done to the clients, and what the daemon's memory was meanwhile."""

    def __init__(self, server: ServerProcess, processes: ClientProcesses, urls: list[tuple[str, str]]) -> None:
        self._server = server
        self._processes = processes
        self._urls = urls
        self._seed = 0
        self._stopped: dict[ClientProcess, float] = {}
        self.num_killed = self.num_stopped = 0
        self.memory: list[int] = []

    def start(self) -> None:
        url, token_file = self._urls[self._seed % len(self._urls)]
        self._processes.start(url, token_file, self._seed)
        self._seed += 1

    def run(self, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if rng.random() < KILL_RATE:
                victim = rng.choice(self._processes.clients)
                self._stopped.pop(victim, None)
                self._processes.remove(victim)
                self.num_killed += 1
                self.start()
            if rng.random() < STOP_RATE and len(self._stopped) < MAX_STOPPED:
                victim = rng.choice(self._processes.clients)
                victim.signal(signal.SIGSTOP)
                self._stopped[victim] = now
                self.num_stopped += 1
            for victim, since in list(self._stopped.items()):
                if rng.random() < CONT_RATE or now - since > MAX_STOP_S:
                    victim.signal(signal.SIGCONT)
                    del self._stopped[victim]
            self.memory.append(resident_bytes(self._server.pid))
            time.sleep(TICK_S)

    def end(self) -> int:
        """Kill half of them, ask the others to leave; how many these were. Returns when all are gone."""
        for victim in self._stopped:
            victim.signal(signal.SIGCONT)
        clients = self._processes.clients
        leaving = clients[len(clients) // 2 :]
        for client in leaving:
            client.signal(signal.SIGTERM)
        for client in [each for each in clients if each not in leaving]:
            self._processes.remove(client)
            self.num_killed += 1
        for client in leaving:
            assert client.has_ended(START_S), "a client does not leave"
        while clients:
            self._processes.remove(clients[0])
        return len(leaving)


def admin(server: ServerProcess, *command: str) -> tuple[int, Any]:
    words = [sys.executable, "-m", "kvtier", *command, "--socket", f"{server.socket}.admin", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SETTLE_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def ask_stats(server: ServerProcess) -> dict[str, Any]:
    with server.connect() as client:
        client.hello()
        stats: dict[str, Any] = client.ask(m.Stats).stats
        client.send(m.Bye())
        return stats


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.bug("LK10", "HS17", "HS12", "CR20", "AC09")
def test_clients_that_are_killed_and_stopped_at_random_leave_nothing_and_spoil_nothing(
    directory: Path, request: pytest.FixtureRequest
) -> None:
    soak_s = float(request.config.getoption("--soak-seconds"))
    seed = int(request.config.option.hypothesis_seed)
    token = directory / "token"
    token.write_text("a token that only this test knows\n")
    token.chmod(0o600)
    settings = SETTINGS | {
        "disk.path": str(directory / "disk"),
        "daemon.listen": "127.0.0.1:0",
        "daemon.credentials": f"default=uid:{os.getuid()},default=token:{token}",
        "daemon.dma_grace_s": 0.2,
        "daemon.reservation_s": 1.0,
    }
    with ServerProcess(directory, settings) as server, ClientProcesses(directory / "clients") as processes:
        (port,) = re.findall(r"ready after.* and 127\.0\.0\.1:(\d+)", server.text())
        near, far = f"kvtier+unix://{server.socket}", f"kvtier+tcp://127.0.0.1:{port}"
        with opened(near, timeout_s=5.0) as tier:  # what a daemon opens when it is first asked
            names = [f"before {number}" for number in range(700)]
            for at in range(0, 700, 50):
                put(tier, *names[at : at + 50])
            get(tier, *names)
        until("only what stays is open", lambda: ask_stats(server)["clients"]["unix"] == 1)
        files, threads = held_files(server.pid), num_threads(server.pid)

        havoc = Havoc(server, processes, [(near, "-"), (near, "-"), (near, "-"), (far, str(token))])
        for _ in range(LONG_CLIENTS if soak_s else SHORT_CLIENTS):
            havoc.start()
        havoc.run(random.Random(seed), soak_s or SHORT_S)
        num_leaving = havoc.end()
        until("all that left have said so", lambda: len(processes.log()) >= num_leaving)
        lines = [line.split() for line in processes.log()]
        assert not [line for line in lines if line[0] != "done"]
        assert len(lines) == num_leaving
        assert sum(int(line[3]) for line in lines) > 100, "blocks were read"
        assert havoc.num_killed >= 16
        assert havoc.num_stopped >= 5
        print(f"seed {seed}: {havoc.num_killed} killed, {havoc.num_stopped} stopped; of those that left {lines}")

        def is_over() -> bool:
            stats = ask_stats(server)
            counts = stats["clients"]
            held = stats["leases"], counts["leases"], counts["reservations"], stats["quarantine"]["slots"]
            return held == (0, 0, 0, 0) and (counts["unix"], counts["tcp"]) == (1, 0)

        until("nothing is held, and nobody is there", is_over, SETTLE_S)
        until("no descriptor more", lambda: held_files(server.pid) <= files, SETTLE_S)
        until("no thread more", lambda: num_threads(server.pid) <= threads, SETTLE_S)
        code, report = admin(server, "verify", "--integrity")
        assert code == 0, report
        print(report)
        quarter = len(havoc.memory) // 4
        growth = median(havoc.memory[-quarter:]) - median(havoc.memory[-2 * quarter : -quarter])
        print(f"the daemon's own memory: {havoc.memory[0] >> 20} to {havoc.memory[-1] >> 20} MiB")
        assert not soak_s or growth < GROWTH_BYTES
        with opened(near, timeout_s=5.0) as tier:
            put(tier, "after")
            assert get(tier, "after") == ["ok"]
        assert "Traceback" not in server.text()
