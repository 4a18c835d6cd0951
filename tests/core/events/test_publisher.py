"""What goes over the sockets, what a listener that missed something gets, and that nothing is left open."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from kvtier.errors import ConfigError
from kvtier.events import batches
from kvtier.events import replays as replays_module
from kvtier.events.encoding import AllBlocksCleared, BlockRemoved, Event
from kvtier.events.publisher import EventPublisher
from kvtier.testing import FakeClock

if TYPE_CHECKING:
    from tests.core.events.conftest import Rig

WAIT_MS = 5000
LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    opened: list[Any] = []
    make = context.socket

    def socket_of(kind: int) -> Any:
        opened.append(make(kind))
        return opened[-1]

    context.socket = socket_of  # type: ignore[method-assign, assignment]
    yield context
    for each in opened:
        each.close(linger=0)
    context.term()


@pytest.fixture
def publisher(rig: Rig) -> EventPublisher:
    opened: EventPublisher = rig.keep(EventPublisher(rig.address("pub"), rig.address("past"), topic="kv"))
    return opened


def removal(number: int) -> Event:
    return BlockRemoved(block_hashes=[b"%032d" % number], medium="CPU")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def listen(context: zmq.Context[Any], publisher: EventPublisher, topic: str = "") -> Any:
    """A listener whose subscription has arrived."""
    listener = context.socket(zmq.SUB)
    listener.subscribe(topic)
    listener.connect(publisher.endpoint)
    while not listener.poll(20):
        publisher.publish([AllBlocksCleared()])
    drain(listener)
    return listener


def drain(listener: Any) -> list[int]:
    """Sequences of what has come, until nothing comes for a while."""
    found: list[int] = []
    while listener.poll(200):
        found.append(int.from_bytes(listener.recv_multipart()[1], "big"))
    return found


def ask(context: zmq.Context[Any], publisher: EventPublisher, start: int) -> Any:
    caller = context.socket(zmq.DEALER)
    caller.connect(publisher.replay_endpoint)
    caller.send_multipart([b"", start.to_bytes(8, "big")])
    return caller


def replay(caller: Any) -> list[int]:
    """Sequences of the answers, without the last one, which must be the end."""
    found: list[int] = []
    while True:
        assert caller.poll(WAIT_MS), "no answer"
        empty, topic, sequence, payload = caller.recv_multipart()
        assert empty == b""
        if sequence == b"\xff" * 8:
            assert (topic, payload) == (b"", b"")
            return found
        assert topic == b"kv"
        found.append(int.from_bytes(sequence, "big"))


def test_a_message_is_topic_sequence_and_payload(context: zmq.Context[Any], publisher: EventPublisher) -> None:
    listener = listen(context, publisher, "kv")
    sequence = publisher.publish([removal(7)])
    assert sequence is not None
    assert listener.poll(WAIT_MS)
    topic, number, payload = listener.recv_multipart()
    assert (topic, number) == (b"kv", sequence.to_bytes(8, "big"))
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 60
    assert events == [{"type": "BlockRemoved", "block_hashes": [b"%032d" % 7], "medium": "CPU"}]
    assert rank is None


def test_time_never_goes_back(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (100.0, 50.0, 200.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        publisher.publish([removal(1)])
    found = [publisher._buffer._batches[n].payload for n in range(3)]
    assert [msgspec.msgpack.decode(payload)[0] for payload in found] == [100.0, 100.0, 200.0]


def test_past_batches_are_had_from_any_one_on(context: zmq.Context[Any], publisher: EventPublisher) -> None:
    for n in range(5):
        publisher.publish([removal(n)])
    wait_until(lambda: publisher._buffer.since(4) is not None)
    caller = ask(context, publisher, 2)
    assert replay(caller) == [2, 3, 4]
    caller.send_multipart([b"", bytes(8)])
    assert replay(caller) == [0, 1, 2, 3, 4]
    caller.send_multipart([b"", (5).to_bytes(8, "big")])
    assert replay(caller) == []
    caller.send_multipart([b"", b"\xff" * 8])
    assert replay(caller) == []


def test_more_than_fits_a_listeners_queue_is_replayed_whole(
    context: zmq.Context[Any], publisher: EventPublisher
) -> None:
    for n in range(3000):
        publisher.publish([removal(n)])
        if n % 500 == 0:
            time.sleep(0.01)
    wait_until(lambda: publisher._buffer.since(2999) is not None)
    assert replay(ask(context, publisher, 0)) == list(range(3000))


def test_one_that_does_not_read_its_answer_holds_up_nobody(
    context: zmq.Context[Any], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays_module, "MAX_UNREAD", 4)
    clock = FakeClock()
    publisher = rig.keep(EventPublisher(rig.address("pub"), rig.address("past"), topic="kv", clock=clock))
    events: list[Event] = [BlockRemoved(block_hashes=[bytes(32)] * 3000, medium="CPU")]
    for _ in range(200):
        publisher.publish(events)
    wait_until(lambda: publisher._buffer.since(199) is not None)
    stuck = context.socket(zmq.DEALER)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.setsockopt(zmq.RCVBUF, 4096)
    stuck.connect(publisher.replay_endpoint)
    stuck.send_multipart([b"", bytes(8)])
    wait_until(lambda: bool(publisher._replays._replays))
    assert replay(ask(context, publisher, 150)) == list(range(150, 200))
    listener = listen(context, publisher)
    assert publisher._replays._replays, "it is answered still"
    sequence = publisher.publish([removal(1)])
    assert drain(listener)[-1] == sequence
    clock.advance(replays_module.STALL_S + 1)
    wait_until(lambda: not publisher._replays._replays)


def test_nonsense_gets_no_answer_and_does_no_harm(context: zmq.Context[Any], publisher: EventPublisher) -> None:
    publisher.publish([removal(0)])
    caller = context.socket(zmq.DEALER)
    caller.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"", bytes(8), b""], [b"x", bytes(8)], [b"x"], [b"", bytes(500)]):
        caller.send_multipart(frames)
    assert not caller.poll(100)
    caller.send_multipart([b"", bytes(8)])
    assert replay(caller) == [0]
    flood = context.socket(zmq.DEALER)
    flood.connect(publisher.replay_endpoint)
    flood.send_multipart([b"", bytes(1 << 20)])
    assert replay(ask(context, publisher, 0)) == [0]


def test_who_asks_for_what_is_gone_makes_all_be_told_again(context: zmq.Context[Any], rig: Rig) -> None:
    lost = threading.Event()
    publisher = rig.keep(
        EventPublisher(rig.address("pub"), rig.address("past"), topic="kv", buffer_batches=2, on_lost=lost.set)
    )
    for n in range(5):
        publisher.publish([removal(n)])
    wait_until(lambda: publisher._buffer.oldest == 3)
    assert replay(ask(context, publisher, 3)) == [3, 4]
    assert not lost.is_set()
    assert replay(ask(context, publisher, 2)) == [3, 4]
    assert lost.wait(WAIT_MS / 1000)


def test_a_queue_that_is_full_drops_the_oldest_which_replay_has(
    context: zmq.Context[Any], publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen(context, publisher)
    first = publisher._buffer.next_sequence
    gate = threading.Event()
    take = batches.BatchBuffer.take

    def held(buffer: batches.BatchBuffer) -> Any:
        gate.wait()
        return take(buffer)

    monkeypatch.setattr(batches.BatchBuffer, "take", held)
    publisher._buffer._max_queued = 10
    for n in range(50):
        publisher.publish([removal(n)])  # and the caller is not held up
    gate.set()
    seen = drain(listener)
    assert seen == list(range(first + 40, first + 50))
    assert publisher.num_dropped == 40
    assert replay(ask(context, publisher, first)) == list(range(first, first + 50))


def test_a_failure_of_the_thread_is_said_and_survived(
    context: zmq.Context[Any],
    publisher: EventPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = listen(context, publisher)
    take = batches.BatchBuffer.take
    failures = [OSError("once"), OSError("twice")]

    def failing(buffer: batches.BatchBuffer) -> Any:
        if failures:
            raise failures.pop()
        return take(buffer)

    monkeypatch.setattr(batches.BatchBuffer, "take", failing)
    sequence = publisher.publish([removal(1)])
    assert listener.poll(WAIT_MS)
    assert drain(listener)[-1] == sequence
    assert len([r for r in caplog.records if r.name == "kvtier.events" and r.levelname == "ERROR"]) == 1


def test_after_close_nothing_is_published_and_the_address_is_free(rig: Rig) -> None:
    publisher = EventPublisher(LOOPBACK, LOOPBACK)
    endpoint = publisher.endpoint
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert "\0" not in endpoint
    publisher.close()
    publisher.close()
    assert publisher.publish([removal(1)]) is None
    again = EventPublisher(endpoint)
    again.close()
    path = Path(rig.address("pub").removeprefix("ipc://"))
    EventPublisher(rig.address("pub")).close()
    assert not path.exists()


def test_what_waits_is_sent_at_close(context: zmq.Context[Any], rig: Rig) -> None:
    publisher = EventPublisher(rig.address("pub"))
    listener = listen(context, publisher)
    sequences = [publisher.publish([removal(n)]) for n in range(100)]
    publisher.close(2.0)
    assert drain(listener) == sequences


def test_close_is_bounded_by_a_listener_that_does_not_read(context: zmq.Context[Any], rig: Rig) -> None:
    publisher = EventPublisher(LOOPBACK)
    listener = context.socket(zmq.SUB)
    listener.setsockopt(zmq.RCVHWM, 1)
    listener.setsockopt(zmq.RCVBUF, 4096)
    listener.subscribe("")
    listener.connect(publisher.endpoint)
    while not listener.poll(20):
        publisher.publish([removal(1)])
    for _ in range(300):
        publisher.publish([BlockRemoved(block_hashes=[bytes(32)] * 3000, medium="CPU")])
    begun = time.monotonic()
    publisher.close(0.3)
    assert time.monotonic() - begun < 1.5


def test_an_address_that_is_taken_is_an_error_that_names_the_setting(rig: Rig) -> None:
    first = rig.keep(EventPublisher(LOOPBACK))
    with pytest.raises(ConfigError, match=r"events\.endpoint = 'tcp.*in use; each engine needs an address of its own"):
        EventPublisher(first.endpoint)
    with pytest.raises(ConfigError, match=r"events\.replay_endpoint = 'tcp.*in use"):
        EventPublisher(LOOPBACK, first.endpoint)
    unix = rig.keep(EventPublisher(rig.address("pub")))
    with pytest.raises(ConfigError, match=r"events\.endpoint = 'ipc.*another process listens there; each engine"):
        EventPublisher(unix.endpoint)
    assert unix.publish([removal(1)]) == 0


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://", "tcp://127.0.0.1", "nonsense", "http://a:1", "tcp://192.0.2.1:5557", "ipc://"],
)
def test_an_address_that_is_none_is_an_error_too(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"events\.endpoint = '"):
        EventPublisher(endpoint)


def test_a_unix_socket_is_its_owners_alone_and_replaces_no_file(rig: Rig) -> None:
    path = rig.path / "pub"
    rig.keep(EventPublisher(f"ipc://{path}"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = rig.path / "precious"
    other.write_text("data")
    with pytest.raises(ConfigError, match="no socket"):
        EventPublisher(f"ipc://{other}")
    assert other.read_text() == "data"
    with pytest.raises(ConfigError, match=r"events\.endpoint"):
        EventPublisher(f"ipc://{rig.path}/missing/pub")
    with pytest.raises(ConfigError, match=r"events\.endpoint"):
        EventPublisher(f"ipc://{rig.path}/{'x' * 200}")


def test_a_socket_that_a_crash_left_is_replaced(rig: Rig) -> None:
    path = rig.path / "left"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    rig.keep(EventPublisher(f"ipc://{path}"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may do all of it")
def test_a_directory_that_may_not_be_written_to(rig: Rig) -> None:
    rig.path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="may write to"):
            EventPublisher(rig.address("pub"))
    finally:
        rig.path.chmod(0o700)


def test_a_forked_child_leaves_it_alone(publisher: EventPublisher) -> None:
    child = os.fork()
    if not child:
        publisher.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert publisher.publish([removal(1)]) == 0
    wait_until(lambda: publisher._buffer.since(0) is not None)
