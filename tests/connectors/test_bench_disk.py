"""The disk tier's benchmarks on sizes too small to say anything of speed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier_connectors.bench import codecs, disk_figures, faults, step_time
from kvtier_connectors.bench.disk import DiskSizes, disk_copy_figures
from kvtier_connectors.bench.disk_age import aged_figures, restart_figure
from kvtier_connectors.bench.good import GOOD
from kvtier_connectors.bench.opening import BufferedFiles, scratch_directory
from kvtier_connectors.bench.plain import PlainFile
from kvtier_connectors.shapes import SHAPES

SMALL = DiskSizes(
    moved_bytes=16 << 20, held_bytes=32 << 20, aged_bytes=64 << 20, segment_bytes=8 << 20, min_free_bytes=1 << 20
)
COPY_FIGURES = [
    "disk.store",
    "disk.restore",
    "disk.restore.p50_ms",
    "disk.restore.p99_ms",
    *(f"disk.{way}.c{threads}" for threads in (1, 4, 16) for way in ("store", "restore")),
    "disk.restore_buffered",
]
AGE_FIGURES = ["disk.warm_restart", "disk.write_amplification", "disk.hit_rate"]
CODEC_FIGURES = [f"codec.{codec}.{what}" for codec in ("lz4", "shuffle_lz4") for what in ("ratio", "down", "up")]


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_figures, "DiskSizes", lambda: SMALL)
    monkeypatch.setattr(disk_figures, "FaultSizes", lambda: faults.FaultSizes(num_chains=4, steps=200))
    monkeypatch.setattr(disk_figures, "FAULTS_NEED_BYTES", 1 << 20)
    monkeypatch.setattr(step_time, "POPULATION", 32)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["bench", *args])
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


def verify_lines(out: str, names: list[str]) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [line["figure"] for line in lines] == names
    for line in lines:
        assert line["figure"] in GOOD
        assert math.isfinite(line["value"])
        assert line["value"] > 0
        assert line["limit"] > 0
        assert line["runs"] >= 1


@pytest.mark.parametrize("shape", list(SHAPES))
def test_tiers_prints_every_figure_of_the_disk(shape: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["tiers", "--tier", "disk", "--shape", shape, "--dir", str(tmp_path), "--json", "--runs", "1"]
    code, out, err = run(args, capsys)
    assert (code, err) == (0, "")
    verify_lines(out, COPY_FIGURES + AGE_FIGURES)
    assert list(tmp_path.iterdir()) == []


def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every limit comes of a plain file that was written or read as often as the tier was."""
    real = {name: getattr(PlainFile, name) for name in ("write", "read", "read_one")}
    calls: dict[str, int] = dict.fromkeys(real, 0)

    def counting(name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls[name] += 1
            real[name](*args)

        return call

    for name in real:
        monkeypatch.setattr(PlainFile, name, counting(name))
    figures = list(disk_copy_figures(tmp_path, "smollm2", SHAPES["smollm2"], 2, SMALL, ()))
    assert [figure.figure for figure in figures] == [*COPY_FIGURES[:4], "disk.restore_buffered"]
    # Two to prepare the file, one to warm up and two measured; in two directories, once without stores.
    assert calls == {"write": 2 + 3 + 2, "read": 3 + 3, "read_one": 200}


def test_the_hit_rate_and_amplification_are_possible_ones(tmp_path: Path) -> None:
    amplification, hit_rate = aged_figures(tmp_path, "smollm2", SHAPES["smollm2"], SMALL)
    assert 1 < amplification.value < 2
    assert 0.1 < hit_rate.value < 1
    assert 0.1 < hit_rate.limit < 1


def test_a_killed_tier_is_opened_with_all_it_held(tmp_path: Path) -> None:
    figure = restart_figure(tmp_path, "llama8b", SHAPES["llama8b"], 2, SMALL)
    assert figure.limit == 2
    assert 0 < figure.value < 60


def test_too_little_room_is_one_line_with_numbers(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"needs 1024000\.0 GiB of free space and .* has \d+\.\d: name another"),
        scratch_directory(tmp_path, 1024_000 << 30),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot be used: No such file"), scratch_directory(tmp_path / "absent", 1):
        pass


def test_dir_is_for_the_disk_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(["tiers", "--dir", str(tmp_path)], capsys)
    assert (code, out, err) == (2, "", "kvtier: --dir is for --tier disk\n")


def test_buffered_files_refuse_direct_io(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            BufferedFiles().open("x", os.O_RDWR | os.O_CREAT | os.O_DIRECT, directory)
        os.close(BufferedFiles().open("x", os.O_RDWR | os.O_CREAT, directory))
    finally:
        os.close(directory)


# ---- codecs ----------------------------------------------------------------------------------------------------------


class Sample:
    """An entry point of the group."""

    name = "tiny"

    def load(self) -> Callable[[], list[bytes]]:
        noise = bytes(range(256)) * 64
        return lambda: [noise, bytes(len(noise))]


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    found = [Sample()]
    monkeypatch.setattr(codecs, "entry_points", lambda group: found if group == "kvtier.samples" else [])
    return found


def test_codecs_prints_every_figure(samples: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["codecs", "--json", "--runs", "1"], capsys)
    assert code == 0
    verify_lines(out, CODEC_FIGURES)
    assert json.loads(out.splitlines()[0])["value"] > 10  # bytes that repeat


def test_codecs_without_a_sample_is_one_line(samples: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    samples.clear()
    code, out, err = run(["codecs"], capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "pip install 'kvtier[engine]'" in err


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_faults_prints_a_row_each_and_the_step_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(["faults", "--tier", "disk", "--dir", str(tmp_path), "--json"], capsys)
    assert (code, err) == (0, "")
    *rows, figure = [json.loads(line) for line in out.splitlines()]
    found = {row["fault"]: row for row in rows}
    assert len(found) == len(rows) == 16
    for row in rows:
        assert row["wrong_blocks"] == 0, row
        assert 0 <= row["lost_blocks"] <= row["asked_blocks"]
        assert row["recomputed_requests"] <= row["asked_requests"]
        assert row["asked_blocks"] > 0
        assert math.isfinite(row["step_effect_ms"])
    for name in ("none", "kill -9", "short reads", "no direct I/O"):
        assert found[name]["lost_blocks"] == 0, name
    for name in ("flipped bits", "read errors", "stalled reads", "stall that ends"):
        assert found[name]["lost_blocks"] > 0, name
    for name in ("flipped bits", "read errors", "write errors", "no space", "stalled reads", "stall that ends"):
        assert found[name]["noticed_s"] is not None, name
    for name, row in found.items():
        is_endless = name in ("stalled reads", "stalled writes", "directory removed")
        assert (row["back_s"] is None) == is_endless, name
    assert figure["figure"] == "faults.step_time"
    assert figure["limit"] == 1
    assert 0 < figure["runs"] <= 200
    assert list(tmp_path.iterdir()) == []
