"""The command line's frame: what it lists, how it finds subcommands, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import IO

import pytest

from kvtier.cli import COMMAND_GROUP, main

# A package's command in each of the shapes an entry point may have.
PLUGIN = """
import typer
from kvtier.errors import ConfigError

app = typer.Typer()

@app.command()
def tiers(tier: str, as_json: bool = typer.Option(False, "--json")) -> None:
    print("tiers", tier, as_json)

@app.command()
def fail(code: int) -> None:
    raise typer.Exit(code)

def function(count: int = 1) -> None:
    \"\"\"Counts.\"\"\"
    print("counted", count)

def absent() -> None:
    open("/no/such/file")

def wrong() -> None:
    raise ConfigError("host.size = 'x':\\nwrong")

def needy() -> None:
    import no_such_library.part

def broken() -> None:
    import kvtier_connectors.no_such_module
"""

# Prints the help, then which of the slow imports it took.
HELP_AND_IMPORTS = """
import sys
from kvtier.cli import main

try:
    main(["--help"])
except SystemExit as exited:
    assert exited.code == 0
slow = {"torch", "transformers", "pyarrow", "pydantic", "kvtier_engine", "kvtier_connectors", "kvtier_kernels"}
print("imported:", sorted(slow & set(sys.modules)))
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    (tmp_path / "kvtier_cli_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvtier_cli_plugin", raising=False)
    targets = {
        "bench": "kvtier_cli_plugin:app",
        "absent": "kvtier_cli_plugin:absent",
        "broken": "kvtier_cli_plugin:broken",
        "count": "kvtier_cli_plugin:function",
        "demo": "kvtier_cli_plugin:needy",
        "gone": "kvtier_no_such_plugin:command",
        "selftest": "no_such_library:command",
        "typo": "kvtier_cli_plugin:no_such_name",
        "wrong": "kvtier_cli_plugin:wrong",
    }
    return [EntryPoint(name, value, COMMAND_GROUP) for name, value in targets.items()]


def run(args: list[str], commands: list[EntryPoint] | None = None) -> int:
    with pytest.raises(SystemExit) as exited:
        main(args, commands)
    assert isinstance(exited.value.code, int)
    return exited.value.code


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def test_help_lists_every_command_and_loads_none(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--help"], commands) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in commands)
    assert "Measure storing, restoring and lookup" in text
    assert "kvtier_cli_plugin" not in sys.modules


def test_the_installed_program_answers_without_heavy_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_AND_IMPORTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported: []\n"), done.stdout
    assert {"bench", "demo", "selftest", "config"} <= set(done.stdout.split())


def test_the_distribution_registers_its_commands_and_script() -> None:
    assert {"bench", "demo", "selftest"} <= set(entry_points(group=COMMAND_GROUP).names)
    program = Path(sys.executable).with_name("kvtier")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("kvtier 0.")


def test_arguments_reach_the_real_command(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tiers", "host", "--json"], commands) == 0
    assert run(["count", "--count", "3"], commands) == 0
    assert capsys.readouterr().out == "tiers host True\ncounted 3\n"


def test_help_behind_a_command_is_the_real_commands(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["count", "--help"], commands) == 0
    text = capsys.readouterr().out
    assert "kvtier count" in text
    assert "Counts." in text


def test_exit_codes_and_usage_errors_pass_through(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "fail", "3"], commands) == 3
    assert run(["bench", "tiers", "host", "--no-such-option"], commands) == 2
    assert run(["no-such-command"], commands) == 2
    assert "no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("selftest", "needs the module no_such_library, which is not installed: pip install kvtier"),
        ("demo", "needs the module no_such_library, which is not installed: pip install 'kvtier[engine]'"),
        ("broken", "needs the module kvtier_connectors.no_such_module, which is not installed: reinstall"),
        ("gone", "needs the module kvtier_no_such_plugin, which is not installed: reinstall an installed package"),
        ("typo", "cannot be loaded (kvtier_cli_plugin:no_such_name)"),
        ("wrong", "host.size = 'x': wrong"),
    ],
)
def test_failures_are_one_line_and_exit_code_two(
    name: str, line: str, commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name], commands) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.startswith("kvtier: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_config_shows_each_value_and_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_HOST__SIZE", "64MiB")
    assert run(["config", "--json"], []) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["host.size"] == {
        "value": 64 << 20,
        "source": "environment variable KVTIER_HOST__SIZE",
    }
    assert shown["settings"]["store.policy"] == {"value": "on_evict", "source": "default"}
    assert shown["host_pool_bytes"] == 64 << 20
    assert run(["config"], []) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in shown["settings"])
    assert "environment variable KVTIER_HOST__SIZE" in table


def test_config_tells_of_memory_that_is_a_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_HOST__SIZE", "1GiB")
    monkeypatch.setenv("KVTIER_HOST__POOL", "server")
    assert run(["config"], []) == 0
    assert "An engine would not start: host.pool = 'server' takes" in capsys.readouterr().out
    monkeypatch.setenv("KVTIER_SERVER__URL", "kvtier+unix:///run/s")
    assert run(["config"], []) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Host memory of one engine: at most 1.00 GiB of that of kvtier+unix:///run/s"


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_config_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    path = "/mnt/" + "/".join(["a-directory-of-a-long-name"] * 6)
    monkeypatch.setenv("KVTIER_DISK__PATH", path)
    assert run(["config"], []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    (row,) = [line for line in lines if "disk.path" in line]
    assert path in row
    assert "environment variable KVTIER_DISK__PATH" in row


def test_config_shows_defaults_though_the_environment_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_FOO", "1")
    assert run(["config"], []) == 2
    assert "kvtier config --defaults" in capsys.readouterr().err
    assert run(["config", "--defaults"], []) == 0
    assert "host.size" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_program(arguments, full, unbuffered)
    assert done.returncode == 1
    assert done.stderr == "kvtier: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_left_is_no_news(arguments: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = run_program(arguments, pipe, unbuffered)
    assert (done.returncode, done.stderr) == (1, "")


def run_program(arguments: list[str], output: IO[bytes], unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvtier.cli import main; main()", *arguments],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_error_of_a_command_that_is_not_the_outputs_keeps_its_traceback(commands: list[EntryPoint]) -> None:
    with pytest.raises(FileNotFoundError):
        main(["absent"], commands)


@pytest.mark.parametrize("size", ["64XB", "4096TiB"])
def test_a_wrong_setting_is_one_line(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_HOST__SIZE", size)
    assert run(["config"], []) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvtier: host.size = ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("paths", "shown"), [(None, "none"), ("/mnt/a", "/mnt/a"), ("/mnt/a:/mnt/b", "/mnt/a:/mnt/b")])
def test_directories_are_shown_as_they_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, paths: str | None, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    if paths is not None:
        monkeypatch.setenv("KVTIER_DISK__PATH", paths)
    with pytest.raises(SystemExit):
        main(["config"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "disk.path" in line]
    assert row.split()[3] == shown
