"""What each tier holds, heard from outside: the whole way from an engine's stores to a listener's map."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from kvtier.events.encoding import BlockRemoved, BlockStored, KVEventBatch
from kvtier.opened import OpenedTier, TierLimits
from kvtier.testing import FakeClock, RemoteDictTier
from kvtier_engine.testing.disk import DiskRig

TIMEOUT_S = 10.0


class Redis(RemoteDictTier):
    name = "redis"


class Listener:
    """Follows the events and keeps which blocks each medium holds."""

    def __init__(self, endpoint: str, clock: FakeClock) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.held: defaultdict[str | None, set[bytes | int]] = defaultdict(set)

    def hears(self) -> bool:
        """Whether something came of late."""
        heard = False
        self._clock.advance(1.0)  # events are gathered for a while
        while self._socket.poll(50):
            heard = True
            self._take(msgspec.msgpack.decode(self._socket.recv_multipart()[2], type=KVEventBatch))
        return heard

    def until(self, digests: Sequence[bytes], media: set[str]) -> None:
        """Listen until these media, and no others, hold all of these blocks."""
        deadline = time.monotonic() + TIMEOUT_S
        while {medium for medium, held in self.held.items() if held.issuperset(digests)} != media:
            assert time.monotonic() < deadline, self.held.keys()
            self.hears()

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def _take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.held[event.medium].update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held[event.medium].difference_update(event.block_hashes)
            else:
                self.held.clear()


def test_a_listener_knows_which_tier_holds_what(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    rig = DiskRig(tmp_path / "disk", events__endpoint=endpoint)
    listener = Listener(endpoint, rig.clock)
    try:
        redis = Redis()
        rig.opened._below.add(OpenedTier(redis, TierLimits(writers=2, timeout_s=1.0)), rig.disk_jobs)
        for start in range(0, 30_000, 100):  # until the subscription has reached the publisher
            rig.generate(list(range(start, start + 17)))
            if listener.hears():
                break
        prompt = list(range(40_000, 40_017))
        rig.generate(prompt)
        digests = rig.engine.digests(prompt)[:4]
        assert rig.flush() == 0
        listener.until(digests, {"CPU", "DISK", "REDIS"})
        rig.opened.host.reset(rig.opened.host.namespaces()[0])
        listener.until(digests, {"DISK", "REDIS"})
        rig.reset()
        listener.until(digests, set())
    finally:
        rig.close()
        listener.close()
