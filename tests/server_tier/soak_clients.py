"""Client processes of a kvtier-server that store, read, forget, are slow and are killed: `ClientProcesses` starts them.

They are forked, all of them, by one process that has imported what they need: dozens cost little more than one.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
NUM_NAMES = 3000
MAX_BATCH = 12
SLOW_SHARE = 0.1  # of copies, which take a while in the middle: who is killed is killed there
SLOW_S = 0.05
PAUSE_S = 0.02
TIMEOUT_S = 5.0
START_S = 60.0


class ClientProcess:
    """One of them, by its pidfd."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.is_stopped = False

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        self.is_stopped = number == signal.SIGSTOP

    def has_ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        os.close(self._pidfd)


class ClientProcesses:
    """Owns the process that forks, and closes every client that it started."""

    def __init__(self, log: Path) -> None:
        """log: of a line for each client that ended well, or saw something wrong."""
        self._log = log
        log.touch()
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.server_tier.soak_clients", str(log)]
        self._forker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        self.clients: list[ClientProcess] = []

    def start(self, url: str, token_file: str, seed: int) -> ClientProcess:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(f"{url} {token_file} {seed}\n")
        self._forker.stdin.flush()
        client = ClientProcess(int(self._forker.stdout.readline()))
        self.clients.append(client)
        return client

    def remove(self, client: ClientProcess) -> None:
        self.clients.remove(client)
        client.close()

    def log(self) -> list[str]:
        return self._log.read_text().splitlines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.clients:
            self.remove(self.clients[0])
        self._forker.communicate()


# ---- in the processes ------------------------------------------------------------------------------------------------


def work(url: str, token_file: str, seed: int, log: int) -> None:
    """Until SIGTERM; then everything is given back, and a line says what was done."""
    from kvtier.tiers.base import ReadOutcome
    from tests.server_tier.rig import get, key_of, opened, put

    rng = random.Random(seed)
    _slow_down(rng)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "connections": 2}
    if token_file != "-":
        settings["token_file"] = token_file
    num_stored = num_read = 0
    try:
        with opened(url, **settings) as tier:
            while not told:
                first, number = rng.randrange(NUM_NAMES), rng.randint(1, MAX_BATCH)
                names = [*range(first, first + number)] if rng.random() < 0.5 else rng.sample(range(NUM_NAMES), number)
                what = rng.random()
                if what < 0.35:
                    num_stored += sum(outcome == "stored" for outcome in put(tier, *names))
                elif what < 0.9:
                    outcomes = get(tier, *names)  # looks at every byte
                    num_read += outcomes.count(ReadOutcome.OK)
                    assert ReadOutcome.DAMAGED not in outcomes, f"damaged: {names}"
                elif what < 0.95:
                    with contextlib.suppress(Exception):  # in its time, or not
                        tier.contains([key_of(name) for name in names])
                else:
                    with contextlib.suppress(Exception):
                        tier.remove([key_of(names[0])])
                time.sleep(rng.random() * PAUSE_S)
    except BaseException as error:
        os.write(log, f"wrong {seed} {error!r}\n".encode())
        raise
    os.write(log, f"done {seed} {num_stored} {num_read}\n".encode())


def _slow_down(rng: random.Random) -> None:
    """Some copies into slots and out of them take a while, half done."""
    from kvtier.tiers.server import fetching, storing

    modules: tuple[Any, Any] = storing, fetching
    fill, take = modules[0].copy_in, modules[1].copy_checked

    def slow_fill(target: Any, source: Any, **options: Any) -> int:
        if rng.random() < SLOW_SHARE:
            target[: len(source) // 2] = source[: len(source) // 2]
            time.sleep(rng.random() * SLOW_S)
        return int(fill(target, source, **options))

    def slow_take(target: Any, source: Any, checksum: Any) -> bool:
        if rng.random() < SLOW_SHARE:
            target[: len(target) // 2] = source[: len(target) // 2]
            time.sleep(rng.random() * SLOW_S)
        return bool(take(target, source, checksum))

    modules[0].copy_in, modules[1].copy_checked = slow_fill, slow_take


def main() -> None:
    import tests.server_tier.rig  # noqa: F401 - once, for all of them

    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        url, token_file, seed = line.split()
        pid = os.fork()
        if not pid:
            try:
                work(url, token_file, int(seed), log)
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
