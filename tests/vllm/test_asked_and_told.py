"""What requests ask of kvtier through vLLM, and what vLLM shows of it: options, metrics, hit sources, KV events."""

from __future__ import annotations

import io
import itertools
import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.families import families
from kvtier.index import BlockState
from kvtier.metrics import StatsSnapshot
from kvtier_connectors.counts import ConnectorStats
from kvtier_connectors.vllm import KVTierConnector, connector
from kvtier_connectors.vllm.telemetry import CacheHitSource, KVTierStats
from tests.vllm.plugin import BLOCK, OpenRig, fill, half, prompt, stats, verify_quiet
from tests.vllm.scheduler_rig import SchedulerRig

# ---- asked -----------------------------------------------------------------------------------------------------------


def test_who_asks_not_to_restore_computes(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("no", prompt(100, 16), 2, kv_transfer_params={"kvtier": {"restore": False}})
    steps = rig.run()
    assert sum(step.scheduled.get("no", 0) for step in steps) == 16 * BLOCK + 8 + 1
    assert stats(rig).hits == {}
    verify_quiet(rig)


def test_who_asks_for_so_much_gets_no_more(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("some", prompt(100, 16), 2, kv_transfer_params={"kvtier": {"max_restore_tokens": 5 * BLOCK}})
    steps = rig.run()
    assert sum(step.scheduled.get("some", 0) for step in steps) == 11 * BLOCK + 8 + 1
    assert (stats(rig).hits, stats(rig).misses["limit"]) == ({"host": 5}, 11)
    verify_quiet(rig)


def test_what_who_asks_not_to_store_computes_is_nowhere(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    rig.add_request("secret", prompt(100, 16), 2, kv_transfer_params={"kvtier": {"store": False}})
    secret = set(rig.scheduler.requests["secret"].block_hashes)
    rig.run()
    rig.add_request("other", prompt(50_000, 16), 2)
    rig.run()
    held = rig.connector.scheduler_side.store.host._index
    assert not {digest for _, digest, *_ in held.items()} & secret
    verify_quiet(rig)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["restore"], "must be an object"),
        ({"restor": False}, "['restor']; it may have max_restore_tokens, max_wait_s, restore, store"),
        ({"restore": "no"}, "kvtier.restore must be"),
        ({"max_wait_s": -1}, "kvtier.max_wait_s must be"),
        ({"priority": 1}, "priority"),
        ({7: 1}, "7"),
    ],
)
def test_who_asks_for_what_means_nothing_is_served_with_a_warning(
    asked: object, words: str, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    for name in ("one", "two"):
        rig.add_request(name, prompt(100, 16), 2, kv_transfer_params={"kvtier": asked})
        rig.run()
    told = [record.getMessage() for record in caplog.records if record.name == "kvtier.vllm"]
    assert [words in message for message in told] == [True], "once"
    assert stats(rig).hits == {"host": 16}
    verify_quiet(rig)


def test_other_parameters_are_not_ours(open_rig: OpenRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = open_rig(num_blocks=24)
    rig.add_request("a", prompt(100, 4), 2, kv_transfer_params={"do_remote_decode": False})
    rig.run()
    assert not [record for record in caplog.records if record.name == "kvtier.vllm"]
    verify_quiet(rig)


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 0), ("priority", 5)])
def test_priority_is_what_vllm_schedules_by(policy: str, expected: int, open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24, policy=policy)
    rig.add_request("a", prompt(100, 4), 2, priority=5)
    assert half(rig)._requests["a"].info.options.priority == expected
    rig.run()
    verify_quiet(rig)


def test_an_untested_version_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for version in (*connector.TESTED, "0.32.0+cpu"):
        connector._check_version(version)
    assert not caplog.records
    connector._check_version("0.99.1")
    assert "0.99.1" in caplog.text
    assert all(version in caplog.text for version in connector.TESTED)


def test_what_would_be_lost_is_told_at_start(
    open_rig: OpenRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    open_rig(disk).close()
    assert "kvtier.vllm" not in [record.name for record in caplog.records], "in process vLLM kills nobody"
    open_rig(kv_load_failure_policy="fail").close()
    assert "set it to 'recompute'" in caplog.text
    open_rig({"restore.on_failure": "fail"}).close()
    assert "restore.on_failure is without effect" in caplog.text
    open_rig({"host.size": "64KiB", "host.slab": "64KiB"}, num_blocks=24).close()
    assert "host.size holds 8 blocks, fewer than the GPU pool's 24" in caplog.text
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    open_rig().close()
    assert "--shutdown-timeout" not in caplog.text, "there is no disk"
    open_rig(disk).close()
    assert "--shutdown-timeout 20" in caplog.text


@pytest.fixture
def loggers() -> Iterator[dict[str, logging.Logger]]:
    """Ours and vLLM's, as they were afterwards."""
    found = {name: logging.getLogger(name) for name in ("kvtier", "vllm")}
    before = {name: (logger.handlers[:], logger.level) for name, logger in found.items()}
    yield found
    for name, logger in found.items():
        logger.handlers[:], level = before[name]
        logger.setLevel(level)


@pytest.mark.parametrize("has_own", [False, True])
def test_we_log_as_vllm_does_unless_told_otherwise(
    has_own: bool, loggers: dict[str, logging.Logger], open_rig: OpenRig
) -> None:
    theirs, own = io.StringIO(), logging.StreamHandler(io.StringIO())
    handler = logging.StreamHandler(theirs)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(name)s] %(message)s"))
    loggers["vllm"].handlers[:], loggers["kvtier"].handlers[:] = [handler], [own] if has_own else []
    loggers["vllm"].setLevel(logging.INFO)
    open_rig(kv_load_failure_policy="fail").close()
    assert ("WARNING [kvtier.vllm] kv_load_failure_policy" in theirs.getvalue()) is not has_own
    assert ("INFO [kvtier.vllm] kvtier 0.1.0 keeps the KV cache" in theirs.getvalue()) is not has_own
    assert loggers["kvtier"].handlers == ([own] if has_own else [handler])


def test_metrics_do_not_stand_still_at_what_was_under_way(open_rig: OpenRig, tmp_path: Path) -> None:
    disk: dict[str, Any] = {
        "disk.path": [str(tmp_path)],
        "disk.size": "64MiB",
        "disk.min_free": 1,
        "store.policy": "write_through",
    }
    rig = open_rig(disk, num_blocks=24)
    rig.add_request("a", prompt(100, 16), 2)
    steps = rig.run(100_000)
    last = [step.stats.kv_connector_stats for step in steps if step.stats and step.stats.kv_connector_stats][-1]
    found = {name: value for name, labels, value in last["samples"] if not labels}
    assert found["vllm:kvtier_disk_blocks"] == 16
    for name in ("leases", "disk_queued_bytes", "disk_ledger_pending", "ledger_pending", "in_flight_blocks"):
        assert found[f"vllm:kvtier_{name}"] == 0, name
    verify_quiet(rig)


def test_an_engine_does_not_step_on_for_a_device_that_hangs(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=24)
    side = rig.connector.scheduler_side
    fill(rig)
    monkeypatch.setattr(type(side.store), "is_writing", True)
    assert side.is_busy
    monkeypatch.setattr(side, "_busy_until", side.store.clock.now())
    assert not side.is_busy
    monkeypatch.undo()
    verify_quiet(rig)


# ---- told: metrics ---------------------------------------------------------------------------------------------------


def make_prom(rig: SchedulerRig) -> KVConnectorProm:
    return KVConnectorProm(rig.vllm_config, ["model_name", "engine"], {0: ["m", "0"]})


@pytest.fixture
def forget_metrics() -> Any:
    """What a frontend defined is taken down, as vLLM does before another begins."""
    yield
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            REGISTRY.unregister(collector)


def shown() -> dict[tuple[str, tuple[str, ...]], float]:
    """Our samples as a scrape has them: without those that say when a counter was made."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:kvtier") and not sample.name.endswith("_created"):
                labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                found[sample.name.removesuffix("_total"), tuple(sorted(labels))] = sample.value
    return found


def test_every_count_is_shown(open_rig: OpenRig, tmp_path: Path, forget_metrics: None) -> None:
    """Through vLLM's own scheduler and frontend classes, with a disk: at the end the page has what the store has."""
    disk = {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    rig = open_rig(disk, num_blocks=24)
    prom = make_prom(rig)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    steps = rig.run()
    told = [step.stats.kv_connector_stats for step in steps if step.stats and step.stats.kv_connector_stats]
    assert told, "the end of the last request is told"
    for data in told:
        prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(data)))
    page = shown()
    assert page["vllm:kvtier_hits", ("host",)] == 16
    assert page["vllm:kvtier_hit_blocks", ()] == 16
    assert page["vllm:kvtier_disk_capacity_bytes", ()] == 64 << 20
    assert page["vllm:kvtier_live_requests", ()] == page["vllm:kvtier_in_flight_blocks", ()] == 0
    assert page["vllm:kvtier_stored_blocks", ()] == stats(rig).stored_blocks
    verify_quiet(rig)


def test_a_moment_has_no_metric_that_is_not_defined(open_rig: OpenRig, tmp_path: Path) -> None:
    rig = open_rig({"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}, num_blocks=24)
    fill(rig)
    side = rig.connector.scheduler_side
    moment = KVTierStats.of(side.store.stats(), half(rig).stats())
    defined = {f.name: len(f.labels) for kind in (StatsSnapshot, ConnectorStats) for f in families(kind, "vllm:kvtier")}
    assert {name for name, *_ in moment.data["samples"]} <= defined.keys()
    assert all(len(labels) == defined[name] for name, labels, _ in moment.data["samples"])
    assert len(defined) > 70


def test_counters_go_on_over_an_engine_that_began_anew_and_words_that_are_gone_are_zero(
    open_rig: OpenRig, forget_metrics: None
) -> None:
    prom = make_prom(open_rig(num_blocks=24))

    def tell(*found: tuple[str, list[str], float]) -> None:
        prom.observe({"samples": [[f"vllm:kvtier_{name}", labels, value] for name, labels, value in found]})

    tell(("lookups", [], 5), ("disk_read_only", ["/a", "full"], 1), ("host_blocks", [], 7))
    tell(("lookups", [], 8), ("host_blocks", [], 3))
    tell(("lookups", [], 2), ("host_blocks", [], 4))
    page = shown()
    assert page["vllm:kvtier_lookups", ()] == 10
    assert page["vllm:kvtier_host_blocks", ()] == 4
    assert page["vllm:kvtier_disk_read_only", ("/a", "full")] == 0


def test_moments_are_sent_once_a_second_and_at_the_end(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    side = rig.connector.scheduler_side
    now = itertools.count()
    side._telemetry._clock = type("Clock", (), {"now": lambda self: next(now) / 10})()
    side._telemetry._sent_at = 0.0
    told = [side._telemetry.is_due(is_idle=False) for _ in range(35)]
    assert [index for index, is_told in enumerate(told) if is_told] == [10, 20, 30]
    assert side._telemetry.is_due(is_idle=True)
    assert not side._telemetry.is_due(is_idle=True)


def test_the_log_line_has_the_last_moment(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    lines: list[str] = []
    logging_ = KVConnectorLogging(rig.vllm_config.kv_transfer_config)
    moment = KVTierStats.of(stats(rig), half(rig).stats())
    for value in (KVTierStats({}), moment, KVTierStats({})):
        logging_.observe(value.to_dict())
    logging_.log(lambda text, *args: lines.append(text % args))
    assert [f"stored blocks={stats(rig).stored_blocks}" in line for line in lines] == [True]


# ---- told: where hits came from --------------------------------------------------------------------------------------


@pytest.mark.skipif(CacheHitSource is None, reason="this vLLM does not ask where hits came from")
def test_hits_are_told_by_the_tier_that_had_them(open_rig: OpenRig, tmp_path: Path) -> None:
    disk = {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    first = open_rig(disk, num_blocks=24)
    fill(first)
    first.add_request("again", prompt(100, 16), 2)
    assert hits_by_source(first.run()) == {"host": 16 * BLOCK}
    first.close()
    rig = open_rig(disk, num_blocks=24)
    rig.add_request("again", prompt(100, 16), 2)
    assert hits_by_source(rig.run(100_000)) == {"disk": 16 * BLOCK}
    verify_quiet(rig)


def hits_by_source(steps: Any) -> dict[str, int]:
    """By vLLM's own count, but for its local hits."""
    found: dict[str, int] = {}
    for step in steps:
        told = step.stats.connector_prefix_cache_stats if step.stats else None
        for source, count in (told.hits_by_source if told else {}).items():
            found[source.value] = found.get(source.value, 0) + count
    return found


# ---- told: KV events -------------------------------------------------------------------------------------------------


class Router:
    """Follows what vLLM publishes, in its order, as to host memory."""

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig = rig
        self.known: set[Any] = set()
        self.num_removed = self.num_clears = 0
        rig.scheduler.kv_event_publisher = self  # vLLM's own, which sends over the network, is another's affair

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
                self.num_clears += 1
            elif event.medium != "CPU":
                continue
            elif isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                assert event.parent_block_hash is None or event.parent_block_hash in self.known
                self.known.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                assert self.known.issuperset(event.block_hashes)
                self.num_removed += len(event.block_hashes)
                self.known.difference_update(event.block_hashes)

    def shutdown(self) -> None:
        pass

    def verify(self) -> None:
        """One step more, and it knows what the store's index knows."""
        self._rig.add_request(f"last {self._rig.num_steps}", prompt(1, 0, 4), 1)
        self._rig.run(100_000)
        store = self._rig.connector.scheduler_side.store
        held = {digest for _, digest, _, state in store.host._index.items() if state is BlockState.COMMITTED}
        assert self.known == {maybe_convert_block_hash(digest) for digest in held}


@pytest.mark.parametrize("seed", range(4))
def test_who_follows_the_events_knows_what_host_memory_holds(seed: int, open_rig: OpenRig, tmp_path: Path) -> None:
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "host.size": "256KiB",
        "host.slab": "64KiB",
        "store.policy": chance.choice(["on_evict", "write_through"]),
    }
    if seed % 2:
        settings |= {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    rig = open_rig(settings, num_blocks=24, has_events=True)
    router = Router(rig)
    for number in range(40):
        rig.add_request(f"r{number}", prompt(10_000 * chance.randrange(5), chance.randrange(1, 16)), 2)
        for _ in range(chance.randrange(6)):
            if rig.scheduler.has_requests():
                rig.step()
        if chance.random() < 0.2:
            with suppress(RuntimeError):  # vLLM refuses while requests that do not run hold what was loaded for them
                rig.reset_prefix_cache(running=chance.random() < 0.7, connector=chance.random() < 0.5)
        if chance.random() < 0.2:
            rig.run(100_000)
            router.verify()
    router.verify()
    assert router.num_clears
    assert router.num_removed
    verify_quiet(rig)


def test_a_reset_of_vllms_cache_alone_makes_nobody_forget_what_is_ours(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24, has_events=True)
    router = Router(rig)
    fill(rig)
    assert rig.reset_prefix_cache(running=False, connector=False)
    router.verify()
    assert router.known
    assert rig.reset_prefix_cache(running=False, connector=True)
    router.verify()
    assert not router.known
    verify_quiet(rig)


def test_without_a_listener_no_event_is_kept(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    assert list(rig.connector.take_events()) == []


def test_what_crosses_processes_is_plain(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    moment = KVTierStats.of(stats(rig), half(rig).stats())
    assert KVTierConnector.build_kv_connector_stats(moment.to_dict()).data == moment.data
    assert {type(value) for _, _, value in moment.data["samples"]} <= {int, float}
