"""Faults drawn at random, of host, disk and Redis at once, under load: nothing wrong is served and nothing leaks."""

from __future__ import annotations

import gc
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.config import DiskSettings, HostSettings, RestoreSettings, Settings, StoreSettings
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.lower import LowerTier
from kvtier.store import Store
from kvtier_connectors.bench.faults import quiet
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.bench.ground import Ground, behind_proxy
from kvtier_connectors.bench.opening import scratch_directory
from kvtier_connectors.bench.seeded_faults import SEEDED_FAULTS, Patient, SeededEngine, SeededFault, forget_host
from kvtier_connectors.shapes import SHAPES

__all__ = ["NUM_FAULTS", "SeededResult", "SeededRun", "run_seeded", "seeded_figures"]

NUM_FAULTS = 10_000
NEEDED_BYTES = 1 << 30
HOST_BYTES = 48 << 20
DISK_BYTES = 64 << 20  # less than the conversations take: Redis has some that the disk has no more
TIMEOUT_S = 0.2
MAX_WAIT_S = 0.3
CLOSE_S = 20.0
SKIP_S = 6.0  # longer than a sick tier is left alone
SKIP_RATE = 0.05
BEGIN_RATE = 0.15  # faults a step
MEAN_STEPS = 25.0  # that a fault lasts: some end before anything meets it, and some after every timeout
START_RATE = 0.3
MAX_LIVE = 4
FAULTS_A_LOOK = 50
LEAK_TIMEOUT_S = 10.0
RECOVERY_S = 60.0
FLUSH_S = 20.0
POLL_S = 0.05
NEW_CHAIN = 1 << 20


class SkippingClock:
    """The machine's, which can be put on. Any thread."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


@dataclass(frozen=True, slots=True)
class SeededResult:
    """What a run saw. Nothing wrong: that ends it with an IntegrityError."""

    seed: int
    num_faults: int
    by_name: dict[str, int]
    seconds: float
    landed_blocks: int
    """Each compared with what it should hold."""
    hits: dict[str, int]
    """Blocks by the tier that had them."""
    misses: dict[str, int]
    """Blocks by reason."""
    resets: int

    @property
    def faults_a_minute(self) -> float:
        return 60 * self.num_faults / self.seconds


class SeededRun:
    """Two engines, with blocks of 360 KiB and of 2 MiB, over one store with disk and Redis, and faults of all of it.

    What is drawn follows from the seed; what comes of it, from the machine's threads too. Mutable state: everything;
    one thread.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._random = random.Random(seed)
        self._clock = SkippingClock()
        self._active: dict[str, tuple[SeededFault, int]] = {}  # by group, with the step at which it ends
        self._counts: Counter[str] = Counter()
        self._step = 0
        self._looked_at = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            redis = stack.enter_context(behind_proxy())
            ground = Ground(self._directory, redis)
            ground.random.seed(self._seed)
            settings = Settings(
                host=HostSettings(size=HOST_BYTES, slab=4 << 20),
                disk=DiskSettings(path=(str(self._directory),), size=DISK_BYTES, min_free=1 << 20, timeout_s=TIMEOUT_S),
                redis=redis.settings.model_copy(update={"timeout_s": TIMEOUT_S}),
                store=StoreSettings(policy="write_through"),
                restore=RestoreSettings(max_wait_s=MAX_WAIT_S, max_staging=16 << 20),
            )
            self._store = Store(settings, clock=self._clock, disk_files=ground.files)
            stack.callback(self._store.close, CLOSE_S)
            engines = [SeededEngine(self._store, shape) for shape in SHAPES]
            for engine in engines:
                stack.callback(engine.toy.connector.close, CLOSE_S)
            stack.callback(ground.heal)
            self._patient = Patient(ground, self._store, engines, self._random)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, num_faults: int) -> SeededResult:
        """Until so many faults have begun, and all is well again. IntegrityError for whatever should not be."""
        began = time.monotonic()
        while self._counts.total() < num_faults:
            self._take_step()
            self._end_faults()
            if self._random.random() < BEGIN_RATE:
                self._begin_fault()
            if self._counts.total() >= self._looked_at + FAULTS_A_LOOK:
                self._looked_at = self._counts.total()
                self._end_group(
                    "disk"
                )  # the check of a disk waits for writes, and would do so for ever for one that hangs
                self._verify()
        self._end_faults(are_all_over=True)
        self._recover()
        return self._result(num_faults, time.monotonic() - began)

    def _take_step(self) -> None:
        self._step += 1
        for engine in self._patient.engines:
            if engine.traffic.num_live < MAX_LIVE and self._random.random() < START_RATE:
                engine.traffic.start(engine.some_chain(self._random))
            engine.traffic.step()
        is_sick = not all(lower.is_available for lower in self._store.lower)
        if is_sick and self._random.random() < SKIP_RATE:
            self._clock.skip(SKIP_S)
        if self._patient.must_reset and not self._active:
            self._patient.reset()

    def _begin_fault(self) -> None:
        fault = self._random.choices(SEEDED_FAULTS, [each.weight for each in SEEDED_FAULTS])[0]
        if fault.group is not None:
            self._end_group(fault.group)
            self._active[fault.group] = fault, self._step + int(self._random.expovariate(1 / MEAN_STEPS))
        fault.begin(self._patient)
        self._counts[fault.name] += 1

    def _end_faults(self, *, are_all_over: bool = False) -> None:
        for group in [group for group, (_, end) in self._active.items() if are_all_over or self._step >= end]:
            self._end_group(group)

    def _end_group(self, group: str) -> None:
        active = self._active.pop(group, None)
        if active is not None:
            active[0].end(self._patient)

    # ---- what must hold ------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        self._store.check_integrity()
        for engine in self._patient.engines:
            engine.toy.connector.check_integrity()
            if engine.traffic.wrong:
                raise IntegrityError(f"seed {self._seed}: {engine.traffic.wrong} blocks landed with other bytes")
        for lower in self._store.lower:
            ledger = lower.write_behind.ledger.snapshot()
            if ledger.due != ledger.stored + sum(ledger.dropped.values()) + ledger.pending:
                raise IntegrityError(f"seed {self._seed}: {lower.name}: {ledger} does not add up")
        stats = self._store.stats()
        if stats.asked_blocks != stats.hit_blocks + sum(stats.misses.values()):
            raise IntegrityError(f"seed {self._seed}: asked = hit + missed does not hold: {stats}")

    def _recover(self) -> None:
        """All is asked again until every tier serves; then nothing is held, and every slot is a block's."""
        patient = self._patient
        deadline = time.monotonic() + RECOVERY_S
        while patient.must_reset or not all(lower.is_available for lower in self._store.lower):
            if time.monotonic() > deadline:
                raise IntegrityError(
                    f"seed {self._seed}: a tier is sick for good, or a reset fails: {self._store.stats()}"
                )
            self._skip()
            if patient.must_reset:
                patient.reset()
        for engine in patient.engines:
            engine.traffic.drain()
        self._verify()
        self._verify_round_trip()
        self._verify()
        while leases := self._store.stats().leases:
            if time.monotonic() > deadline:
                raise IntegrityError(f"seed {self._seed}: {leases} leases are left")
            time.sleep(POLL_S)

    def _skip(self) -> None:
        """Let the time pass for which a sick tier is left alone, and that of one probe: which a skip would end."""
        self._clock.skip(SKIP_S)
        time.sleep(POLL_S)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not all(lower.is_available for lower in self._store.lower):
            time.sleep(POLL_S)

    def _verify_round_trip(self) -> None:
        """What is stored now is in every tier, and comes back from each: from Redis where the disk is detached."""
        chains = [(engine, engine.chain(NEW_CHAIN)) for engine in self._patient.engines]
        deadline = time.monotonic() + RECOVERY_S
        while not self._store_everywhere(chains):
            if time.monotonic() > deadline:
                raise IntegrityError(f"seed {self._seed}: all is well, and not all is stored: {self._store.stats()}")
            self._skip()  # a directory that was full is left alone for a while
        for lower in self._store.lower:
            for engine, digests in chains:
                while not self._comes_back(engine, digests):
                    if time.monotonic() > deadline:
                        raise IntegrityError(f"seed {self._seed}: all is well, and {lower.name} gives nothing back")
                    self._skip()  # short time limits, on a machine that is busy
            self._store.detach(lower.name)

    def _store_everywhere(self, chains: Sequence[tuple[SeededEngine, list[BlockDigest]]]) -> bool:
        """Whether every tier has them by then. Host memory has nothing else that would push them out of the disk."""
        forget_host(self._patient)
        for engine, digests in chains:
            self._serve(engine, digests)
        self._store.flush(FLUSH_S)
        return all(self._holds_all(lower, chains) for lower in self._store.lower)

    @staticmethod
    def _holds_all(lower: LowerTier, chains: Sequence[tuple[SeededEngine, list[BlockDigest]]]) -> bool:
        return all(
            lower.holds(engine.toy.connector.space.digest, digest) for engine, digests in chains for digest in digests
        )

    def _comes_back(self, engine: SeededEngine, digests: list[BlockDigest]) -> bool:
        forget_host(self._patient)
        landed = engine.traffic.landed
        self._serve(engine, digests)
        return engine.traffic.landed == landed + len(digests)

    @staticmethod
    def _serve(engine: SeededEngine, digests: list[BlockDigest]) -> None:
        engine.traffic.start(digests)
        engine.traffic.drain()

    def _result(self, num_faults: int, seconds: float) -> SeededResult:
        stats = self._store.stats()
        return SeededResult(
            seed=self._seed,
            num_faults=num_faults,
            by_name=dict(sorted(self._counts.items())),
            seconds=seconds,
            landed_blocks=sum(engine.traffic.landed for engine in self._patient.engines),
            hits=dict(stats.hits),
            misses=dict(stats.misses),
            resets=stats.resets,
        )


def run_seeded(directory: Path, num_faults: int, seed: int) -> SeededResult:
    """A run, and what must be gone afterwards: IntegrityError for descriptors, threads or shared memory left open."""
    before = _resources()
    with SeededRun(directory, seed) as run:
        result = run.run(num_faults)
    del run
    deadline = time.monotonic() + LEAK_TIMEOUT_S
    while left := _resources() - before:
        if time.monotonic() > deadline:
            raise IntegrityError(f"seed {seed}: left open: {', '.join(sorted(left))}")
        gc.collect()
        time.sleep(POLL_S)
    return result


def _resources() -> set[str]:
    """Descriptors with what they stand for, threads, and shared memory that this process made."""
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    found |= {f"shared memory {path}" for path in Path("/dev/shm").glob("kvtier*")}  # noqa: S108
    for descriptor in [*Path("/proc/self/fd").iterdir()]:
        with suppress(FileNotFoundError):  # the listing's own, and others closed since
            found.add(f"descriptor {descriptor.name} -> {descriptor.readlink()}")
    return found


def seeded_figures(parent: Path | None, num_faults: int, seed: int | None) -> Iterator[Figure]:
    """The one figure; the seed is printed first, and what was seen afterwards, on stderr."""
    seed = secrets.randbits(32) if seed is None else seed
    sys.stderr.write(f"{num_faults} faults of seed {seed}\n")
    with quiet(), scratch_directory(parent, NEEDED_BYTES) as directory:
        result = run_seeded(directory, num_faults, seed)
    sys.stderr.write(
        f"{result.landed_blocks} blocks landed, all as they were stored; hits {result.hits}; misses {result.misses}; "
        f"{result.resets} resets; faults: {result.by_name}\n"
    )
    yield Figure("faults.seeded", "blocks of 360 KiB and 2 MiB", result.faults_a_minute, "/min", 1.0, num_faults)
