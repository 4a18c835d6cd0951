"""What the Redis benchmark does once and times: the same blocks through the tier and through the least client."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import numpy as np
from pydantic import SecretStr

from kvtier.clock import MonotonicClock
from kvtier.config import RedisSettings, load_settings
from kvtier.errors import ConfigError
from kvtier.keys import Key
from kvtier.layout import KVLayout
from kvtier.testing.redis_servers import RedisConnection, RedisReplyError
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.redis import RedisTier
from kvtier_connectors.bench.figures import Timed, seconds_of
from kvtier_connectors.bench.plain import JOB_BYTES
from kvtier_connectors.bench.redis_limit import DEFAULT_PORT, Place, RawBlock, RawClient, run_jobs

__all__ = ["LookupBench", "RedisBench", "RedisSizes", "Values", "named_place"]

TIMEOUT_S = 60.0
TENANT = "bench"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RedisSizes:
    """What the figures of the Redis tier are measured on."""

    moved_bytes: int = 256 * MIB
    """Stored, or restored, in one run."""
    lookup_keys: int = 8192
    """Of one look-up."""
    reads_a_run: int = 100
    """Single blocks whose time is taken."""
    mixed_ops: int = 50
    """Reads and writes of each thread in one round of mixed traffic."""

    @property
    def server_bytes(self) -> int:
        """Memory that a server needs: what both sides stored, what they write in mixed traffic, and its own."""
        return 4 * self.moved_bytes + 256 * MIB


class Values:
    """Blocks of noise, each another, and as many buffers to read into."""

    def __init__(self, layout: KVLayout, sizes: RedisSizes) -> None:
        self.sizes = sizes
        self.block_bytes = layout.block_bytes
        self.num_blocks = max(2, sizes.moved_bytes // layout.block_bytes)
        noise = np.random.default_rng(0).integers(0, 256, (self.num_blocks, layout.block_bytes), np.uint8)
        self.sources = [row.data for row in noise]
        self._targets = np.zeros_like(noise)
        self.targets = [row.data for row in self._targets]

    def clear_targets(self) -> None:
        self._targets[:] = 0

    @property
    def gigabytes(self) -> float:
        return self.num_blocks * self.block_bytes / 1e9


class RedisBench:
    """A tier and a least client with as many connections, at the same servers, each with keys of its own.

    Every run of stores is of new names; what was stored before goes, outside of the time. Reads get the last ones.
    Mutable state: the names of the last run, and what is to be removed at the end.
    """

    def __init__(self, place: Place, values: Values, threads: int) -> None:
        self.threads = threads
        self._values = values
        self._at_once = max(1, JOB_BYTES // values.block_bytes)
        self._prefix = f"kvtier-bench-{random.randbytes(6).hex()}"
        self._keys: list[Key] = []
        self._raw_blocks: list[RawBlock] = []
        self._round = 0
        with ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="kvtier-bench"))
            self._tier = open_tier(place, self._prefix, threads)
            stack.callback(self._tier.close)
            self._raw = stack.enter_context(RawClient(place, threads))
            self._stack = stack.pop_all()

    # ---- all blocks ----------------------------------------------------------------------------------------------

    def store_blocks(self) -> float:
        """GB/s."""
        self._forget()
        keys = self._keys = [new_key() for _ in range(self._values.num_blocks)]
        return self._rate(lambda start, stop: self._write(keys[start:stop], self._values.sources[start:stop]))

    def restore_blocks(self) -> float:
        keys = self._keys
        return self._rate(lambda start, stop: self._read(keys[start:stop], self._values.targets[start:stop]))

    def raw_store_blocks(self) -> float:
        self._raw_forget()
        made = self._raw_blocks = [self._new_raw() for _ in range(self._values.num_blocks)]
        return self._rate(lambda start, stop: self._raw.store(made[start:stop], self._values.sources[start:stop]))

    def raw_restore_blocks(self) -> float:
        made = self._raw_blocks
        return self._rate(lambda start, stop: self._raw.restore(made[start:stop], self._values.targets[start:stop]))

    def verify(self) -> None:
        """That each side's bytes come back. AssertionError otherwise."""
        for side, restore in (("the tier", self.restore_blocks), ("the limit", self.raw_restore_blocks)):
            self._values.clear_targets()
            restore()
            same = [a == b for a, b in zip(self._values.sources, self._values.targets, strict=True)]
            assert all(same), f"{same.count(False)} of {len(same)} blocks of {side} came back with other bytes"

    def _rate(self, job: Callable[[int, int], None]) -> float:
        count = self._values.num_blocks
        return self._values.gigabytes / seconds_of(lambda: run_jobs(self._threads, job, count, self._at_once))

    # ---- one at a time -------------------------------------------------------------------------------------------

    def some_at_random(self, runs: int) -> list[int]:
        count = self._values.sizes.reads_a_run * runs
        return random.Random(0).choices(range(self._values.num_blocks), k=count)

    def read_one(self, index: int) -> float:
        """Milliseconds."""
        target = self._values.targets[index : index + 1]
        return 1e3 * seconds_of(lambda: self._read(self._keys[index : index + 1], target))

    def raw_read_one(self, index: int) -> float:
        target = self._values.targets[index : index + 1]
        return 1e3 * seconds_of(lambda: self._raw.restore(self._raw_blocks[index : index + 1], target))

    # ---- mixed ---------------------------------------------------------------------------------------------------

    def mix_blocks(self, milliseconds: list[float]) -> float:
        """GB/s of threads that each read four blocks of five and write the fifth, one at a time, at random.

        The time of each is added to `milliseconds`. What was written goes, outside of the time.
        """
        plans = self._plans()
        written = [[new_key() for _ in plan] for plan in plans]

        def one(thread: int, step: int, index: int | None) -> None:
            if index is None:
                source = step % self._values.num_blocks
                self._write(written[thread][step : step + 1], self._values.sources[source : source + 1])
            else:
                self._read(self._keys[index : index + 1], self._values.targets[index : index + 1])

        rate = self._mix(plans, one, milliseconds)
        self._tier.remove([key for keys in written for key in keys])
        return rate

    def raw_mix_blocks(self, milliseconds: list[float]) -> float:
        plans = self._plans()
        written = [[self._new_raw() for _ in plan] for plan in plans]

        def one(thread: int, step: int, index: int | None) -> None:
            if index is None:
                source = step % self._values.num_blocks
                self._raw.store(written[thread][step : step + 1], self._values.sources[source : source + 1])
            else:
                self._raw.restore(self._raw_blocks[index : index + 1], self._values.targets[index : index + 1])

        rate = self._mix(plans, one, milliseconds)
        for made, plan in zip(written, plans, strict=True):
            self._raw.remove([block for block, index in zip(made, plan, strict=True) if index is None])
        self._round += 1
        return rate

    def _plans(self) -> list[list[int | None]]:
        """Of each thread: the block to read, or None for a write. The same for both sides in a round."""
        share = self._values.num_blocks
        plans = []
        for thread in range(self.threads):
            draw = random.Random(1000 * self._round + thread)
            # Its own blocks: two threads must not read into the same memory.
            own = range(thread % share, share, self.threads)
            plans.append(
                [None if draw.random() < 0.2 else draw.choice(own) for _ in range(self._values.sizes.mixed_ops)]
            )
        return plans

    def _mix(
        self, plans: Sequence[Sequence[int | None]], one: Callable[[int, int, int | None], None], times: list[float]
    ) -> float:
        def run(thread: int) -> list[float]:
            taken = []
            for step, index in enumerate(plans[thread]):
                began = time.perf_counter()
                one(thread, step, index)
                taken.append(1e3 * (time.perf_counter() - began))
            return taken

        began = time.perf_counter()
        for taken in self._threads.map(run, range(self.threads)):
            times += taken
        seconds = time.perf_counter() - began
        return sum(map(len, plans)) * self._values.block_bytes / 1e9 / seconds

    # ---- blocks through the tier and beside it -------------------------------------------------------------------

    def _write(self, keys: Sequence[Key], sources: Sequence[memoryview]) -> None:
        outcomes = self._tier.write([WriteRequest(k, None, source) for k, source in zip(keys, sources, strict=True)])
        assert set(outcomes) == {WriteOutcome.STORED}, f"blocks were not stored: {outcomes} {self._tier.snapshot()}"

    def _read(self, keys: Sequence[Key], targets: Sequence[memoryview]) -> None:
        outcomes = self._tier.read([ReadRequest(k, target) for k, target in zip(keys, targets, strict=True)])
        assert set(outcomes) == {ReadOutcome.OK}, f"blocks were not read: {outcomes} {self._tier.snapshot()}"

    def _new_raw(self) -> RawBlock:
        name = f"{self._prefix}:raw:0:{random.randbytes(48).hex()}"  # about as long as the tier's
        return self._raw.block(name.encode(), self._values.block_bytes)

    def _forget(self) -> None:
        if self._keys:
            assert self._tier.remove(self._keys) == len(self._keys)
            self._keys = []

    def _raw_forget(self) -> None:
        self._raw.remove(self._raw_blocks)
        self._raw_blocks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack, contextlib.suppress(*([] if kind is None else [Exception])):
            self._forget()
            self._raw_forget()


class LookupBench:
    """Small blocks under half of the keys or all of them, and look-ups of many."""

    cases = ("hits", "holes", "none")

    def __init__(self, place: Place, num_keys: int) -> None:
        self._prefix = f"kvtier-bench-{random.randbytes(6).hex()}"
        self._held = [new_key() for _ in range(num_keys)]
        absent = [new_key() for _ in range(num_keys)]
        holes = [key for pair in zip(self._held[: num_keys // 2], absent, strict=False) for key in pair]
        self._asked = dict(zip(self.cases, (self._held, holes, absent), strict=True))
        with ExitStack() as stack:
            self._tier = open_tier(place, self._prefix, 1)
            stack.callback(self._tier.close)
            self._raw = stack.enter_context(RawClient(place, 1))
            block = memoryview(random.randbytes(64))
            self._tier.write([WriteRequest(key, None, block) for key in self._held])
            self._stack = stack.pop_all()

    def timed(self, case: str) -> tuple[Timed, Timed]:
        """Milliseconds of the tier's look-up, and of the same commands by the least client."""
        keys = self._asked[case]
        held = set(self._held)
        expected = [key in held for key in keys]
        lookup = self._raw.lookup([f"{self._prefix}:{TENANT}:0:{key.hex(':', 32)}".encode() for key in keys])

        def by_tier() -> float:
            found: list[bool] = []
            seconds = seconds_of(lambda: found.extend(self._tier.contains(keys)))
            assert found == expected, f"{sum(found)} of {sum(expected)} keys were found"
            return 1e3 * seconds

        def by_raw() -> float:
            seconds = seconds_of(lookup.ask)
            assert lookup.num_found == sum(expected), "the tier's keys have another form than the benchmark thinks"
            return 1e3 * seconds

        return by_tier, by_raw

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack, contextlib.suppress(*([] if kind is None else [Exception])):
            self._tier.remove(self._held)


def new_key() -> Key:
    return Key(b"kvtier bench".ljust(16, b"\0") + random.randbytes(32))


def open_tier(place: Place, prefix: str, connections: int) -> RedisTier:
    user, password = place.credentials or ("default", "")
    settings = RedisSettings(
        url=tuple(place.urls),
        mode="cluster" if place.is_cluster else "standalone",
        username=None if user == "default" else user,
        password=SecretStr(password),
        prefix=prefix,
        tenant=TENANT,
        connections=connections,
        timeout_s=TIMEOUT_S,
    )
    tier = RedisTier(settings, MonotonicClock())
    try:
        tier.probe()
    except BaseException:
        tier.close()
        raise
    return tier


@contextmanager
def named_place(url: str, sizes: RedisSizes) -> Iterator[Place]:
    """The server that a user names, with the credentials of his settings, if it has room."""
    settings = load_settings(overrides={"redis.url": url, "redis.mode": "standalone"}).redis
    parts = urlsplit(url)
    if parts.scheme != "redis":
        raise ConfigError(
            f"--redis {url}: the benchmark's limit is measured over TCP without TLS; name redis://host:port"
        )
    password = settings.password.get_secret_value()
    credentials = (settings.username or "default", password) if settings.username or password else None
    host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    try:
        with RedisConnection(host, port, credentials=credentials) as connection:
            reply = connection.command("INFO", "memory")
    except (OSError, RedisReplyError) as error:
        raise ConfigError(f"--redis {url} cannot be used: {error}") from error
    assert isinstance(reply, bytes)
    memory = dict(line.split(":", 1) for line in reply.decode().split("\r\n") if ":" in line)
    limit, used = int(memory.get("maxmemory", 0)), int(memory["used_memory"])
    if limit and limit - used < sizes.server_bytes:
        raise ConfigError(
            f"--redis {url}: the benchmark needs {sizes.server_bytes // MIB} MiB of free memory there, and of "
            f"maxmemory {limit // MIB} MiB {used // MIB} are used: name another server"
        )
    yield Place([url], credentials=credentials)
