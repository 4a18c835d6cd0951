"""The README's example does what it says: run twice, the second time from disk."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
@pytest.mark.slow
def test_the_example_restores_from_disk_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.read_text().split("## A model with a disk below it\n", 1)[1]
    code = section.split("```python\n", 1)[1].split("```", 1)[0]
    script = tmp_path / "example.py"
    script.write_text(code.replace("2GiB", "512MiB").replace("8GiB", "512MiB"))
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # a progress bar's thread would outlive the test
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    runpy.run_path(str(script))
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.endswith("}")]
    assert first.endswith(" 0 {}")
    assert re.search(r" 32 \{'disk': 2\}$", second)
