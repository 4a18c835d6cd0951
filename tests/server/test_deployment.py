"""What stands in packaging/: the unit is one that systemd takes, and all of it names what exists."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest

from kvtier.config import DaemonSettings, load_settings
from kvtier.config.sources import setting_fields, variable_name
from kvtier.config.supervisor import Supervisor
from kvtier.server.logs import JsonFormatter, TextFormatter

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "kvtier-server.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze: apt-get install systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/bin/kvtier-server", sys.executable))  # one that is there
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    broken = tmp_path / "broken.service"  # control: it does look
    broken.write_text(unit.read_text().replace("Type=notify", "Type=notified"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(broken)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "notified" in done.stderr


def unit_settings() -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", UNIT.read_text(), re.MULTILINE))


def test_the_unit_waits_longer_than_the_daemon_takes() -> None:
    unit = unit_settings()
    assert float(unit["TimeoutStopSec"]) > DaemonSettings().drain_s + 10
    assert unit["Type"] == "notify"
    assert float(unit["WatchdogSec"]) >= 10
    assert unit["RestartPreventExitStatus"] == "2"
    assert f"/run/{unit['RuntimeDirectory']}/" in DaemonSettings().socket
    assert unit["RuntimeDirectoryMode"] == "0710"
    assert int(unit["LimitNOFILE"]) >= 3 * DaemonSettings().max_clients


@pytest.mark.parametrize("name", ["Containerfile", "kubernetes.yaml"])
def test_variables_are_settings_and_it_says_that_it_was_not_run(name: str) -> None:
    text = (PACKAGING / name).read_text()
    known = {variable_name(each) for each in setting_fields()}
    assert set(re.findall(r"\bKVTIER_[A-Z_]+\b", text)) <= known
    assert "has not been" in text.split("\n\n")[0]


def test_the_settings_in_the_config_map_are_valid(tmp_path: Path) -> None:
    text = (PACKAGING / "kubernetes.yaml").read_text()
    block = text.partition("kvtier.toml: |\n")[2].partition("\n---")[0]
    config = tmp_path / "kvtier.toml"
    config.write_text("\n".join(line[4:] for line in block.splitlines()))
    tomllib.loads(config.read_text())
    settings = load_settings(config, env={})
    settings.daemon.check()
    assert "memory: 18Gi" in text
    assert settings.host.size == 16 << 30


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Supervisor()),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "3000000"}, Supervisor("/run/n", 3.0)),
        ({"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "0"}, Supervisor("@abstract", None)),
        ({"NOTIFY_SOCKET": "vsock:2:1", "WATCHDOG_USEC": "soon"}, Supervisor()),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, Supervisor()),
    ],
)
def test_a_supervisor_is_read_from_the_environment(env: dict[str, str], expected: Supervisor) -> None:
    assert Supervisor.read(env) == expected


def test_a_line_of_the_log_is_an_object_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("kvtier.test")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    logger.warning("a \n line of %s", '"words"', extra={"uid": 7, "peer": Path("/x"), "tenant": None})
    try:
        raise ValueError("no\nway")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == 'a \n line of "words"'
    assert (first["level"], first["logger"], first["uid"], first["peer"]) == ("warning", "kvtier.test", 7, "/x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: no\nway" in second["traceback"]


def test_a_line_of_text_shows_the_fields_too() -> None:
    record = logging.makeLogRecord({"name": "kvtier.audit", "msg": "connect", "uid": 7, "tenant": ""})
    assert TextFormatter("%(name)s: %(message)s").format(record) == "kvtier.audit: connect (uid=7)"
