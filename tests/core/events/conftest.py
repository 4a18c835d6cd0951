"""A tier in a dictionary, a space whose epoch a test turns, and a listener that believes what it is told."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import Clock
from kvtier.config import HostSettings, MemorySnapshot, Settings
from kvtier.events import StoreEvents
from kvtier.keys import BlockDigest, Key, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.store import Space, Store
from kvtier.testing import FakeClock
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation

DOC = Path(__file__).parents[3] / "docs" / "events.md"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)  # 4 KiB a block
NAMESPACE = Namespace(model="weights", revision="r1", layout=LAYOUT, group="main", shard=Shard(0, 1))


def block(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


class FakeSpace:
    """One namespace; `reset` begins its next epoch."""

    namespace = NAMESPACE

    def __init__(self) -> None:
        self.epoch = 0

    @property
    def digest(self) -> bytes:
        return b"%016d" % self.epoch

    def reset(self) -> None:
        self.epoch += 1


class FakeTier:
    """A lower tier that its test fills and empties. `tell` is False where its callbacks are the test's to make."""

    def __init__(self, space: FakeSpace, name: str = "disk") -> None:
        self.name = name
        self.space = space
        self.blocks: dict[Key, Key | None] = {}
        self.callbacks: list[tuple[Any, Any]] = []
        self.tell = True
        self.failures = 0

    def subscribe(
        self,
        on_stored: Callable[[Sequence[tuple[Key, Key | None]]], None],
        on_gone: Callable[[Sequence[Key]], None],
    ) -> Callable[[], None]:
        pair = (on_stored, on_gone)
        self.callbacks.append(pair)
        return lambda: self.callbacks.remove(pair)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        if self.failures:
            self.failures -= 1
            raise OSError("the tier is ill")
        return [key in self.blocks for key in keys]

    def put(self, *numbers: int, parent: int | None = None) -> None:
        """Each the parent of the next one."""
        stored: list[tuple[Key, Key | None]] = []
        above = None if parent is None else self.key(parent)
        for number in numbers:
            stored.append((self.key(number), above))
            above = self.key(number)
        self.blocks.update(stored)
        if self.tell:
            for on_stored, _ in self.callbacks:
                on_stored(stored)

    def drop(self, *numbers: int) -> None:
        keys = [self.key(number) for number in numbers]
        for key in keys:
            self.blocks.pop(key, None)
        if self.tell:
            for _, on_gone in self.callbacks:
                on_gone(keys)

    def key(self, number: int) -> Key:
        return make_key(self.space.digest, block(number))

    def digests(self) -> set[BlockDigest]:
        """Of this epoch."""
        return {BlockDigest(key[16:]) for key in self.blocks if key.startswith(self.space.digest)}


class ListingTier(FakeTier):
    """Says what it holds."""

    def keys(self, namespace: bytes) -> Sequence[tuple[Key, Key | None]]:
        return [(key, parent) for key, parent in self.blocks.items() if key.startswith(namespace)]


class FakeStore:
    """A store's face to its events; the host tier and the settings are real."""

    def __init__(self, host: HostTier, lower: Sequence[FakeTier] = ()) -> None:
        self.host = host
        self.lower: Sequence[FakeTier] = tuple(lower)
        self.clock: Clock = FakeClock()
        self.settings = Settings()


class Rig:
    """What tests open, closed at their end."""

    block = staticmethod(block)
    fake_space = FakeSpace
    fake_tier = FakeTier
    listing_tier = ListingTier
    fake_store = FakeStore

    def __init__(self, path: Path) -> None:
        self.path = path
        self.to_close: list[Any] = []

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def open_store(self, blocks: int = 8, settings: Settings | None = None) -> tuple[Store, Space]:
        settings = settings or Settings(host=HostSettings(size=blocks * PAGE_BYTES, slab=4 * PAGE_BYTES))
        store = Store(settings, memory=MemorySnapshot(1 << 34, 1 << 34), touch=False)
        self.to_close.append(store)
        return store, store.open_space(NAMESPACE)

    def keep(self, closes: Any) -> Any:
        self.to_close.append(closes)
        return closes

    def put(self, space: Space, *numbers: int) -> None:
        """Blocks to host memory, each the parent of the next one."""
        with space.owner("put") as owner:
            for number, parent in zip(numbers, [None, *map(block, numbers)], strict=False):
                reservation = space.reserve(block(number), parent, owner)
                if isinstance(reservation, Reservation):
                    space.commit([reservation])

    def router(self, events: StoreEvents) -> Any:
        """The listener of docs/events.md."""
        (code,) = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
        script = self.path / "router.py"
        script.write_text(code)
        publisher: Any = events._publisher
        return self.keep(runpy.run_path(str(script))["Router"](publisher.endpoint, publisher.replay_endpoint))

    def close(self) -> None:
        for each in reversed(self.to_close):
            each.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()
