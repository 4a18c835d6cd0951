"""The plug-in beside vLLM's own scheduler: every token's KV is checked, however small the pool and wild the traffic."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.errors import ConfigError, LayoutError
from kvtier.reasons import DropReason
from kvtier_connectors.contract import CopyFailure
from kvtier_connectors.vllm import KVTierConnector
from tests.vllm.plugin import (
    BLOCK,
    MODULE,
    NAME,
    OpenRig,
    fail_once,
    fill,
    half,
    owner_of,
    prompt,
    stats,
    verify_quiet,
    worker,
)
from tests.vllm.scheduler_rig import SchedulerRig


def serve_in_turn(rig: SchedulerRig) -> None:
    """Three prompts, twice, each of which takes nearly all of the pool in its first step: and none steps for longer
    than it lives, so that nothing is stored in between."""
    for number in range(6):
        rig.add_request(f"r{number}", prompt(10_000 * (number % 3), 17), 1)
        while f"r{number}" not in rig.finished:
            rig.step()


def test_a_prompt_that_left_the_pool_is_loaded_and_not_computed(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    steps = rig.run()
    assert sum(step.scheduled.get("again", 0) for step in steps) == 8 + 1
    assert stats(rig).hits == {"host": 16}
    assert half(rig).stats().ledger.dropped == {}
    verify_quiet(rig)


def test_a_block_that_is_reused_in_a_step_is_stored_before_it_is_overwritten(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=20, max_num_batched_tokens=1024)
    serve_in_turn(rig)
    ledger = half(rig).stats().ledger
    assert (ledger.dropped, stats(rig).hits["host"]) == ({}, 3 * 17)
    verify_quiet(rig)


def test_a_copy_that_a_step_cannot_wait_for_stores_nothing(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connectors.vllm.worker.FENCE_S", 0.0)
    rig = open_rig(num_blocks=20, max_num_batched_tokens=1024)
    serve_in_turn(rig)
    assert half(rig).stats().ledger.dropped[DropReason.COPY_FAILED] > 0
    verify_quiet(rig)


def test_a_disk_outlives_the_engine(open_rig: OpenRig, tmp_path: Path) -> None:
    disk = {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    first = open_rig(disk, num_blocks=24)
    first.add_request("a", prompt(100, 16), 2)
    first.run()
    first.add_request("other", prompt(50_000, 16), 2)  # which pushes it out
    first.run()
    first.close()
    rig = open_rig(disk, num_blocks=24)
    rig.add_request("again", prompt(100, 16), 2)
    steps = rig.run(100_000)
    assert sum(step.scheduled.get("again", 0) for step in steps) == 8 + 1
    assert stats(rig).hits == {"disk": 16}
    verify_quiet(rig)


@pytest.mark.parametrize("lost", ["first", "middle", "last", "all"])
def test_whatever_part_of_a_load_fails_the_rest_is_computed(
    lost: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    side, report = worker(rig), worker(rig).report
    chosen = {"first": {0}, "middle": {7}, "last": {15}, "all": set(range(16))}[lost]

    def failing() -> Any:
        told = report()
        for index, result in enumerate(told.results):
            if len(result.copied) == 16:
                copied = tuple(position not in chosen for position in range(16))
                told.results[index] = type(result)(result.job_id, copied, CopyFailure.RAISED)
        return told

    monkeypatch.setattr(side, "report", failing)
    rig.add_request("again", prompt(100, 16), 2)
    steps = rig.run()
    monkeypatch.setattr(side, "report", report)
    num_good = {"first": 0, "middle": 7, "last": 15, "all": 0}[lost]
    assert sum(step.scheduled.get("again", 0) for step in steps) >= (16 - num_good) * BLOCK
    assert rig.finished["again"] == "length"
    verify_quiet(rig)


def test_without_vllms_own_cache_ours_serves(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24, enable_prefix_caching=False)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    steps = rig.run()
    assert sum(step.scheduled.get("again", 0) for step in steps) == 8 + 1
    verify_quiet(rig)


def test_who_is_aborted_while_its_blocks_land_leaves_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    rig.step()
    assert rig.status("again") == "WAITING_FOR_REMOTE_KVS"
    rig.abort("again")
    verify_quiet(rig)


def test_salts_share_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    rig.add_request("a", prompt(100, 16), 2, cache_salt="one")
    rig.run()
    rig.add_request("other", prompt(50_000, 16), 2)
    rig.run()
    rig.add_request("b", prompt(100, 16), 2, cache_salt="two")
    rig.run()
    assert stats(rig).hits == {}
    verify_quiet(rig)


def test_adapters_share_nothing_and_each_finds_its_own(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    for number, (adapter, num_hits) in enumerate([("a", 0), ("b", 0), (None, 0), ("a", 16), (None, 32)]):
        rig.add_request(f"r{number}", prompt(100, 16), 2, adapter=adapter)
        rig.run()
        rig.add_request(f"other {number}", prompt(50_000 + 2_000 * number, 16), 2)
        rig.run()
        assert stats(rig).hits.get("host", 0) == num_hits
    verify_quiet(rig)


def test_an_exception_in_a_hook_costs_a_miss(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=24)

    def fail(*_: object) -> None:
        raise RuntimeError("kvtier")

    monkeypatch.setattr(rig.connector.scheduler_side, "num_loadable", fail)
    rig.add_request("a", prompt(100, 16), 2)
    rig.run()
    assert rig.finished["a"] == "length"
    assert rig.connector._errors == {("get_num_new_matched_tokens", "RuntimeError")}


def test_a_local_hit_that_shrank_while_its_request_waited_is_noticed(open_rig: OpenRig) -> None:
    """It gave up waiting for room; when there is some, others have taken the blocks that it would have shared."""
    rig = open_rig({"restore.capacity_bound_s": 0}, num_blocks=24)
    rig.add_request("before", prompt(100, 16), 2)
    rig.run()
    other = prompt(50_000, 12)
    rig.add_request("other", other, 22 * BLOCK + 20 - len(other))  # grows until it has the whole pool
    rig.step()
    rig.add_request("waits", prompt(100, 16), 2)
    rig.run()
    for number in range(4):
        rig.add_request(f"flush {number}", prompt(10_000 * number + 200_000, 16), 2)
        rig.run()
    rig.add_request("again", (other + rig.outputs["other"])[: 22 * BLOCK - 1], 2)
    rig.run()
    assert stats(rig).hits["host"] > 0
    verify_quiet(rig)


@pytest.mark.parametrize("where", ["scheduler_side.num_loadable", "scheduler_side.kv.match"])
def test_a_hook_that_fails_once_leaves_no_wrong_block_behind(
    where: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    fail_once(*owner_of(rig.connector, where), monkeypatch)
    for number in range(3):
        rig.add_request(f"r{number}", prompt(100, 16), 2)
        rig.run()
        rig.add_request(f"o{number}", prompt(70_000 + 1_000 * number, 16), 2)
        rig.run()
    assert set(rig.finished.values()) == {"length"}
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    "name",
    ["_work.end", "_jobs.note", "_take_outcomes", "_publish_computed", "_begin_load", "_note_table", "_note_scheduled"],
)
def test_an_exception_within_the_scheduler_half_strands_nobody(
    name: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    fail_once(*owner_of(rig.connector.scheduler_side, name), monkeypatch)
    rig.run()
    for number in range(3):
        rig.add_request(f"after {number}", prompt(100 + 5_000 * number, 16), 2)
        rig.run()
    assert set(rig.finished.values()) == {"length"}
    rig.check_nothing_is_held()


@pytest.mark.parametrize("name", ["_known_device.written", "_copier", "_await", "_submit"])
def test_an_exception_within_the_worker_strands_nobody(
    name: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    rig.add_request("again", prompt(100, 16), 2)
    fail_once(*owner_of(worker(rig), name), monkeypatch)
    rig.run()
    assert rig.finished["again"] == "length"
    assert rig.worker._errors == {("_begin_step", "RuntimeError")}
    rig.worker._errors.clear()
    verify_quiet(rig)


def test_copies_that_do_not_end_keep_no_engine_busy_and_cost_one_wait(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig({"restore.episode_budget_s": 0.1}, num_blocks=24)
    fill(rig)
    gate, copier = threading.Event(), worker(rig)._worker
    assert copier is not None
    scatter = copier._scatter
    monkeypatch.setattr(copier, "_scatter", lambda *args: gate.wait(30) and scatter(*args))
    rig.add_request("again", prompt(100, 16), 2)
    deadline = time.monotonic() + 10
    while "have not ended within their time" not in caplog.text and time.monotonic() < deadline:
        rig.step()
    assert rig.status("again") == "WAITING_FOR_REMOTE_KVS", "until then the copies may write its blocks"
    rig.abort("again")
    side = rig.connector.scheduler_side
    monkeypatch.setattr(side, "_busy_until", 0.0)
    assert not side.is_busy
    gate.set()
    rig.add_request("later", prompt(90_000, 1), 1)
    deadline = time.monotonic() + 10
    while (side._jobs or rig.scheduler.has_requests()) and time.monotonic() < deadline:
        rig.step()
    assert caplog.text.count("have not ended within their time") == 1
    verify_quiet(rig)


def test_no_step_waits_while_a_copy_is_late_already(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    side = worker(rig)
    waits: list[float] = []

    def take(timeout: float) -> list[Any]:
        waits.append(timeout)
        return []

    monkeypatch.setattr(side, "_take_results", take)
    monkeypatch.setattr("kvtier_connectors.vllm.worker.FENCE_S", 0.001)
    side._outstanding |= {901, 902}
    side._await({900})
    assert waits == [], "who has told a job waits for it no more"
    side._await({901})
    assert waits
    waits.clear()
    side._await({902})
    assert waits == []
    assert side._late == {901, 902}
    side._outstanding.clear()
    side._late.clear()


def test_a_second_end_is_nothing(open_rig: OpenRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    for half_of_it in (rig.worker, rig.connector):
        half_of_it.shutdown()
        half_of_it.shutdown()
    assert "kvtier" not in {record.name.partition(".")[0] for record in caplog.records}


def test_a_worker_that_cannot_copy_strands_nobody(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    fail_once(worker(rig)._worker, "submit", monkeypatch)
    rig.add_request("again", prompt(100, 16), 2)
    rig.run()
    assert rig.finished["again"] == "length"
    assert rig.worker._errors == {("_begin_step", "RuntimeError")}
    rig.worker._errors.clear()
    verify_quiet(rig)


def test_what_a_worker_tells_twice_counts_once(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    report = worker(rig).report

    def twice() -> Any:
        told = report()
        told.results = [result for result in told.results for _ in range(2)]
        return told

    monkeypatch.setattr(worker(rig), "report", twice)
    rig.add_request("again", prompt(100, 16), 2)
    rig.run()
    assert rig.finished["again"] == "length"
    verify_quiet(rig)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"modle": "x"}, "modle"),
        ({"model": "x", "settings": {"host.sise": 1}}, "host.sise"),
        ({"model": "x", "settings": "host.size"}, "settings must be an object"),
        ({"model": {}}, "model must be a string, not {}"),
        ({"model": "x", "config": 5}, "config must be the name of a file, not 5"),
        ({"model": "x", "config": "/nowhere/kvtier.toml"}, "/nowhere/kvtier.toml"),
    ],
)
def test_what_cannot_be_meant_is_an_error_at_start(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerRig(MODULE, NAME, extra)


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("scheduler_config", "async_scheduling", True, "--no-async-scheduling"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config", "decode_context_parallel_size", 2, "context"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
    ],
)
def test_an_engine_whose_steps_overlap_is_refused(
    section: str, name: str, value: object, words: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    monkeypatch.setattr(getattr(rig.vllm_config, section), name, value)
    with pytest.raises(ConfigError, match=words):
        KVTierConnector(rig.vllm_config, KVConnectorRole.WORKER, rig.kv_cache_config)


def test_a_cache_of_another_shape_is_refused(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    tensors = {name: tensor[:-1] for name, tensor in rig.pool.tensors.items()}
    with pytest.raises(LayoutError, match="not its 24 blocks"):
        worker(rig).register(tensors)


def failing_now_and_then(report: Callable[[], Any], chance: random.Random) -> Callable[[], Any]:
    """Results that come late, twice, or with blocks that were not copied."""
    late: list[Any] = []

    def failing() -> Any:
        told = report()
        if chance.random() < 0.2:
            late.extend(told.results)
            told.results = []
        else:
            told.results[:0], late[:] = late, []
        told.results += [result for result in told.results if chance.random() < 0.05]
        for index, result in enumerate(told.results):
            if chance.random() < 0.1:
                copied = tuple(chance.random() < 0.7 for _ in result.copied)
                told.results[index] = type(result)(result.job_id, copied, CopyFailure.RAISED)
        return told

    return failing


@pytest.mark.parametrize(
    ("policy", "has_own_cache"), [("on_evict", True), ("write_through", True), ("on_evict", False)]
)
@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_reads_right_kv_and_ends(
    seed: int, policy: str, has_own_cache: bool, open_rig: OpenRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share prefixes, in a pool for two or three of them: preempted, aborted, reset, under a host pool
    that is small too, with and without a disk, while copies fail now and then."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {"store.policy": policy, "host.size": chance.choice(["2MiB", "16MiB"])}
    settings["restore.capacity_bound_s"] = chance.choice([0, 60])
    if seed % 2:
        settings |= {"disk.path": [str(tmp_path)], "disk.size": "64MiB", "disk.min_free": 1}
    sizes = {"num_blocks": chance.choice([14, 24, 40]), "max_num_seqs": 4, "max_num_batched_tokens": 128}
    rig = open_rig(settings, enable_prefix_caching=has_own_cache, **sizes)
    monkeypatch.setattr(worker(rig), "report", failing_now_and_then(worker(rig).report, chance))
    longest = rig.vllm_config.model_config.max_model_len
    names: list[str] = []
    for number in range(60):
        name = f"r{number}"
        base = prompt(10_000 * chance.randrange(4), chance.randrange(1, 10), chance.randrange(1, BLOCK))
        if chance.random() < 0.3:
            base = base[: len(base) // 2] + prompt(90_000 + 1_000 * number, 1)
        max_tokens = chance.choice([1, 3, 40])
        rig.add_request(name, base[: longest - max_tokens], max_tokens, cache_salt=chance.choice([None, None, "salt"]))
        names.append(name)
        for _ in range(chance.randrange(12)):
            if not rig.scheduler.has_requests():
                break
            rig.step()
        if chance.random() < 0.15:
            victim = chance.choice(names)
            if victim in rig.scheduler.requests:
                rig.abort(victim)
        if chance.random() < 0.05:
            with suppress(RuntimeError):  # vLLM refuses while requests that do not run hold what was loaded for them
                rig.reset_prefix_cache(running=True, connector=chance.random() < 0.5)
    rig.run(200_000)
    assert set(rig.finished) == set(names)
    verify_quiet(rig)
