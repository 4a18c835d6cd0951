"""The selftest: it passes on a sound store, says what it cannot restore, and fails when one byte differs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import below
from kvtier.cli import main
from kvtier.config import (
    DiskSettings,
    HostSettings,
    RedisSettings,
    RestoreSettings,
    ServerSettings,
    Settings,
    StoreSettings,
)
from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import KVKind, KVLayout
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier_connectors.contract import CopyJob, CopyResult
from kvtier_connectors.selftest import SelftestReport, run_selftest
from kvtier_connectors.selftest import run as selftest_run
from kvtier_connectors.worker import KVTierWorker

SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_tokens=16)  # 4 KiB
SMALL_OPTIONS = ["--layers", "2", "--kv-heads", "2", "--head-dim", "16"]


def small_settings(num_blocks: int, **groups: Any) -> Settings:
    return Settings(host=HostSettings(size=num_blocks * 4096, slab=4096), **groups)


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["selftest", *args])
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_run, "BUDGET_BYTES", 1 << 20)
    monkeypatch.setenv("KVTIER_HOST__SIZE", "8MiB")
    monkeypatch.setenv("KVTIER_HOST__SLAB", "1MiB")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def verify_passed(report: SelftestReport) -> None:
    assert report.ok, report.problems
    assert report.bit_equal
    assert report.blocks_restored > 0
    assert report.blocks_wrong == 0


def test_a_pool_that_holds_everything_restores_everything_and_a_small_one_evicts() -> None:
    report = run_selftest(small_settings(4096), SMALL, seed=1)
    verify_passed(report)
    assert report.host_bytes == 4096 * 4096
    assert report.blocks_evicted > 0
    assert set(report.misses) == {"evicted"}


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 17, 64])
def test_tiny_host_pools_miss_with_reasons_and_never_restore_wrong_bytes(num_blocks: int) -> None:
    for seed in range(3):
        report = run_selftest(small_settings(num_blocks), SMALL, seed=seed)
        verify_passed(report)
        assert report.blocks_evicted > 0
        assert sum(report.misses.values()) > 0
        assert set(report.misses) <= {"absent", "being_stored", "evicted"}


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(3, 1, 5, "float32", 7),  # segments of 140 bytes, slots that blocks do not fill
        KVLayout(2, 1, 576, "float8_e4m3", 16, KVKind.MLA),
        KVLayout(1, 1, 1, "int8", 1),
    ],
    ids=["odd", "mla", "two bytes"],
)
def test_layouts_of_all_kinds(layout: KVLayout) -> None:
    settings = Settings(host=HostSettings(size=4 << 20, slab=1 << 20))
    verify_passed(run_selftest(settings, layout, seed=2))


def test_policies_and_bounds_of_the_settings_do_not_stand_in_the_way() -> None:
    settings = small_settings(
        64,
        store=StoreSettings(policy="off", max_inflight_blocks=1),
        restore=RestoreSettings(enabled=False, max_inflight_blocks=1),
    )
    verify_passed(run_selftest(settings, SMALL, seed=3))


@pytest.mark.parametrize("layout", [SMALL, KVLayout(3, 1, 5, "float32", 7)], ids=["a page", "odd"])
def test_a_disk_is_tested_beside_what_it_caches(tmp_path: Path, layout: KVLayout) -> None:
    paths = (str(tmp_path / "one"), str(tmp_path / "two"))
    disk = DiskSettings(path=paths, size=64 << 20, min_free=1, min_uses=9, max_write_rate=1, codec="lz4")
    report = run_selftest(small_settings(64, disk=disk), layout, seed=5)
    verify_passed(report)
    assert report.blocks_from_disk > 0
    assert len(report.disk_modes) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "remote",
    [
        {"server": ServerSettings(url="kvtier+unix:///nowhere/kvtier.sock")},
        {"redis": RedisSettings(url=("redis://127.0.0.1:1",))},
    ],
)
def test_tiers_that_others_live_off_are_left_alone(remote: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the tier was opened")

    monkeypatch.setattr(below, "open_server", refuse)
    monkeypatch.setattr(below, "open_redis", refuse)
    verify_passed(run_selftest(small_settings(64, **remote), SMALL, seed=1))


def test_host_memory_that_is_a_servers_is_left_alone_too() -> None:
    settings = Settings(
        host=HostSettings(size=1 << 20, pool="server"), server=ServerSettings(url="kvtier+unix:///nowhere/kvtier.sock")
    )
    with pytest.raises(ConfigError, match="leaves a kvtier-server alone"):
        run_selftest(settings, SMALL, seed=1)


def test_a_disk_that_gives_nothing_back_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(tier: DiskTier, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        return [WriteOutcome.STORED] * len(requests)

    monkeypatch.setattr(DiskTier, "write", lose)
    disk = DiskSettings(path=(str(tmp_path / "one"),), size=64 << 20, min_free=1)
    report = run_selftest(small_settings(64, disk=disk), SMALL, seed=5)
    assert "no block was restored from disk" in report.problems
    assert report.blocks_wrong == 0


def test_a_disk_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = DiskSettings(path=(str(tmp_path / "file" / "cache"),), size=64 << 20)
    with pytest.raises(ConfigError, match=r"disk\.path"):
        run_selftest(small_settings(64, disk=disk), SMALL, seed=5)


def test_one_seed_flips_one_byte() -> None:
    first, second, other = (
        run_selftest(small_settings(4096), SMALL, seed=seed, corrupt=True).problems for seed in (7, 7, 8)
    )
    assert first == second != other


@pytest.mark.parametrize("seed", range(5))
def test_one_flipped_byte_is_found(seed: int) -> None:
    report = run_selftest(small_settings(4096), SMALL, seed=seed, corrupt=True)
    assert not report.ok
    assert not report.bit_equal
    assert "came back wrong" in report.problems[0]


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 17, 64])
def test_a_flipped_byte_fails_tiny_pools_too(num_blocks: int) -> None:
    assert not run_selftest(small_settings(num_blocks), SMALL, seed=0, corrupt=True).ok


def test_a_copy_that_reports_success_and_moves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVTierWorker._run

    def lazy(worker: KVTierWorker, job: CopyJob, *rest: Any) -> None:
        if job.direction.value == "store":
            real(worker, job, *rest)
        else:
            worker._tell(CopyResult(job.job_id, (True,) * len(job.block_ids)), job)

    monkeypatch.setattr(KVTierWorker, "_run", lazy)
    report = run_selftest(small_settings(4096), SMALL, seed=4)
    assert not report.ok
    assert report.blocks_wrong == report.blocks_restored > 0


def test_settings_that_cannot_work_leave_nothing_open() -> None:
    with pytest.raises(LayoutError, match=r"host\.slab"):
        run_selftest(small_settings(8), KVLayout(32, 8, 128, "bfloat16", 16), seed=0)
    with pytest.raises(ConfigError, match=r"host\.size"):
        run_selftest(Settings(host=HostSettings(size="1024TiB")), SMALL, seed=0)  # type: ignore[arg-type]


def test_the_command_prints_a_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*SMALL_OPTIONS, "--seed", "5"], capsys)
    assert code == 0
    assert err == ""
    assert "2 layers, 2 KV heads of 16, bfloat16, 16 tokens: blocks of 4 KiB" in out
    assert out.splitlines()[-1].startswith("selftest passed: ")


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*SMALL_OPTIONS, "--json"], capsys)
    assert code == 0
    report = json.loads(out)
    assert report["ok"] is True
    assert report["bit_equal"] is True
    assert report["blocks_stored"] > 0
    assert report["blocks_restored"] > 0
    assert report["layout"]["head_dim"] == 16
    assert isinstance(report["seed"], int)


def test_the_command_reads_the_file_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsize = "4MiB"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KVTIER_HOST__SIZE")
        code, out, _ = run([*SMALL_OPTIONS, "--json", "--config", str(path)], capsys)
    assert code == 0
    assert json.loads(out)["host_bytes"] == 4 << 20


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_the_command_fails_when_a_byte_is_flipped(as_json: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*SMALL_OPTIONS, "--corrupt", "--seed", "6", *as_json], capsys)
    assert code == 1
    if as_json:
        assert json.loads(out)["bit_equal"] is False
    else:
        assert "selftest FAILED" in out
        assert "--seed 6" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "gpt5"], "shape 'gpt5' is not one of llama8b, smollm2"),
        (["--dtype", "int3"], "dtype 'int3'"),
        (["--layers", "2000"], "host.slab"),
    ],
)
def test_a_bad_layout_is_one_clear_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(args, capsys)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_command_imports_neither_torch_nor_the_engine() -> None:
    script = f"""
import sys
from kvtier.cli import main

try:
    main(["selftest", *{SMALL_OPTIONS!r}])
except SystemExit as exited:
    assert exited.code == 0
assert not {{"torch", "transformers", "kvtier_engine"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_small_blocks_do_not_make_it_long() -> None:
    """What counts is blocks as much as bytes: a pool of small slots holds hundreds of thousands."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=3, dtype="int8", block_tokens=1)
    report = run_selftest(Settings(host=HostSettings(size=1 << 30)), layout, seed=1)
    assert report.ok
    assert report.blocks_stored < 10_000
