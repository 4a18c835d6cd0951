"""Counts: each event once, snapshots that add up, and Prometheus text that can be read back."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.config import HostSettings, MemorySnapshot, Settings, load_settings
from kvtier.errors import IntegrityError
from kvtier.families import GAUGES, LABELS, WORDS, StatsCollector
from kvtier.keys import Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.metrics import DiskStats, Ledger, LedgerSnapshot, LowerStats, RedisStats, RemoteStats, StatsSnapshot
from kvtier.reasons import DropReason, MissReason
from kvtier.store import Space, Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.reservation import Reservation

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)


@pytest.fixture
def store() -> Iterator[Store]:
    settings = Settings(host=HostSettings(size=8 * PAGE_BYTES, slab=4 * PAGE_BYTES))
    with Store(settings, memory=MemorySnapshot(1 << 34, 1 << 34), touch=False) as store:
        yield store


@pytest.fixture
def space(store: Store) -> Space:
    return store.open_space(Namespace("m", "r", LAYOUT, "g", Shard(0, 1)))


def put(space: Space, first: int) -> None:
    with space.owner("put") as owner:
        reservation = space.reserve(digest_tokens(range(first, first + 4), 4, Extras(None, None, ()))[0], None, owner)
        assert isinstance(reservation, Reservation)
        space.commit([reservation])


def while_another_thread_reads(write: Callable[[int], None], read: Callable[[], None], times: int) -> None:
    """Run `write` in a thread of its own, switching as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write_all() -> None:
        for turn in range(times):
            write(turn)

    writer = threading.Thread(target=write_all)
    try:
        writer.start()
        while writer.is_alive():
            read()
    finally:
        sys.setswitchinterval(interval)
        writer.join()


# ---- ledger ----------------------------------------------------------------------------------------------------------


def test_what_is_due_is_stored_dropped_or_pending() -> None:
    ledger = Ledger()
    ledger.add_due(10)
    ledger.add_stored(3)
    ledger.add_dropped(DropReason.HOST_FULL, 2)
    ledger.add_dropped(DropReason.HOST_FULL, 1)
    ledger.add_dropped(DropReason.ORPHAN, 0)
    assert ledger.snapshot() == LedgerSnapshot(due=10, stored=3, dropped={DropReason.HOST_FULL: 3}, pending=4)
    ledger.check_integrity()


def test_a_block_counted_twice_is_noticed() -> None:
    ledger = Ledger()
    ledger.add_due(1)
    ledger.add_stored(1)
    ledger.add_stored(1)
    with pytest.raises(IntegrityError, match="ledger"):
        ledger.check_integrity()


def test_a_snapshot_does_not_move() -> None:
    ledger = Ledger()
    ledger.add_due(2)
    ledger.add_dropped(DropReason.RESET, 1)
    before = ledger.snapshot()
    ledger.add_dropped(DropReason.RESET, 1)
    assert (before.dropped, before.pending) == ({DropReason.RESET: 1}, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.due = 0  # type: ignore[misc]


def test_the_ledger_adds_up_at_every_moment_another_thread_looks() -> None:
    ledger = Ledger()

    def write(turn: int) -> None:
        ledger.add_due(2)
        ledger.add_stored(1)
        ledger.add_dropped(DropReason.BACKLOG, 1)

    while_another_thread_reads(write, ledger.check_integrity, times=3000)
    assert ledger.snapshot().due == 6000


# ---- the store's counts ----------------------------------------------------------------------------------------------


@pytest.mark.bug("AC01")
def test_the_hit_rate_is_of_what_was_asked_for_not_of_what_was_fetched(store: Store, space: Space) -> None:
    assert store.stats().hit_rate == 0.0
    for i in range(100):
        space.count_lookup(10, 3, MissReason.EVICTED if i % 2 else MissReason.ABSENT)
        with space.owner("restore") as owner:
            space.lease([], owner)
    stats = store.stats()
    assert stats.hit_rate == pytest.approx(0.30)
    assert (stats.lookups, stats.asked_blocks, stats.hit_blocks) == (100, 1000, 300)
    assert stats.misses == {"absent": 350, "evicted": 350}


def test_a_full_hit_has_no_miss_and_a_miss_without_a_reason_is_absent(store: Store, space: Space) -> None:
    space.count_lookup(4, 4, None)
    assert store.stats().misses == {}
    space.count_lookup(4, 1, None)
    assert store.stats().misses == {"absent": 3}


def test_stored_evicted_and_held_add_up(store: Store, space: Space) -> None:
    for first in range(20):
        put(space, first)
        stats = store.stats()
        assert stats.stored_blocks - stats.evicted_blocks == stats.host_blocks == min(first + 1, 8)
        assert stats.stored_bytes == stats.stored_blocks * space.block_bytes
        assert stats.host_used_bytes == stats.host_blocks * PAGE_BYTES <= stats.host_reserved_bytes


def test_a_commit_that_was_void_is_not_counted(store: Store, space: Space) -> None:
    owner = space.owner("test")
    reservation = space.reserve(digest_tokens(range(4), 4, Extras(None, None, ()))[0], None, owner)
    assert isinstance(reservation, Reservation)
    assert store.stats().leases == 1
    owner.close()
    assert space.commit([reservation]) == [False]
    stats = store.stats()
    assert (stats.stored_blocks, stats.stored_bytes, stats.leases) == (0, 0, 0)


def test_errors_are_counted_by_type(store: Store, space: Space) -> None:
    for error in (OSError("a"), OSError("b"), KeyError("c")):
        space.count_error(error)
    assert store.stats().errors == {"OSError": 2, "KeyError": 1}


def test_a_store_snapshot_does_not_move(store: Store, space: Space) -> None:
    space.count_lookup(2, 1, MissReason.ABSENT)
    space.count_error(OSError())
    before = store.stats()
    space.count_lookup(2, 1, MissReason.ABSENT)
    space.count_error(OSError())
    assert (before.misses, before.errors, before.lookups) == ({"absent": 1}, {"OSError": 1}, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.lookups = 0  # type: ignore[misc]


def test_a_store_snapshot_adds_up_at_every_moment_another_thread_looks(store: Store, space: Space) -> None:
    reasons = list(MissReason)

    def read() -> None:
        now = store.stats()
        assert now.asked_blocks == now.hit_blocks + sum(now.misses.values()) == 3 * now.lookups
        assert now.stored_bytes == now.stored_blocks * space.block_bytes

    def write(turn: int) -> None:
        space.count_lookup(3, turn % 4, reasons[turn % len(reasons)])
        put(space, turn)

    while_another_thread_reads(write, read, times=1500)


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def test_prometheus_text_has_every_field_once_and_nothing_negative(store: Store, space: Space) -> None:
    put(space, 0)
    space.count_lookup(5, 1, MissReason.EVICTED)
    space.count_lookup(5, 2, MissReason.ABSENT)
    space.count_error(OSError())
    registry = CollectorRegistry()
    registry.register(StatsCollector(store.stats))
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    names = Counter(family.name for family in families)
    assert names == Counter(
        f"kvtier_{field.name}"
        for field in dataclasses.fields(StatsSnapshot)
        if field.name not in ("disk", "server", "redis")
    )
    stats = store.stats()
    for family in families:
        name = family.name.removeprefix("kvtier_")
        value = getattr(stats, name)
        assert family.type == ("gauge" if name in GAUGES else "counter")
        assert family.documentation
        assert all(sample.value >= 0 for sample in family.samples)
        if name in LABELS:
            assert {sample.labels[LABELS[name]]: sample.value for sample in family.samples} == value
        else:
            assert [sample.value for sample in family.samples] == [value]
    assert 'kvtier_misses_total{reason="evicted"} 4.0' in text


def disk_store(path: Path, **overrides: object) -> Store:
    sizes = {"host.size": 16 * PAGE_BYTES, "host.slab": PAGE_BYTES, "disk.path": [str(path)]}
    settings = load_settings(env={}, overrides=sizes | {"disk.size": "4MiB", "disk.min_free": 1})
    return Store(settings, memory=MemorySnapshot(1 << 34, 1 << 34), touch=False, clock=FakeClock(), **overrides)  # type: ignore[arg-type]


def scrape(store: Store) -> dict[str, Metric]:
    """The families by name; each name once."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(store.stats))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def test_prometheus_text_has_every_field_of_the_disk_too(tmp_path: Path) -> None:
    files = FaultyFiles()
    jobs = ManualExecutor()
    with disk_store(tmp_path / "disk", disk_files=files, disk_executor=jobs) as store:
        space = store.open_space(Namespace("m", "r", LAYOUT, "g", Shard(0, 1)))
        for first in range(0, 8, 4):
            put(space, first)
        jobs.run_all()
        files.inject(Fault.FULL_ON_WRITE)
        put(space, 400)
        jobs.run_all()
        put(space, 500)
        families, stats = scrape(store), store.stats()
        assert stats.disk is not None
        assert stats.disk.read_only != {}
        expected = {
            f"kvtier_{f.name}": getattr(stats, f.name)
            for f in dataclasses.fields(stats)
            if f.name not in ("disk", "server", "redis")
        }
        expected |= {
            f"kvtier_disk_{f.name}": getattr(stats.disk, f.name)
            for f in dataclasses.fields(stats.disk)
            if f.name != "ledger"
        }
        ledger = stats.disk.ledger
        expected |= {f"kvtier_disk_ledger_{f.name}": getattr(ledger, f.name) for f in dataclasses.fields(ledger)}
        assert families.keys() == expected.keys()
        for name, family in families.items():
            field = name.removeprefix("kvtier_").removeprefix("disk_").removeprefix("ledger_")
            assert family.type == ("gauge" if field in GAUGES else "counter"), name
            assert all(sample.value >= 0 for sample in family.samples), name
            samples = {tuple(sample.labels.values()): sample.value for sample in family.samples}
            if field in WORDS:
                assert samples == dict.fromkeys(expected[name].items(), 1), name
                assert {tuple(s.labels) for s in family.samples} == {(LABELS[field], WORDS[field])}, name
            elif field in LABELS:
                assert samples == {(str(key),): value for key, value in expected[name].items()}, name
                assert {tuple(s.labels) for s in family.samples} <= {(LABELS[field],)}, name
            else:
                assert samples == {(): expected[name]}, name
        assert families["kvtier_disk_modes"].samples[0].labels["directory"] == str(tmp_path / "disk")
        files.heal()


def test_counters_never_fall_whatever_happens(tmp_path: Path) -> None:
    jobs, files = ManualExecutor(), FaultyFiles(seed=3)
    with disk_store(tmp_path / "disk", disk_files=files, disk_executor=jobs) as store:
        space = store.open_space(Namespace("m", "r", LAYOUT, "g", Shard(0, 1)))
        files.inject(Fault.WRITE_ERROR, probability=0.2)
        files.inject(Fault.READ_ERROR, probability=0.2)
        before: dict[tuple[str, ...], float] = {}
        for turn in range(60):
            put(space, turn)
            jobs.run_all()
            digests = digest_tokens(range(turn // 2, turn // 2 + 4), 4, Extras(None, None, ()))
            stage = space.stage("r", digests, None, 1.0)
            jobs.run_all()
            if stage is not None:
                stage.close()
            space.count_lookup(2, turn % 3, MissReason.TIMEOUT, {"disk": turn % 2})
            now = {
                (sample.name, *sample.labels.values()): sample.value
                for family in scrape(store).values()
                if family.type == "counter"
                for sample in family.samples
                if sample.name.endswith("_total")
            }
            assert all(now[key] >= value for key, value in before.items())
            before = now
        assert store.stats().staged_blocks > 0
        files.heal()


@pytest.mark.bug("AC12")
def test_hits_are_counted_once_by_the_tier_that_had_them(store: Store, space: Space) -> None:
    space.count_lookup(6, 5, MissReason.TIMEOUT, {"disk": 3})
    assert store.stats().hits == {"disk": 3, "host": 2}
    space.count_lookup(6, 2, MissReason.LAND_FAILED, {"disk": 6})
    space.count_lookup(6, 0, MissReason.TIMEOUT, {"disk": 0})
    stats = store.stats()
    assert stats.hits == {"disk": 5, "host": 2}
    assert sum(stats.hits.values()) == stats.hit_blocks
    assert stats.hit_blocks + sum(stats.misses.values()) == stats.asked_blocks
    space.count_fallback(MissReason.TIMEOUT)
    assert store.stats().fallbacks == {"timeout": 1}


def test_a_scrape_takes_one_snapshot(store: Store) -> None:
    taken: list[StatsSnapshot] = []

    def snapshot() -> StatsSnapshot:
        taken.append(store.stats())
        return taken[-1]

    registry = CollectorRegistry()
    registry.register(StatsCollector(snapshot))
    taken.clear()
    generate_latest(registry)
    assert len(taken) == 1


def test_every_field_says_what_it_counts() -> None:
    import inspect

    for kind in (StatsSnapshot, LedgerSnapshot, LowerStats, DiskStats, RemoteStats, RedisStats):
        body = "".join(inspect.getsource(each) for each in kind.__mro__ if dataclasses.is_dataclass(each))
        for field in dataclasses.fields(kind):
            declaration = body.index(f"    {field.name}: ")
            assert '"""' in body[declaration:].splitlines()[1], field.name
