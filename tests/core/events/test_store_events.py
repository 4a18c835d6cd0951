"""A store's events as a router follows them: docs/events.md's own, over sockets, or a list in place of these."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvtier.config import EventSettings, HostSettings, Settings
from kvtier.errors import ConfigError
from kvtier.events import StoreEvents, WatchedLower
from kvtier.events import pump as pump_module
from kvtier.events.encoding import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch
from kvtier.lower import LowerTier
from kvtier.memory import PAGE_BYTES
from kvtier.testing import FakeClock
from tests.core.events.conftest import DOC, FakeSpace, FakeStore, FakeTier, ListingTier, Rig, block

OFF = EventSettings()
WAIT_S = 5.0


def conforms(lower: LowerTier) -> WatchedLower:
    """For the type checker: the store's lower tiers can be followed."""
    return lower


class Listed:
    """Keeps batches in place of publishing them, and what a listener believes by then."""

    num_dropped = 0

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []
        self.media: dict[str, set[bytes]] = {}
        self.is_closed = False

    def publish(self, events: Sequence[Event]) -> int | None:
        self.batches.append(list(events))
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.media.clear()
                continue
            known = self.media.setdefault(event.medium or "", set())
            if isinstance(event, BlockStored):
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)
        return len(self.batches) - 1

    def close(self, timeout: float = 1.0) -> None:
        self.is_closed = True


class Followed:
    """A store of two fake tiers and a real host tier, its events not yet begun by a thread."""

    def __init__(self, rig: Rig) -> None:
        self.store, _ = rig.open_store()
        self.space = FakeSpace()
        self.disk = ListingTier(self.space, "disk")
        self.redis = FakeTier(self.space, "redis")
        self.clock = FakeClock()
        self.fake = FakeStore(self.store.host, [self.disk, self.redis])
        self.fake.clock = self.clock
        self.out = Listed()

    def open(self) -> StoreEvents:
        self.events = StoreEvents(self.fake, self.space, OFF, self.out)
        return self.events

    def flush(self) -> None:
        while self.events.flush():
            pass


@pytest.fixture
def followed(rig: Rig) -> Followed:
    return Followed(rig)


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


# ---- without a network -----------------------------------------------------------------------------------------------


def test_each_tier_has_its_medium_and_one_batch_has_all(followed: Followed) -> None:
    followed.disk.put(1, 2)
    events = followed.open()
    followed.redis.put(3)
    followed.flush()
    assert followed.out.batches[0] == [AllBlocksCleared()]
    (batch,) = followed.out.batches[1:]
    assert [(e.medium, e.block_hashes, e.parent_block_hash) for e in batch if isinstance(e, BlockStored)] == [
        ("DISK", [block(1), block(2)], None),
        ("REDIS", [block(3)], None),
    ]
    assert all(isinstance(e, BlockStored) and e.token_ids == [] and e.block_size == 4 for e in batch)
    assert not events.flush()
    assert len(followed.out.batches) == 2
    events.close()
    assert followed.out.is_closed
    assert not followed.disk.callbacks
    followed.disk.put(9)
    assert not events.flush()


def test_a_large_listing_goes_out_in_batches_of_bounded_size(followed: Followed) -> None:
    followed.disk.put(*range(20_000))
    events = followed.open()
    num_flushes = 1
    while events.flush():
        num_flushes += 1
    sizes = [sum(len(e.block_hashes) for e in batch if isinstance(e, BlockStored)) for batch in followed.out.batches]
    assert sum(sizes) == 20_000
    assert max(sizes) == pump_module.BATCH_BLOCKS
    assert num_flushes > 1
    events.close()


def test_tiers_that_come_and_go(followed: Followed) -> None:
    events = followed.open()
    followed.disk.put(1)
    followed.flush()
    other = ListingTier(followed.space, "shelf")
    other.put(5)
    followed.fake.lower = (followed.redis, other)
    followed.flush()
    assert followed.out.media == {"DISK": set(), "SHELF": {block(5)}}
    assert not followed.disk.callbacks
    followed.fake.lower = (followed.redis, other, followed.disk)
    followed.disk.put(*range(100, 3000))
    followed.flush()
    assert followed.out.media["DISK"] == followed.disk.digests()
    followed.fake.lower = ()
    followed.flush()
    followed.fake.lower = (followed.disk,)
    followed.flush()
    followed.fake.lower = ()
    events.flush()
    followed.fake.lower = (followed.disk,)
    followed.flush()
    assert followed.out.media["DISK"] == followed.disk.digests()
    events.close()


def test_a_tier_that_raises_keeps_no_others_changes_back(followed: Followed) -> None:
    events = followed.open()
    followed.disk.put(1)
    followed.redis.put(2)
    followed.disk.failures = 1
    with pytest.raises(OSError, match="ill"):
        events.flush()
    assert followed.out.media == {"REDIS": {block(2)}}
    followed.flush()
    assert followed.out.media["DISK"] == {block(1)}
    events.close()


def test_all_is_told_again_for_who_lost_it_but_not_too_often(followed: Followed) -> None:
    events = followed.open()
    followed.disk.put(1, 2)
    followed.flush()
    for _ in range(3):
        events._note_lost()
        followed.flush()
    assert sum(isinstance(e, BlockStored) for batch in followed.out.batches for e in batch) == 2
    followed.clock.advance(pump_module.RETELL_S)
    followed.flush()
    assert sum(isinstance(e, BlockStored) for batch in followed.out.batches for e in batch) == 3
    events.close()


def test_the_thread_wakes_by_itself_and_keeps_its_distance(followed: Followed) -> None:
    events = followed.open()
    followed.disk.put(1)
    events.start()
    wait_until(lambda: "DISK" in followed.out.media)
    num_batches = len(followed.out.batches)
    followed.disk.put(2)
    time.sleep(0.05)
    assert len(followed.out.batches) == num_batches, "by the store's clock no time has passed"
    followed.disk.drop(1)
    followed.clock.advance(pump_module.INTERVAL_S)
    wait_until(lambda: followed.out.media["DISK"] == {block(2)})
    assert len(followed.out.batches) == num_batches + 1
    followed.disk.put(3)
    events.close()
    assert followed.out.media["DISK"] == {block(2), block(3)}


def test_a_failure_in_the_thread_is_said_once_and_survived(
    followed: Followed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "LOOK_S", 0.01)
    monkeypatch.setattr(pump_module, "INTERVAL_S", 0.0)
    followed.disk.failures = 3
    events = followed.open()
    followed.disk.put(1)
    events.start()
    wait_until(lambda: "DISK" in followed.out.media)
    events.close()
    assert [r.levelname for r in caplog.records if r.name == "kvtier.events"] == ["ERROR"]


def test_off_nothing_is_followed_and_nothing_imported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store, space = rig.open_store()
    monkeypatch.setitem(sys.modules, "kvtier.events.publisher", None)
    monkeypatch.setitem(sys.modules, "kvtier.events.encoding", None)
    events = StoreEvents.open(store, space)
    assert not events.is_on
    assert not store.host._on_commit
    assert not events.flush()
    assert events.num_dropped == 0
    events.close()


def test_without_the_extra_it_says_what_to_install(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store, space = rig.open_store()
    monkeypatch.setitem(sys.modules, "kvtier.events.publisher", None)
    with pytest.raises(ConfigError, match=r"events\.endpoint = 'ipc.*pip install 'kvtier\[events\]'"):
        StoreEvents(store, space, EventSettings(endpoint=rig.address("pub")))


def test_what_fails_to_begin_leaves_nothing_open(followed: Followed, rig: Rig) -> None:
    class Broken(FakeTier):
        def subscribe(self, on_stored: Any, on_gone: Any) -> Any:
            raise RuntimeError("no")

    followed.fake.lower = (followed.disk, Broken(followed.space, "other"))
    with pytest.raises(RuntimeError, match="no"):
        StoreEvents(followed.fake, followed.space, EventSettings(endpoint=rig.address("pub")))
    assert not followed.disk.callbacks


# ---- with a router ---------------------------------------------------------------------------------------------------


def open_events(rig: Rig, name: str = "pub", **kwargs: Any) -> tuple[Any, Any, StoreEvents]:
    events = EventSettings(endpoint=rig.address(name), replay_endpoint=rig.address(f"{name}-past"), **kwargs)
    host = HostSettings(size=16 * PAGE_BYTES, slab=4 * PAGE_BYTES)
    store, space = rig.open_store(settings=Settings(host=host, events=events))
    return store, space, rig.keep(StoreEvents.open(store, space))


def in_host(store: Any, space: Any) -> set[bytes]:
    return {block(n) for n in range(400) if store.host.committed_run(space.digest, [block(n)])}


def follow_until(router: Any, true: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "the router did not come to that"
        router.step(50)


def known(router: Any, medium: str = "CPU") -> set[bytes]:
    return {digest for digest, media in router.media.items() if medium in media}


def test_a_router_follows_stores_evictions_and_resets(rig: Rig) -> None:
    store, space, events = open_events(rig)
    rig.put(space, 1, 2, 3)
    router = rig.router(events)
    follow_until(router, lambda: known(router) == {block(1), block(2), block(3)})
    rig.put(space, *range(10, 40))
    follow_until(router, lambda: known(router) == in_host(store, space))
    assert len(known(router)) == 16
    store.reset()
    follow_until(router, lambda: not router.media)
    rig.put(space, 1)
    follow_until(router, lambda: known(router) == {block(1)})


@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_misses_batches_ends_with_what_is_there(seed: int, rig: Rig) -> None:
    chance = random.Random(seed)
    store, space, events = open_events(rig, buffer_batches=chance.choice([3, 10_000]))
    events._must_retell.set()
    router = rig.router(events)
    for _ in range(60):
        if chance.random() < 0.05:
            store.reset()
        first = chance.randrange(300)
        rig.put(space, *range(first, first + chance.randrange(1, 12)))
        events.flush()
        if chance.random() < 0.3:
            router.step(5)
        for _ in range(chance.randrange(3)):  # the network's fault
            if chance.random() < 0.5 and router.events.poll(1):
                router.events.recv_multipart()
    events._retold_at -= pump_module.RETELL_S  # a listener that lost what is not kept need not wait for it here
    follow_until(router, lambda: known(router) == in_host(store, space))


def test_an_engine_that_began_anew_is_noticed(rig: Rig) -> None:
    _, space, events = open_events(rig)
    rig.put(space, 1, 2)
    router = rig.router(events)
    follow_until(router, lambda: len(known(router)) == 2)
    events.close()
    _, space, events = open_events(rig)
    rig.put(space, 7)
    follow_until(router, lambda: known(router) == {block(7)})


def test_one_that_comes_too_late_for_all_is_told_it_again(rig: Rig) -> None:
    _, space, events = open_events(rig, buffer_batches=2)
    for n in range(8):
        rig.put(space, n)
        events.flush()
    wait_until(lambda: events._publisher._buffer.oldest > 4)  # type: ignore[union-attr]
    router = rig.router(events)
    follow_until(router, lambda: known(router) == {block(n) for n in range(8)})


def test_two_engines_need_two_addresses(rig: Rig) -> None:
    store, space, _ = open_events(rig)
    with pytest.raises(ConfigError, match=r"events\.endpoint = .*another process listens there"):
        StoreEvents.open(store, space)
    assert len(store.host._on_commit) == 1


def test_the_documents_example_is_what_goes_over_the_wire() -> None:
    (text,) = re.findall(r"^```\n([0-9a-f\n]+)^```", DOC.read_text(), re.MULTILINE)
    a, b = bytes.fromhex("aa" * 32), bytes.fromhex("bb" * 32)
    events: list[Event] = [
        BlockRemoved(block_hashes=[a], medium="CPU"),
        BlockStored(
            block_hashes=[b],
            parent_block_hash=a,
            token_ids=[],
            block_size=16,
            lora_id=None,
            medium="DISK",
            lora_name=None,
        ),
    ]
    assert bytes.fromhex(text.replace("\n", "")) == encode_batch(1767225600.5, events)
    (shown,) = re.findall(r"^```json\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
    decoded = msgspec.msgpack.decode(encode_batch(1767225600.5, events))
    as_text = msgspec.to_builtins(decoded, builtin_types=(bytes,))

    def shorten(value: Any) -> Any:
        if isinstance(value, bytes):
            return f"{value.hex()[:2]}…{value.hex()[-2:]}"
        if isinstance(value, list):
            return [shorten(item) for item in value]
        return {k: shorten(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert msgspec.json.decode(shown) == shorten(as_text)


def test_numbers_in_the_document_are_the_codes() -> None:
    from kvtier.events import publisher, tracker

    text = DOC.read_text()
    for number in (tracker.MAX_TOLD, tracker.MAX_WAITING, publisher.MAX_UNREAD, publisher.MAX_QUEUED):
        assert f"{number:,} " in text
    assert f"every {pump_module.RETELL_S:.0f} s at most" in text
    assert f"some {1000 * pump_module.INTERVAL_S:.0f} ms later" in text
    assert f"{publisher.MAX_BUFFER_BYTES >> 20} MiB" in text
    assert f"{OFF.buffer_batches:,} batches are kept" in text
