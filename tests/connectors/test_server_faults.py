"""`kvtier bench faults --tier server` on tiny sizes: a kvtier-server that is killed, stopped and started again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier_connectors.bench import faults, remote_fault_figures, step_time
from kvtier_connectors.bench.faults import CASES, FaultSizes
from kvtier_connectors.bench.good import GOOD


@pytest.fixture
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FaultSizes", lambda: FaultSizes(num_chains=4, steps=250))
    monkeypatch.setattr(remote_fault_figures, "NEEDED_BYTES", 1 << 20)
    monkeypatch.setattr(remote_fault_figures, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(step_time, "POPULATION", 32)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.bug("HS14", "HS16", "LK05")
@pytest.mark.usefixtures("_small_sizes")
def test_faults_of_a_server_have_a_row_each_and_the_bars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench", "faults", "--tier", "server", "--dir", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    assert (exited.value.code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    rows = {line["fault"]: line for line in lines if "fault" in line}
    figures = {line["figure"]: line["value"] for line in lines if "figure" in line}
    assert set(rows) == {"none", *(case.name for case in CASES["server"])}
    for name, row in rows.items():
        assert row["wrong_blocks"] == 0, row
        assert 0 <= row["lost_blocks"] <= row["asked_blocks"], row
        assert row["late_waits"] == 0, row
        assert (row["back_s"] is None) == name.endswith("for good"), row
    assert rows["none"]["lost_blocks"] == 0
    for name in ("killed", "stopped", "killed, over TCP", "stopped, over TCP", "restarting"):
        assert rows[name]["lost_blocks"] > 0, name
        assert rows[name]["noticed_s"] is not None, name
    expected = [
        f"faults.server.{figure}.{case}"
        for case in ("stopped", "killed", "restarting")
        for figure in ("step_time", "waited", "unhindered", "back")
    ]
    assert list(figures) == [*expected, "faults.server.warm"]
    assert set(figures) <= set(GOOD)
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["faults.server.warm"] == 1.0
    for case in ("stopped", "killed"):  # one that is there every other second may be called sick amid a wait
        assert figures[f"faults.server.unhindered.{case}"] == 1.0
    assert list(tmp_path.iterdir()) == []
