"""Past batches for listeners that missed some: each request answered piece by piece, as fast as it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvtier.clock import Clock
from kvtier.events.batches import BatchBuffer

__all__ = ["END", "Replays"]

logger = logging.getLogger("kvtier.events")

END = (-1).to_bytes(8, "big", signed=True)
MAX_REPLAYS = 64
"""Requests that are answered at a time; others get no answer, and are for their callers to repeat."""
MAX_UNREAD = 256  # batches that wait for one listener
PIECE = 64  # batches for one listener before the others' turn
STALL_S = 30.0
STALLED_MS = 20
MAX_REQUEST_BYTES = 1024  # the handshake of a connection counts too


@dataclass(slots=True)
class _Replay:
    """The next sequence that a listener gets, and when it took the last one."""

    next: int
    moved_at: float


class Replays:
    """Answers requests on a ROUTER socket, not yet bound, which it owns. One thread.

    Mutable state: `_replays`, by the caller's identity.
    """

    def __init__(
        self, router: zmq.Socket[bytes], buffer: BatchBuffer, topic: bytes, clock: Clock, on_lost: Callable[[], None]
    ) -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error then, and not a batch less
        router.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.router = router
        self._buffer = buffer
        self._topic = topic
        self._clock = clock
        self._on_lost = on_lost
        self._replays: dict[bytes, _Replay] = {}

    def advance(self) -> int | None:
        """Take requests and send some of what is asked for. Milliseconds after which to come again; None: not before a
        request comes."""
        self._accept()
        timeouts = [self._advance(caller, replay) for caller, replay in list(self._replays.items())]
        return min((timeout for timeout in timeouts if timeout is not None), default=None)

    def _accept(self) -> None:
        for _ in range(MAX_REPLAYS):
            try:
                frames = self.router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.info("KV events: a replay request of %d frames that is none", len(frames))
                continue
            if len(self._replays) >= MAX_REPLAYS:
                continue  # read all the same: what is left unread would keep the thread awake
            start = int.from_bytes(frames[2], "big")
            self._replays[frames[0]] = _Replay(start, self._clock.now())
            if start < self._buffer.oldest:
                self._on_lost()

    def _advance(self, caller: bytes, replay: _Replay) -> int | None:
        try:
            for _ in range(PIECE):
                batch = self._buffer.since(replay.next)
                if batch is None:
                    self.router.send_multipart([caller, b"", b"", END, b""], zmq.DONTWAIT)
                    del self._replays[caller]
                    return None
                sequence = batch.sequence.to_bytes(8, "big")
                self.router.send_multipart([caller, b"", self._topic, sequence, batch.payload], zmq.DONTWAIT)
                replay.next, replay.moved_at = batch.sequence + 1, self._clock.now()
            return 0
        except zmq.Again:
            if self._clock.now() - replay.moved_at < STALL_S:
                return STALLED_MS
        except zmq.ZMQError:  # it is gone
            pass
        del self._replays[caller]
        return None
