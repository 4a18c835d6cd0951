"""Settings: one frozen model a subsystem, read from a TOML file, the environment and arguments in one place.

Importing this package imports pydantic; modules that only annotate with `Settings` import it for type checking alone.
"""

from kvtier.config.machine import MemorySnapshot
from kvtier.config.serving import Credential, DaemonSettings, ServerSettings
from kvtier.config.settings import (
    DiskSettings,
    EventSettings,
    HostSettings,
    RedisSettings,
    RestoreSettings,
    Settings,
    StoreSettings,
)
from kvtier.config.sources import LoadedSettings, load_settings, load_settings_with_sources

__all__ = [
    "Credential",
    "DaemonSettings",
    "DiskSettings",
    "EventSettings",
    "HostSettings",
    "LoadedSettings",
    "MemorySnapshot",
    "RedisSettings",
    "RestoreSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "load_settings",
    "load_settings_with_sources",
]
