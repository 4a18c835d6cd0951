"""The command line: `kvtier config`, what asks a daemon or a directory, and what packages add as `kvtier.commands`.

An entry point of that group names a `typer.Typer` or a function with annotated parameters. It is imported when its
command runs, so listing the commands imports neither torch nor the packages that stand on the core.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvtier import __version__, explain_command, live_commands
from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from kvtier.config import MemorySnapshot, Settings

__all__ = ["COMMAND_GROUP", "build_app", "main"]

COMMAND_GROUP = "kvtier.commands"
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_OUR_PACKAGES = ("kvtier", "kvtier_connectors", "kvtier_engine", "kvtier_kernels")


class _Listing(NamedTuple):
    help: str
    extra: str | None

    @property
    def install(self) -> str:
        return f"pip install 'kvtier[{self.extra}]'" if self.extra else "pip install kvtier"


# What `kvtier --help` shows for the commands of this distribution, without importing them.
_LISTINGS = {
    "bench": _Listing("Measure storing, restoring and lookup against what the machine can do.", None),
    "demo": _Listing(
        "Chat sessions on a real model whose KV cache is stored in host memory and on disk, and restored.", "engine"
    ),
    "selftest": _Listing("Prove on the configured store that restored blocks are bit-equal to stored ones.", None),
}


class CommandError(KVTierError):
    """A registered subcommand cannot be loaded here; the message says what to install."""


def main(args: Sequence[str] | None = None, commands: Iterable[EntryPoint] | None = None) -> None:
    """Run the command line, with the installed commands unless others are given.

    A mistake of the caller's ends in exit code 2 and one line on stderr. Output that cannot be written ends in exit
    code 1, with one line unless whoever read it has left.
    """
    app = build_app(entry_points(group=COMMAND_GROUP) if commands is None else commands)
    try:
        try:
            typer.main.get_command(app)(args=args, prog_name="kvtier")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else it would fail in the interpreter's exit, out of our hands
    except KVTierError as error:
        _complain(str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        if error.errno != errno.EPIPE:
            _complain(f"the output cannot be written: {error.strerror}")
        sys.exit(1)


def _complain(message: str) -> None:
    sys.stderr.write(f"kvtier: {' '.join(message.split())}\n")


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's exit can flush it."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def build_app(commands: Iterable[EntryPoint]) -> typer.Typer:
    """The application with its own commands and these; each loads what it names only when it is run."""
    app = typer.Typer(
        name="kvtier", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP
    )
    app.callback()(_root)
    app.command("config")(_config)
    live = live_commands
    for own in (live.ping, live.stat, live.top, live.ls, live.flush, live.verify, explain_command.explain):
        app.command(own.__name__)(own)
    for command in sorted(commands, key=lambda command: command.name):
        _register(app, command)
    return app


_HELP = "Keeps the KV cache of a paged-attention LLM engine alive after it leaves the GPU."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before a subcommand."""


def _config(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Leave file and environment out.")] = False,
) -> None:
    """Show every setting in effect and where it comes from."""
    from kvtier.config import MemorySnapshot, load_settings_with_sources

    loaded = load_settings_with_sources(env={} if defaults else None)
    memory = MemorySnapshot.read()
    pool_bytes = loaded.settings.host.pool_bytes(memory)
    values = {
        f"{section}.{name}": value
        for section, group in loaded.settings.model_dump(mode="json").items()
        for name, value in group.items()
    }
    if as_json:
        settings = {name: {"value": value, "source": loaded.sources[name]} for name, value in values.items()}
        typer.echo(json.dumps({"settings": settings, "host_pool_bytes": pool_bytes}, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(title, overflow="fold") for title in ("setting", "value", "source")))
    for name, value in values.items():
        table.add_row(name, _as_written(value), loaded.sources[name])
    console = Console()
    if not console.is_terminal:  # as wide as it is: nothing is cut where a program reads it
        options = console.options.update(max_width=1 << 16)
        console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)
    console.print(_host_memory(loaded.settings, pool_bytes, memory), soft_wrap=True)


def _host_memory(settings: Settings, pool_bytes: int, memory: MemorySnapshot) -> str:
    try:
        if not settings.has_server_pool:
            return f"Host pool of one engine: {pool_bytes / 2**30:.2f} GiB ({memory.describe()})"
    except ConfigError as error:
        return f"An engine would not start: {error}"
    return f"Host memory of one engine: at most {pool_bytes / 2**30:.2f} GiB of that of {settings.server.url}"


def _as_written(value: object) -> str:
    """A setting's value as the environment would give it."""
    if isinstance(value, list):
        return ("," if any("://" in item for item in value) else os.pathsep).join(value) or "none"
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items()) or "none"
    if value in (None, ""):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _register(app: typer.Typer, entry_point: EntryPoint) -> None:
    name = entry_point.name
    listing = _LISTINGS.get(name)
    owner = entry_point.dist.name if entry_point.dist else "an installed package"

    # Everything behind the name, `--help` included, is left for the real command to read.
    @app.command(
        name,
        help=listing.help if listing else f"Provided by {owner}.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    )
    def forward(context: typer.Context) -> None:
        try:
            run = _load(entry_point)
            code = run(args=context.args, prog_name=f"kvtier {name}", standalone_mode=False)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            remedy = f"reinstall {owner}" if missing in _OUR_PACKAGES or not listing else listing.install
            raise CommandError(f"{name} needs the module {error.name}, which is not installed: {remedy}") from error
        if isinstance(code, int) and code:
            raise typer.Exit(code)


def _load(entry_point: EntryPoint) -> Callable[..., object]:
    """Import what the entry point names, as a callable that takes arguments and runs the command."""
    try:
        command = entry_point.load()
    except ModuleNotFoundError:
        raise
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that does not load
        raise CommandError(f"{entry_point.name} cannot be loaded ({entry_point.value}): {error}") from error
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")  # joins the lines of a paragraph
    app.command(entry_point.name)(command)
    return typer.main.get_command(app)
