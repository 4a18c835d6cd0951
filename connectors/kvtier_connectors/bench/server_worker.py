"""A process of the server benchmarks, as `python -m kvtier_connectors.bench.server_worker JSON`: one of several clients
at once, each of which moves blocks to and from a kvtier-server, a store of its own, a store over the server's memory,
or a plain socket.

Reads a command a line from standard input: a JSON object with `side` (`server`, `own`, `place` or `plain`) and `way`
(`store`, `restore`, `lookup` or `renew`). Makes ready, prints `{"ready": true}`, waits for an empty line, does it, and
prints when it began and ended: seconds of the machine's monotonic clock, which all processes share.

With `{"serve": "echo", "path": ...}` or `{"serve": "sink", "port": ...}` it is the other end of a plain socket instead:
one that sends back what comes, or one that takes and gives bytes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.clock import MonotonicClock
from kvtier.config import HostSettings, ServerSettings, Settings
from kvtier.keys import BlockDigest, Key, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.bench.server_plain import PlainStream, serve_echo, serve_sink
from kvtier_connectors.copies import blocks_per_job

__all__ = ["command_of"]

NAMESPACE = b"kvtier bench".ljust(16, b"\0")
CALL_BYTES = 128 << 20
"""What one call moves: as much as one of write-behind does at most over a Unix socket. Its calls over TCP, and those of
reads, are smaller, and several are under way at once."""
SLAB = 64 << 20
HOST_SHARE = 2
"""Of a host pool that is the server's: room for what is stored, and as much again to be filled."""
TIMEOUT_S = 60.0
POLL_S = 0.0002


def command_of(**task: object) -> list[str]:
    """What to start."""
    return [sys.executable, "-P", "-m", "kvtier_connectors.bench.server_worker", json.dumps(task)]


class Blocks:
    """Blocks of noise, and as many buffers to read into."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes = block_bytes
        seed = int.from_bytes(os.urandom(8))
        self._memory = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self._targets = np.ones_like(self._memory)
        self.sources = [row.data for row in self._memory]
        self.targets = [row.data for row in self._targets]

    def new_keys(self) -> list[Key]:
        return [make_key(NAMESPACE, BlockDigest(os.urandom(32))) for _ in self.sources]

    def clear_targets(self) -> None:
        self._targets[:] = 0

    def check(self) -> None:
        assert np.array_equal(self._memory, self._targets), "blocks came back with other bytes"


class OfServer:
    """Through the tier, by one thread, in calls of CALL_BYTES."""

    def __init__(self, url: str, token_file: str | None, blocks: Blocks) -> None:
        from kvtier.tiers.server import ServerTier

        settings = ServerSettings(url=url, token_file=token_file, connections=1, timeout_s=TIMEOUT_S)
        self._tier = ServerTier(settings, MonotonicClock())
        assert self._tier.wait_mapped(TIMEOUT_S), "the server's memory did not come"
        self._blocks = blocks
        self._keys = blocks.new_keys()
        self._at_once = max(1, CALL_BYTES // blocks.block_bytes)

    def _starts(self) -> range:
        return range(0, len(self._keys), self._at_once)

    def store(self) -> None:
        for start in self._starts():
            part = slice(start, start + self._at_once)
            pairs = zip(self._keys[part], self._blocks.sources[part], strict=True)
            outcomes = self._tier.write([WriteRequest(key, None, source) for key, source in pairs])
            assert set(outcomes) == {WriteOutcome.STORED}, f"blocks were not stored: {set(outcomes)}"

    def restore(self) -> None:
        for start in self._starts():
            part = slice(start, start + self._at_once)
            pairs = zip(self._keys[part], self._blocks.targets[part], strict=True)
            outcomes = self._tier.read([ReadRequest(key, target) for key, target in pairs])
            assert set(outcomes) == {ReadOutcome.OK}, f"blocks did not come back: {set(outcomes)}"

    def lookup(self) -> None:
        assert all(self._tier.contains(self._keys)), "the server lost blocks"

    def renew(self) -> None:
        """Forget what was stored, and store under other names from now on."""
        self._tier.remove(self._keys)
        self._keys = self._blocks.new_keys()


class OfOwn:
    """A store within the process: what host memory alone takes and gives, reserved, copied and committed in place."""

    def __init__(self, blocks: Blocks) -> None:
        slot = -(-blocks.block_bytes // 4096) * 4096
        size = -(-len(blocks.sources) // (SLAB // slot)) * SLAB
        self._store = Store(Settings(host=HostSettings(size=size, slab=SLAB)))
        self._store.memory.wait_touched(TIMEOUT_S)
        self._owner = self._store.pool.owner("bench")
        self._blocks = blocks
        self._keys = blocks.new_keys()

    def store(self) -> None:
        host, buffer, size = self._store.host, self._store.pool.buffer, self._blocks.block_bytes
        for key, source in zip(self._keys, self._blocks.sources, strict=True):
            reservation = host.reserve(NAMESPACE, BlockDigest(key[16:]), None, size, self._owner)
            assert not isinstance(reservation, DropReason)
            offset = reservation.lease.offset
            np.copyto(buffer[offset : offset + size], source)
            host.commit([reservation])

    def restore(self) -> None:
        host, buffer, size = self._store.host, self._store.pool.buffer, self._blocks.block_bytes
        for key, target in zip(self._keys, self._blocks.targets, strict=True):
            (lease,) = host.lease_run(NAMESPACE, [BlockDigest(key[16:])], self._owner)
            np.copyto(np.frombuffer(target, np.uint8), buffer[lease.offset : lease.offset + size])
            lease.release()

    def renew(self) -> None:
        self._store.host.remove(self._keys)
        self._keys = self._blocks.new_keys()


class OfPlace:
    """A store whose host pool is the server's memory: reserved, copied and committed as by an engine, until all are
    published; asked for and staged, which adopts and verifies them, in parts of CALL_BYTES,
    and copied out."""

    def __init__(self, url: str, blocks: Blocks) -> None:
        from kvtier.tiers.server import ServerTier

        size = HOST_SHARE * len(blocks.sources) * blocks.block_bytes
        host, server = HostSettings(size=size, pool="server"), ServerSettings(url=url, timeout_s=TIMEOUT_S)
        self._store = Store(Settings(host=host, server=server))
        layout = KVLayout(1, 1, blocks.block_bytes // 4, "bfloat16", 1)  # keys and values of two bytes
        self._space = self._store.open_space(Namespace("kvtier bench", "", layout, "all", Shard(0, 1)))
        assert self._space.block_bytes == blocks.block_bytes
        self._owner = self._store.pool.owner("bench")
        self._tier = self._store.tier("server")
        self._has_ended = threading.Event()
        self._store.stager.subscribe(self._has_ended.set)
        self._blocks = blocks
        self._names = self._new_names()
        device = self._tier.device
        assert isinstance(device, ServerTier)
        self._at_once = max(1, min(CALL_BYTES, size // 4) // blocks.block_bytes)
        assert device.wait_mapped(TIMEOUT_S), "the server's memory did not come"

    def _new_names(self) -> list[BlockDigest]:
        return [BlockDigest(key[16:]) for key in self._blocks.new_keys()]

    def _keys(self, names: Sequence[BlockDigest]) -> list[Key]:
        return [make_key(self._space.digest, name) for name in names]

    def _reserve(self, name: BlockDigest) -> Reservation:
        """Once there is a slot: the server grants more while they are filled."""
        deadline = time.monotonic() + TIMEOUT_S
        while isinstance(reserved := self._space.reserve(name, None, self._owner), DropReason):
            assert reserved is DropReason.HOST_FULL, reserved
            assert time.monotonic() < deadline, "the server granted no slot"
            time.sleep(POLL_S)
        return reserved

    def store(self) -> None:
        buffer, size = self._store.pool.buffer, self._blocks.block_bytes
        at_once = blocks_per_job(size)  # of an engine's copies
        for start in range(0, len(self._names), at_once):
            part = slice(start, start + at_once)
            copied: list[Reservation] = []
            for name, source in zip(self._names[part], self._blocks.sources[part], strict=True):
                reservation = self._reserve(name)
                offset = reservation.lease.offset
                np.copyto(buffer[offset : offset + size], source)
                copied.append(reservation)
            self._space.commit(copied)
        assert self._store.flush(TIMEOUT_S) == 0, "blocks were not published"

    def restore(self) -> None:
        buffer, size = self._store.pool.buffer, self._blocks.block_bytes
        for start in range(0, len(self._names), self._at_once):
            part = slice(start, start + self._at_once)
            names = self._names[part]
            assert all(self._tier.look(self._keys(names)) or [False]), "the server lost blocks"
            stage = self._space.stage("bench", names, None, TIMEOUT_S)
            assert stage is not None
            while not stage.poll():
                self._has_ended.wait(TIMEOUT_S)
                self._has_ended.clear()
            leases = self._space.lease(names, self._owner)
            assert len(leases) == len(names), f"blocks did not come back: {stage.miss}"
            stage.close()
            for lease, target in zip(leases, self._blocks.targets[part], strict=True):
                np.copyto(np.frombuffer(target, np.uint8), buffer[lease.offset : lease.offset + size])
                lease.release()

    def renew(self) -> None:
        self._tier.tier.remove(self._keys(self._names))
        self._names = self._new_names()


class OfPlain:
    """A plain socket, the blocks one behind the other."""

    def __init__(self, port: int, blocks: Blocks) -> None:
        self._stream = PlainStream(port)
        self._blocks = blocks

    def store(self) -> None:
        self._stream.send(self._blocks.sources)

    def restore(self) -> None:
        self._stream.receive(self._blocks.targets)

    def renew(self) -> None:
        """Nothing was kept."""


def _run(task: dict[str, Any]) -> None:
    blocks = Blocks(task["block_bytes"], task["num_blocks"])
    sides: dict[str, Any] = {}
    if "url" in task:
        sides["server"] = OfServer(task["url"], task.get("token_file"), blocks)
    if task.get("place"):
        sides["place"] = OfPlace(task["url"], blocks)
    if task.get("own"):
        sides["own"] = OfOwn(blocks)
    if "port" in task:
        sides["plain"] = OfPlain(task["port"], blocks)
    _tell({"open": True})
    for line in sys.stdin:
        command = json.loads(line)
        side, way = command["side"], command["way"]
        if way == "store":
            sides[side].renew()
        if way == "restore" and command.get("check"):
            blocks.clear_targets()
        _tell({"ready": True})
        sys.stdin.readline()
        work: Callable[[], None] = getattr(sides[side], way)
        began = time.monotonic()
        work()
        ended = time.monotonic()
        if command.get("check"):
            blocks.check()
        _tell({"began": began, "ended": ended})


def _tell(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201 - a line to whoever started this


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("serve") == "echo":
        serve_echo(given["path"], lambda: _tell({"open": True}))
    elif given.get("serve") == "sink":
        serve_sink(given["num_bytes"], lambda port: _tell({"open": True, "port": port}))
    else:
        _run(given)
