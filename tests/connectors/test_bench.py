"""The benchmarks on sizes too small to say anything of speed: what they print, not how fast anything is."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.cli import main
from kvtier_connectors.bench import lookup, memory, tiers
from kvtier_connectors.bench.figures import Figure, measure_pairs
from kvtier_connectors.bench.good import good_ratio
from kvtier_connectors.selftest.toy_engine import ToyEngine
from kvtier_connectors.shapes import SHAPES

KEYS = ["figure", "shape", "value", "unit", "limit", "ratio", "runs"]
HOST_FIGURES = [
    "host.store",
    "host.restore",
    "host.store_first_touch",
    "pool.start",
    "connector.idle_step",
    "peak_memory",
]
SMALL = tiers.TierSizes(moved_bytes=5 << 20, started_bytes=128 << 20, cached_blocks=1000)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "TierSizes", lambda: SMALL)
    monkeypatch.setattr(lookup, "NUM_TOKENS", 1000)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["bench", *args])
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


def verify_lines(out: str, names: list[str], shape: str | None, max_runs: int) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [line["figure"] for line in lines] == names
    for line in lines:
        assert list(line) == KEYS
        assert math.isfinite(line["value"])
        assert line["value"] >= 0
        assert line["limit"] > 0
        assert line["ratio"] == line["value"] / line["limit"]
        assert line["unit"] in {"GB/s", "s", "us", "MiB", "ms"}
        assert 1 <= line["runs"] <= max_runs
        assert shape in (None, line["shape"])


@pytest.mark.parametrize("shape", list(SHAPES))
def test_tiers_prints_every_figure(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["tiers", "--tier", "host", "--shape", shape, "--json", "--runs", "2"], capsys)
    assert code == 0
    assert err == ""
    verify_lines(out, HOST_FIGURES, shape, 2)


def test_lookup_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["lookup", "--json", "--runs", "3"], capsys)
    assert code == 0
    verify_lines(out, ["lookup.array", "lookup.list"], None, 3)


@pytest.mark.parametrize("args", [["tiers", "--shape", "smollm2"], ["lookup"]])
def test_people_get_a_table_that_says_what_is_good(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*args, "--runs", "1"], capsys)
    assert code == 0
    names = HOST_FIGURES if args[0] == "tiers" else ["lookup.array", "lookup.list"]
    for name in names:
        assert name in out
        assert good_ratio(name, "smollm2") in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tiers", "--tier", "tape"], "tier 'tape' is not one of host"),
        (["tiers", "--shape", "gpt5"], "shape 'gpt5' is not one of llama8b, smollm2"),
    ],
)
def test_a_bad_name_is_one_clear_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_value_and_limit_are_measured_in_turn_with_the_collector_off() -> None:
    calls: list[str] = []

    def work(name: str, results: list[float]) -> Callable[[], float]:
        def timed() -> float:
            assert not gc.isenabled()
            calls.append(name)
            return results.pop(0)

        return timed

    figure = measure_pairs("f", "s", "ms", work("value", [99, 1, 5, 3]), work("limit", [99, 2, 8, 4]), 3)
    assert gc.isenabled()
    assert calls == ["value", "limit", "value", "limit", "limit", "value", "value", "limit"]
    assert figure == Figure("f", "s", 3, "ms", 4, 3)
    assert figure.ratio == 0.75


def test_a_hidden_copy_shows_in_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory._restore

    def wasteful(engine: ToyEngine, digests: list[Any]) -> None:
        real(engine, digests)
        assert np.ones(64 << 20, np.uint8).any()

    layout = SHAPES["smollm2"]
    monkeypatch.setattr(memory, "_restore", wasteful)
    figure = memory.peak_memory_figure("smollm2", layout, 1, 8 << 20)
    assert figure.value > 50
