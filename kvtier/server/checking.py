"""`kvtier-server --check`: all that can be known to be wrong without starting, and what would be started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from kvtier.config import MemorySnapshot, Settings
from kvtier.config.sources import LoadedSettings
from kvtier.errors import ConfigError, KVTierError
from kvtier.server.listening import tls_context
from kvtier.server.opening import credentials_of, plan_tenants
from kvtier.server.sizing import read_sizing
from kvtier.server.tenants import read_token

__all__ = ["CheckReport", "check_settings"]


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
        """On stdout, for people."""
        from rich.console import Console

        console = Console(soft_wrap=True, highlight=False, markup=False)
        for name, each in self.settings.items():
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
        _check_modules,
        settings.daemon.check,
        lambda: tls_context(settings.daemon),
        lambda: _check_tokens(settings),
        lambda: _size(settings, report),
    )
    for check in checks:
        try:
            check()
        except KVTierError as error:
            report.faults.append(str(error))
    return report


def _check_modules() -> None:
    if find_spec("msgspec") is None:
        raise ConfigError(
            "kvtier-server needs the module msgspec, which is not installed: pip install 'kvtier[server]'"
        )


def _check_tokens(settings: Settings) -> None:
    for each in credentials_of(settings):
        if each.kind == "token":
            read_token(each.value)


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
