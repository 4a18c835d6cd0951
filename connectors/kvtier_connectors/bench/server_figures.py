"""Figures of kvtier-server: bytes of several processes to it and back, look-ups, pings and its start."""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.layout import KVLayout
from kvtier_connectors.bench.figures import Figure, measure_pairs, steady
from kvtier_connectors.bench.server_rig import Clients, PlainEnd, Server, Work, apart

__all__ = ["ServerSizes", "server_figures"]

MAX_SLOW_RUNS = 11
CLIENTS = (1, 4)
LOOKUP_LIMIT_MS = 3.0
START_LIMIT_S = 1.5
SMALL_BLOCK_BYTES = 4096
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """What the figures of kvtier-server are measured on."""

    moved_bytes: int = 512 * MIB
    """Stored, or restored, in one run by all clients together."""
    lookup_blocks: int = 8192
    """Of one look-up; they are held."""
    pings: int = 1000
    """In one run."""
    started_bytes: int = 8 << 30
    """The pool of the server whose start is timed."""

    @property
    def pool_bytes(self) -> int:
        """What one run stored, and room: no run evicts."""
        return 2 * self.moved_bytes


def server_figures(shape: str, layout: KVLayout, runs: int, sizes: ServerSizes) -> Iterator[Figure]:
    """Each as soon as it is measured, at servers of their own."""
    slow_runs = min(runs, MAX_SLOW_RUNS)
    for checksums in (True, False):
        with Server(sizes.pool_bytes, checksums=checksums) as server:
            suffix = "" if checksums else ".unchecked"
            for number in CLIENTS:
                yield from _moves(server.unix_url, suffix, number, shape, layout, slow_runs, sizes)
            for number in CLIENTS:
                yield from _streams(server, suffix, number, shape, layout, slow_runs, sizes)
    with Server(sizes.pool_bytes) as server:
        yield _lookup(server, shape, runs, sizes)
        yield _ping(server, shape, runs, sizes)
    yield _start(shape, slow_runs, sizes)


def _moves(
    url: str, suffix: str, number: int, shape: str, layout: KVLayout, runs: int, sizes: ServerSizes
) -> Iterator[Figure]:
    """Beside as many processes that each have a store of their own."""
    num_blocks = max(1, sizes.moved_bytes // number // layout.block_bytes)
    with Clients(number, layout.block_bytes, num_blocks, url=url, own=True, place=True) as clients:
        yield from _pairs(clients, f"server.unix{suffix}", "server", "own", number, shape, runs)
        yield from _pairs(clients, f"server.place{suffix}", "place", "own", number, shape, runs)


def _streams(
    server: Server, suffix: str, number: int, shape: str, layout: KVLayout, runs: int, sizes: ServerSizes
) -> Iterator[Figure]:
    """Beside as many plain sockets."""
    num_blocks = max(1, sizes.moved_bytes // number // layout.block_bytes)
    end = PlainEnd(num_bytes=num_blocks * layout.block_bytes)
    try:
        token_file = str(server.token_file)
        with Clients(
            number, layout.block_bytes, num_blocks, url=server.tcp_url, token_file=token_file, port=end.port
        ) as clients:
            yield from _pairs(clients, f"server.tcp{suffix}", "server", "plain", number, shape, runs)
    finally:
        end.close()


def _pairs(clients: Clients, name: str, side: str, limit: str, number: int, shape: str, runs: int) -> Iterator[Figure]:
    for way in ("store", "restore"):
        yield measure_pairs(
            f"{name}.{way}.c{number}",
            shape,
            "GB/s",
            partial(clients.rate, side, way),
            partial(clients.rate, limit, way),
            runs,
        )
    clients.check(side)
    clients.seconds(Work(side, "renew"))


def _lookup(server: Server, shape: str, runs: int, sizes: ServerSizes) -> Figure:
    """Milliseconds; what a block's length is does not matter."""
    with Clients(1, SMALL_BLOCK_BYTES, sizes.lookup_blocks, url=server.unix_url) as clients:
        clients.seconds(Work("server", "store"))
        times = [clients.seconds(Work("server", "lookup")) * 1e3 for _ in range(runs + 1)][1:]
        clients.seconds(Work("server", "renew"))
    return Figure("server.lookup", shape, statistics.median(times), "ms", LOOKUP_LIMIT_MS, runs)


def _ping(server: Server, shape: str, runs: int, sizes: ServerSizes) -> Figure:
    """Microseconds, beside as many bytes there and back between two Python processes; each between two CPUs."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        path = Path(directory) / "echo"
        end = PlainEnd(path=path)
        try:
            with socket.socket(socket.AF_UNIX) as echo, apart(server.pid, end.pid):
                echo.connect(str(path))

                def ask() -> None:
                    echo.sendall(b"x" * PING_BYTES)
                    assert len(echo.recv(PING_BYTES)) == PING_BYTES

                def each(work: Callable[[], None]) -> float:
                    began = time.perf_counter()
                    for _ in range(sizes.pings):
                        work()
                    return (time.perf_counter() - began) / sizes.pings * 1e6

                return measure_pairs(
                    "server.ping", shape, "us", partial(each, server.client.ping), partial(each, ask), runs
                )
        finally:
            end.close()


PING_BYTES = 15
"""Of a ping's frame, and of its answer's."""


def _start(shape: str, runs: int, sizes: ServerSizes) -> Figure:
    """Seconds from the start of the process until a client was welcomed and had an answer."""
    times = []
    with steady():
        for _ in range(runs):
            with Server(sizes.started_bytes) as server:
                times.append(server.start_s)
    return Figure("server.start", shape, statistics.median(times), "s", START_LIMIT_S, runs)
