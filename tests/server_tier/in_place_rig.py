"""Stores whose host pool is a daemon's memory, and blocks by number in them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier.config import load_settings
from kvtier.granted import GrantedPool
from kvtier.keys import BlockDigest, Key, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.leases import Owner
from kvtier.lower import LowerTier
from kvtier.reasons import DropReason
from kvtier.server.daemon import Daemon
from kvtier.server.tenants import Tenant
from kvtier.space import Space
from kvtier.store import Store
from kvtier.tiers.reservation import Reservation
from kvtier.tiers.server import ServerTier
from tests.server_tier.rig import until

__all__ = [
    "BLOCK_BYTES",
    "DIGESTS",
    "NAMESPACE",
    "SLOT_BYTES",
    "TIMEOUT_S",
    "content",
    "device_of",
    "given_back",
    "held_at",
    "hung",
    "in_place",
    "is_quiet",
    "keys_of",
    "lower_of",
    "num_free",
    "open_store",
    "pool_of",
    "reserve",
    "restore",
    "settled",
    "stocked",
    "store_blocks",
]

LAYOUT = KVLayout(num_layers=5, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=8)
NAMESPACE = Namespace("m", "r", LAYOUT, "g", Shard(0, 1))
BLOCK_BYTES = LAYOUT.block_bytes
SLOT_BYTES = 3 << 12
DIGESTS = [BlockDigest(number.to_bytes(32, "big")) for number in range(1000)]
TIMEOUT_S = 2.0
DEADLINE_S = 20.0
assert BLOCK_BYTES == 10_240


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def open_store(url: str, **settings: object) -> Store:
    """settings: with two underscores for a dot."""
    overrides: dict[str, object] = {
        "host.size": "4MiB",
        "host.pool": "server",
        "server.url": url,
        "server.timeout_s": TIMEOUT_S,
    }
    overrides |= {name.replace("__", "."): value for name, value in settings.items()}
    return Store(load_settings(env={}, overrides=overrides))


@contextmanager
def in_place(url: str, **settings: object) -> Iterator[tuple[Store, Space]]:
    """A store that has free slots, unless `waits` is false; checked when the block ends well, closed in any case."""
    waits = settings.pop("waits", True)
    store = open_store(url, **settings)
    try:
        space = store.open_space(NAMESPACE)
        if waits:
            stocked(store)
        yield store, space
        store.check_integrity()
    finally:
        store.close()
    assert device_of(store).snapshot().mapped_bytes == 0


def pool_of(store: Store) -> GrantedPool:
    assert isinstance(store.pool, GrantedPool)
    return store.pool


def lower_of(store: Store) -> LowerTier:
    return store.tier("server")


def device_of(store: Store) -> ServerTier:
    device = lower_of(store).device
    assert isinstance(device, ServerTier)
    return device


def num_free(store: Store) -> int:
    return pool_of(store).classes()[SLOT_BYTES].num_free


def stocked(store: Store) -> None:
    until("slots are granted", lambda: num_free(store) > 0)


def reserve(space: Space, number: int, owner: Owner) -> Reservation:
    reserved = space.reserve(DIGESTS[number], DIGESTS[number - 1] if number else None, owner)
    assert isinstance(reserved, Reservation), reserved
    return reserved


def store_blocks(space: Space, numbers: Iterable[int]) -> dict[int, int]:
    """Those for which there is a slot; where each lies."""
    offsets: dict[int, int] = {}
    with space.owner("test") as owner:
        for number in numbers:
            reserved = space.reserve(DIGESTS[number], DIGESTS[number - 1] if number else None, owner)
            if isinstance(reserved, DropReason):
                continue
            reserved.lease.view[:BLOCK_BYTES] = content(number)
            offsets[number] = reserved.lease.offset
            space.commit([reserved])
    return offsets


def restore(space: Space, numbers: Sequence[int], owner: Owner | None = None) -> dict[int, int]:
    """Bring them to the local pool; where each of the leading ones lies that came, with its own bytes. owner: who keeps
    them leased."""
    digests = [DIGESTS[number] for number in numbers]
    questions = space.ask(digests, space.locate(digests))
    until("questions are answered", lambda: all(question.done for question in questions))
    found = space.locate(digests)
    stage = space.stage("r", digests, None, DEADLINE_S, found)
    if stage is not None:
        until("the stage ends", stage.poll)
    reader = owner or space.owner("reader")
    leases = space.lease(digests, reader)
    for number, lease in zip(numbers, leases, strict=False):
        assert lease.view[:BLOCK_BYTES] == content(number), f"block {number} has other bytes"
    offsets = {number: lease.offset for number, lease in zip(numbers, leases, strict=False)}
    if owner is None:
        reader.close()
    if stage is not None:
        stage.close()
    return offsets


def keys_of(space: Space, numbers: Iterable[int]) -> list[Key]:
    return [make_key(space.digest, DIGESTS[number]) for number in numbers]


def is_quiet(store: Store) -> bool:
    """Nothing is on its way, and no block is kept here that is the server's."""
    return not store.is_writing and store.host.num_blocks == 0


def settled(store: Store) -> None:
    until("nothing is on its way, and nothing kept", lambda: is_quiet(store))


def held_at(daemon: Daemon) -> int:
    """Bytes that clients hold, at the one tenant of a daemon."""
    (tenant,) = daemon.tenants
    assert isinstance(tenant, Tenant)
    return sum(tenant.held_bytes.copy().values())


def given_back(daemon: Daemon, *stores: Store) -> None:
    """Wait until the daemon has back all but what is free in these stores' pools."""
    until(
        "the daemon has it back",
        lambda: (
            held_at(daemon) == sum(num_free(store) * SLOT_BYTES for store in stores)
            and daemon.snapshot().tenants[0].clients.leases == 0
            and daemon.snapshot().tenants[0].quarantine.slots == 0
        ),
    )


@contextmanager
def hung(daemon: Daemon) -> Iterator[None]:
    """The daemon hears and says nothing within."""
    loop, goes_on, hangs = daemon._loop, threading.Event(), threading.Event()
    assert loop is not None

    def hang() -> None:
        hangs.set()
        goes_on.wait()

    loop.call_soon_threadsafe(hang)
    hangs.wait()
    try:
        yield
    finally:
        goes_on.set()
