"""The benchmark of vLLM runs and prints every figure; how fast anything is, is its affair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "vllm.ttft_beside_local_hit",
    "vllm.ttft_beside_cold",
    "vllm.load",
    "vllm.hooks",
    "vllm.match_first",
    "vllm.match_again",
}


@pytest.mark.timeout(300)
def test_every_figure_is_printed() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.vllm_restore", "--json", "--runs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {figure["figure"] for figure in figures} == FIGURES
    assert all(figure["value"] > 0 and figure["limit"] > 0 and figure["bar"] > 0 for figure in figures)
    assert "goes on without it" not in done.stderr + done.stdout
