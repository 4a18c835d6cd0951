"""Events to whoever listens: a ZeroMQ publisher, and past batches for those that ask."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from kvtier.clock import Clock, MonotonicClock
from kvtier.errors import ConfigError
from kvtier.events.batches import BatchBuffer
from kvtier.events.encoding import Event, encode_batch
from kvtier.events.listening import bind, remove
from kvtier.events.replays import Replays

__all__ = ["EventPublisher"]

logger = logging.getLogger("kvtier.events")

MAX_QUEUED = 1024
"""Batches that wait for the sending thread, which never waits for a listener: more is a thread that does not run."""
MAX_BUFFER_BYTES = 64 << 20
MAX_UNREAD = 1000
"""Batches that wait for one slow listener; it misses those after them."""
AFTER_ERROR_S = 0.1


class EventPublisher:
    """Sends batches from a thread of its own, each as topic, sequence and payload, as vLLM's publisher does.

    Nobody waits for a listener: one that is slow, and every one when `MAX_QUEUED` batches wait, misses batches, which a
    gap in the sequence shows. The missed ones are had from the replay address: the request is empty, sequence; each
    answer empty, topic, sequence, payload, from that sequence or the oldest that is kept on; the last one has the
    sequence -1 and nothing else. Sequences are 8 bytes, big-endian, and begin at 0.

    Mutable state: `_closed`, `_wake_fd`, `_last_ts`, guarded by `_lock`; the sockets, by the constructor and then the
    thread; batches are the buffer's.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_batches: int = 10_000,
        clock: Clock | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens when it returns. Raises ConfigError, and leaves nothing open, for an address that cannot be had.

        clock: of how long a listener may stall. on_lost: called on the thread when a listener asks for a batch that is
        not kept any more; quick.
        """
        self._topic = topic.encode()
        self._pid = os.getpid()
        self._buffer = BatchBuffer(MAX_QUEUED, buffer_batches if replay_endpoint else 0, MAX_BUFFER_BYTES)
        self._lock = threading.Lock()
        self._closed = False
        self._last_ts = 0.0
        self._linger_ms = 0
        self._context = zmq.Context()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._replays: Replays | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, MAX_UNREAD)
            self.endpoint = bind(self._publisher, endpoint, "events.endpoint")
            if replay_endpoint:
                router = self._context.socket(zmq.ROUTER)
                self._replays = Replays(router, self._buffer, self._topic, clock or MonotonicClock(), on_lost)
                self.replay_endpoint = bind(router, replay_endpoint, "events.replay_endpoint")
            self._thread = threading.Thread(target=self._run, name="kvtier-events-send", daemon=True)
            self._thread.start()
        except BaseException as error:
            self._give_back()
            if isinstance(error, zmq.ZMQError):
                raise ConfigError(f"events.endpoint: no socket could be opened: {error.strerror}") from error
            raise
        logger.info("KV events at %s, past ones at %s", self.endpoint, self.replay_endpoint or "no address")

    @property
    def num_dropped(self) -> int:
        """Batches that were not sent because too many waited; the replay address has them."""
        return self._buffer.num_dropped

    def publish(self, events: Sequence[Event]) -> int | None:
        """Queue one batch; its sequence, or None after `close`. Never blocks; any thread."""
        with self._lock:
            if self._closed:
                return None
            self._last_ts = max(self._last_ts, time.time())  # goes only forward, whatever the wall clock does
            sequence = self._buffer.add(encode_batch(self._last_ts, list(events)))
            self._wake()
            return sequence

    def close(self, timeout: float = 1.0) -> None:
        """Send what waits, to listeners that read within `timeout` seconds, and give everything back. Idempotent; in a
        forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._linger_ms = int(1000 * timeout)
                self._wake()
        self._thread.join(timeout + 1.0)
        if self._thread.is_alive():
            logger.warning("KV events: the sending thread did not end within %g s", timeout + 1.0)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _give_back(self) -> None:
        with self._lock:
            self._closed = True
            descriptor, self._wake_fd = self._wake_fd, -1
        os.close(descriptor)
        for endpoint in (self.endpoint, self.replay_endpoint or ""):
            with contextlib.suppress(OSError):
                remove(endpoint)
        self._context.destroy(self._linger_ms)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake_fd, zmq.POLLIN)
            if self._replays is not None:
                poller.register(self._replays.router, zmq.POLLIN)
            has_failed = False
            while not self._closed:
                try:
                    self._step(poller)
                except Exception:
                    if not has_failed:
                        logger.exception("KV events: sending failed, and is tried again; said once")
                    has_failed = True
                    time.sleep(AFTER_ERROR_S)
            self._send_waiting()
        finally:
            self._give_back()

    def _step(self, poller: zmq.Poller) -> None:
        self._send_waiting()
        timeout = None if self._replays is None else self._replays.advance()
        found = dict(poller.poll(timeout))
        if self._wake_fd in found:
            os.eventfd_read(self._wake_fd)

    def _send_waiting(self) -> None:
        while (batch := self._buffer.take()) is not None:
            # Never waits: a listener whose queue is full does not get it.
            self._publisher.send_multipart([self._topic, batch.sequence.to_bytes(8, "big"), batch.payload])
