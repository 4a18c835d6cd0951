"""kvtier's events and vLLM's own: the same bytes for the same event, each read by the other's decoder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm import envs
from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import encoding as ours
from kvtier.events.publisher import EventPublisher

A, B, C = (bytes([n]) * 32 for n in (1, 2, 255))
FIELDS: dict[str, Any] = {
    "extra_keys": [("adapter",), None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 4096,
    "locality": "REMOTE",
    "ownership": "redis",
    "session_id": "s-1",
}
WAIT_MS = 10_000


def known_fields(kind: str) -> set[str]:
    """Those that this vLLM has too."""
    return set(getattr(theirs, kind).__struct_fields__) & set(getattr(ours, kind).__struct_fields__)


def events_of(module: Any) -> list[Any]:
    """The same events, of vLLM or of ours: as kvtier sends them, and with every field that both know."""
    stored: dict[str, Any] = {
        "block_hashes": [A, B],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    more = {name: value for name, value in FIELDS.items() if name in known_fields("BlockStored")}
    more_removed = {name: value for name, value in FIELDS.items() if name in known_fields("BlockRemoved")}
    return [
        module.BlockRemoved(block_hashes=[C], medium="DISK"),
        module.BlockRemoved(block_hashes=[C, A], medium=None, **more_removed),
        module.BlockStored(**stored),
        module.BlockStored(
            **{**stored, "parent_block_hash": C, "token_ids": [1, 2, 300_000], "lora_name": "x"}, **more
        ),
        module.AllBlocksCleared(),
    ]


@pytest.mark.parametrize("as_integers", [True, False])
def test_hashes_are_vllms_whole_or_their_last_eight_bytes(as_integers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_integers, raising=False)
    digest = bytes(range(32))
    assert maybe_convert_block_hash(digest) == (int.from_bytes(digest[-8:], "big") if as_integers else digest)


def test_field_names_and_their_order_are_vllms() -> None:
    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"):
        their_fields = getattr(theirs, kind).__struct_fields__
        our_fields = getattr(ours, kind).__struct_fields__
        assert [name for name in our_fields if name in their_fields] == [n for n in their_fields if n in our_fields]
        assert set(their_fields) <= set(our_fields), "vLLM has a field that we do not know"


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_the_same_events_are_the_same_bytes(rank: int | None) -> None:
    encode = msgspec.msgpack.encode
    for number in range(5):
        their_event, our_event = events_of(theirs)[number], events_of(ours)[number]
        assert encode(our_event) == encode(their_event)
    their_batch = theirs.KVEventBatch(ts=1.5, events=events_of(theirs), data_parallel_rank=rank)
    assert encode(ours.KVEventBatch(1.5, events_of(ours), rank)) == encode(their_batch)
    if rank is None:
        assert ours.encode_batch(1.5, events_of(ours)) == encode(their_batch)


def test_each_reads_the_other() -> None:
    read = msgspec.msgpack.Decoder(type=theirs.KVEventBatch).decode(ours.encode_batch(2.5, events_of(ours)))
    assert read.ts == 2.5
    assert read.events == events_of(theirs)
    payload = msgspec.msgpack.encode(theirs.KVEventBatch(ts=2.5, events=events_of(theirs)))
    assert msgspec.msgpack.decode(payload, type=ours.KVEventBatch).events == events_of(ours)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def messages(
    context: zmq.Context[Any], endpoint: str, replay_endpoint: str, publish: Any
) -> tuple[list[Any], list[Any]]:
    """What a listener gets of a publisher, live and by replay from 1 on; `publish` sends one batch."""
    listener, caller = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        listener.subscribe("")
        listener.connect(endpoint)
        deadline = time.monotonic() + WAIT_MS / 1000
        publish()
        while not listener.poll(50):
            assert time.monotonic() < deadline
            publish()
        live = [listener.recv_multipart()]
        while listener.poll(300):
            live.append(listener.recv_multipart())
        caller.connect(replay_endpoint)
        caller.send_multipart([b"", (1).to_bytes(8, "big")])
        past: list[Any] = []
        while not past or past[-1][2] != b"\xff" * 8:
            assert caller.poll(WAIT_MS)
            past.append(caller.recv_multipart())
        return live, past
    finally:
        listener.close(0)
        caller.close(0)


def without_payload(frames: list[list[bytes]]) -> list[list[bytes]]:
    return [each[:-1] for each in frames]


def test_messages_are_those_of_vllms_publisher(
    tmp_path: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 7.0)
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("a", "b", "c", "d")]
    publisher = theirs.ZmqEventPublisher(0, addresses[0], addresses[1], topic="kv")
    try:

        def publish_theirs() -> None:
            publisher.publish(theirs.KVEventBatch(ts=7.0, events=events_of(theirs)))

        their_live, their_past = messages(context, addresses[0], addresses[1], publish_theirs)
    finally:
        publisher.shutdown()
        theirs.zmq.Context.instance().term()
    own = EventPublisher(addresses[2], addresses[3], topic="kv")
    try:
        our_live, our_past = messages(context, addresses[2], addresses[3], lambda: own.publish(events_of(ours)))
    finally:
        own.close()
    decoder = msgspec.msgpack.Decoder(type=theirs.KVEventBatch)
    for live, past, rank in ((their_live, their_past, 0), (our_live, our_past, None)):
        first = int.from_bytes(live[0][1], "big")
        assert without_payload(live) == [[b"kv", n.to_bytes(8, "big")] for n in range(first, first + len(live))]
        last = first + len(live)
        assert without_payload(past[:-1]) == [[b"", b"kv", n.to_bytes(8, "big")] for n in range(1, last)]
        assert past[-1] == [b"", b"", b"\xff" * 8, b""]
        for *_, payload in [*live, *past[:-1]]:
            batch = decoder.decode(payload)
            assert (batch.ts, batch.events, batch.data_parallel_rank) == (7.0, events_of(theirs), rank)
    assert our_live[0][-1][:-1] == their_live[0][-1][:-1], "but for the rank"
