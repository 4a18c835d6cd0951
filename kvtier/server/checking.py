"""`kvtier-server --check`: all that can be known to be wrong without starting, and what would be started."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtier.config import MemorySnapshot, Settings
from kvtier.config.serving import split_address
from kvtier.config.sources import LoadedSettings
from kvtier.errors import ConfigError, KVTierError
from kvtier.server.listening import group_number, shut_out, tls_context
from kvtier.server.opening import credentials_of, plan_tenants
from kvtier.server.sizing import read_sizing
from kvtier.server.tenants import read_token

__all__ = ["CheckReport", "check_settings"]


_LISTENS = 1 << 16
"""Of a socket's flags in /proc/net/unix."""
_OWN_SECTIONS = ("host", "disk", "redis", "daemon")


@dataclass(slots=True)
class CheckReport:
    """settings: every one with its value and source, secrets masked. sizing: see `read_sizing`. faults: what keeps the
    daemon from starting. warnings: what does not."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sizing: Mapping[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.faults,
            "settings": self.settings,
            "sizing": self.sizing,
            "faults": self.faults,
            "warnings": self.warnings,
        }

    def print(self) -> None:
        """On stdout, for people; of settings that a daemon has no use for, those that are set."""
        from rich.console import Console

        console = Console(soft_wrap=True, highlight=False, markup=False)
        for name, each in self.settings.items():
            if each["source"] == "default" and name.partition(".")[0] not in _OWN_SECTIONS:
                continue
            console.print(f"{name} = {_shown(each['value'])}  ({each['source']})")
        for line in _lines(self.sizing):
            console.print(line)
        for text in self.warnings:
            console.print(f"warning: {text}")
        for text in self.faults:
            console.print(f"fault: {text}")
        console.print("not ready to start" if self.faults else "ready to start")


def check_settings(load: Callable[[], LoadedSettings]) -> CheckReport:
    """Load settings and check all of them, as far as nothing need be opened for it. Never raises KVTierError."""
    report = CheckReport()
    try:
        loaded = load()
    except KVTierError as error:
        report.faults.append(str(error))
        return report
    settings = loaded.settings
    report.settings = {
        f"{section}.{name}": {"value": value, "source": loaded.sources[f"{section}.{name}"]}
        for section, group in settings.model_dump(mode="json").items()
        for name, value in group.items()
    }
    checks: tuple[Callable[[], object], ...] = (
        lambda: _check_module("kvtier-server", "msgspec", "server"),
        lambda: _check_module("redis.url", "redis", "redis") if settings.redis.url else None,
        settings.daemon.check,
        lambda: tls_context(settings.daemon),
        lambda: _check_tokens(settings),
        lambda: _check_disks(settings, report),
        lambda: _check_socket(settings, report),
        lambda: _size(settings, report),
    )
    for check in checks:
        try:
            check()
        except KVTierError as error:
            report.faults.append(str(error))
    report.warnings += _ports_in_use(settings)
    return report


def _check_module(who: str, module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{who} needs the module {module}, which is not installed: pip install 'kvtier[{extra}]'")


def _check_tokens(settings: Settings) -> None:
    for each in credentials_of(settings):
        if each.kind == "token":
            read_token(each.value)


def _check_disks(settings: Settings, report: CheckReport) -> None:
    """A directory that is there must take files, and one that is not must be able to be made. As this user."""
    for path in settings.disk.path:
        place = Path(path).expanduser().absolute()
        near = _nearest(place)
        if (reason := _unwritable(near)) is None:
            continue
        text = f"disk.path = {path!r}: {reason}, for this user"
        if near == place or not near.is_dir():
            raise ConfigError(f"{text}; make it a directory of the daemon's user, or change it")
        report.warnings.append(
            f"{text}; make the directory, for the daemon's user, or have systemd make it (StateDirectory=)"
        )


def _check_socket(settings: Settings, report: CheckReport) -> None:
    """Its directory, and what is in its place. Connects to nothing."""
    daemon = settings.daemon
    if daemon.socket == "off":
        return
    path = Path(daemon.socket).absolute()
    named = f"daemon.socket = {daemon.socket!r}"
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{named}: there is a file that is no socket; move it away, or choose another path")
    if _is_listened_on(path):
        report.warnings.append(f"{named} is listened on now: if not by the daemon that runs, choose another")
    near = _nearest(path.parent)
    if near not in (path.parent, path.parent.parent):
        raise ConfigError(
            f"{named}: there is no directory {str(path.parent.parent)!r}; make it, or choose another path"
        )
    if (reason := _unwritable(near)) is not None:
        report.warnings.append(
            f"{named}: {reason}, for this user; start the daemon as one who may, or have systemd make the directory "
            "(RuntimeDirectory=)"
        )
    if daemon.socket_group is None:
        return
    group_number(daemon.socket_group)
    if near == path.parent and (problem := shut_out(near, daemon.socket_group)):
        report.warnings.append(problem)
    uids = {each.value for each in credentials_of(settings) if each.kind == "uid"}
    if not uids - {str(os.geteuid())}:
        report.warnings.append(
            f"daemon.socket_group = {daemon.socket_group!r} lets its members open the socket, and daemon.credentials "
            "names no other user than this one: add each ('default=uid:1001'), or they are denied"
        )


def _is_listened_on(path: Path) -> bool:
    """As the kernel has it: a socket that a daemon left behind as it was killed is no hindrance."""
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[7] == str(path) and int(fields[3], 16) & _LISTENS:
                return True
    return False


def _nearest(place: Path) -> Path:
    """The path itself, or what is there of those above it."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _unwritable(place: Path) -> str | None:
    if not place.is_dir():
        return f"{str(place)!r} is no directory"
    return None if os.access(place, os.W_OK | os.X_OK) else f"nothing can be written in {str(place)!r}"


def _ports_in_use(settings: Settings) -> Iterator[str]:
    """A warning only: a daemon with these very settings may be running, and be what listens there."""
    for name in ("listen", "http"):
        address = getattr(settings.daemon, name)
        if address == "off":
            continue
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error})"
            yield f"daemon.{name} = {address!r} {reason} now: if not by the daemon that runs, choose another"


def _size(settings: Settings, report: CheckReport) -> None:
    memory = MemorySnapshot.read()
    sizing = read_sizing(settings, plan_tenants(settings, memory), memory)
    report.sizing = sizing.facts
    report.warnings += sizing.warnings


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list):
        value = ",".join(value)
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def _lines(facts: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line a fact; sizes in bytes are told in GiB too."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += _lines(value, f"{prefix}{name}.")
            continue
        shown = _shown(value)
        if name.endswith("_bytes") and isinstance(value, int):
            shown = f"{value} ({value / 2**30:.2f} GiB)"
        lines.append(f"{prefix}{name}: {shown}")
    return lines
