"""The command `kvtier-server`: checks, or serves until it is told to stop."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.config.sources import LoadedSettings, load_settings_with_sources
from kvtier.errors import ConfigError, KVTierError

__all__ = ["main"]

WRONG_SETTINGS = 2
"""The exit code for what a restart does not mend."""

_HELP = (
    "One KV cache for all engines of a machine, and for those beside it. Reads a TOML file, the environment and these "
    "options; see docs/server.md."
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 after a stop that was asked for, or a check without faults; 1 for a check
    with faults, or a failure; 2 for settings that it cannot start with, said in one line on stderr."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=_HELP)(_server)
    try:
        typer.main.get_command(app)(args=args, prog_name="kvtier-server")
    except KVTierError as error:
        sys.stderr.write(f"kvtier-server: {' '.join(str(error).split())}\n")
        sys.exit(WRONG_SETTINGS)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier-server {__version__}")
        raise typer.Exit


def _server(
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file; without it that of KVTIER_CONFIG, if any.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as daemon.max_clients=64; any number."),
    ] = None,
    socket: Annotated[str | None, typer.Option("--socket", help="As --set daemon.socket=.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", help="As --set daemon.listen=.")] = None,
    http: Annotated[str | None, typer.Option("--http", help="As --set daemon.http=.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Show settings and sizing, say what is wrong, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print one JSON object.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Reads settings, then checks or serves."""
    texts = dict(_parse_set(each) for each in sets or ())
    for name, text in (("socket", socket), ("listen", listen), ("http", http)):
        if text is not None:
            texts[f"daemon.{name}"] = text

    def load() -> LoadedSettings:
        return load_settings_with_sources(config, texts=texts)

    if as_json and not check:
        raise ConfigError("--json is for --check: add it, or set daemon.log_format=json for a log of objects")
    if check:
        sys.exit(_check(load, as_json=as_json))
    _serve(load)


def _parse_set(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text[:200]!r}: write NAME=VALUE, such as --set daemon.max_clients=64")
    return name.strip(), value


def _serve(load: Any) -> None:
    settings = load().settings
    try:
        from kvtier.server.daemon import Daemon
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvtier-server needs the module {error.name}, which is not installed: pip install 'kvtier[server]'"
        ) from error
    from kvtier.config.supervisor import Supervisor
    from kvtier.server.logs import set_up_logs
    from kvtier.server.sizing import raise_open_files

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the daemon takes it: its default would be the end
    set_up_logs(settings.daemon)
    raise_open_files(settings)
    gc.collect()
    gc.freeze()  # modules: no collection looks at them again while somebody waits for an answer
    Daemon(settings, load=lambda: load().settings, supervisor=Supervisor.read()).run()


def _check(load: Any, *, as_json: bool) -> int:
    from kvtier.server.checking import check_settings

    report = check_settings(load)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        report.print()
    return 1 if report.faults else 0
