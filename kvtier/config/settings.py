"""What can be set: one frozen model a subsystem, checked when it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvtier.config.machine import MemorySnapshot
from kvtier.config.serving import DaemonSettings, ServerSettings
from kvtier.config.sizes import parse_host_size, parse_quotas, parse_rate, parse_room, parse_size
from kvtier.config.subsystem import OptionalText, Subsystem
from kvtier.errors import ConfigError

__all__ = [
    "DaemonSettings",
    "DiskSettings",
    "EventSettings",
    "HostSettings",
    "RedisSettings",
    "RestoreSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
]

PAGE_BYTES = 4096
MAX_LIFETIME_S = 366 * 86400.0


def parse_paths(value: object) -> tuple[str, ...]:
    """Directories from a list, or from text in which a colon stands between them; the word 'none' is no directory."""
    paths: list[object] = [None]
    if isinstance(value, str):
        paths = [] if value == "none" else list(value.split(os.pathsep))
    elif isinstance(value, (list, tuple)):
        paths = list(value)
    named = [path for path in paths if isinstance(path, str) and path and "\0" not in path]
    if len(named) != len(paths):
        raise ValueError(
            "write a directory, or several with a colon between them, such as '/mnt/nvme0:/mnt/nvme1', or 'none'"
        )
    if len({os.path.normpath(path) for path in named}) != len(named):
        raise ValueError("name each directory once")
    return tuple(named)


_URL_FORM = (
    "write redis://host:port, rediss://host:port for TLS or unix:///path, several with a comma between them, or 'none'"
)


def parse_urls(value: object) -> tuple[str, ...]:
    """Servers from a list, or from text with commas between them; the word 'none' is no server."""
    if isinstance(value, str):
        value = [] if value == "none" else value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(url, str) for url in value):
        raise ValueError(_URL_FORM)
    urls = tuple(url.strip() for url in value)
    for url in urls:
        try:
            parts = urlsplit(url)
            has_place = bool(parts.path if parts.scheme == "unix" else parts.hostname and parts.port != 0)
        except ValueError:
            raise ValueError(_URL_FORM) from None
        if parts.username is not None or parts.password is not None:
            raise ValueError("keep user and password out of it: set redis.username and redis.password, or a file")
        if parts.scheme in ("redis", "rediss") and parts.path.strip("/").isdecimal():
            database = parts.path.strip("/")
            raise ValueError(
                f"a number of a database, such as /{database}, is not supported: keys are in database 0, told apart by "
                f"redis.prefix; write {parts.scheme}://{parts.netloc}"
            )
        is_plain = not (parts.query or parts.fragment) and (parts.scheme == "unix" or parts.path in ("", "/"))
        if parts.scheme not in ("redis", "rediss", "unix") or not has_place or not is_plain:
            raise ValueError(_URL_FORM)
    if len(set(urls)) != len(urls) or len({urlsplit(url).scheme for url in urls}) > 1:
        raise ValueError("name each server once, and all with TLS or all without")
    return urls


def parse_password(value: object) -> SecretStr:
    """Text that is never shown, in which the word 'none' is none: an empty one."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("write text, or 'none' for none")
    return SecretStr("" if value == "none" else value)


def parse_lifetime(value: object) -> float | Literal["off"]:
    """Seconds of at least 1, or the word 'off'."""
    if value == "off":
        return "off"
    try:
        seconds = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= MAX_LIFETIME_S:
        raise ValueError(f"write seconds from 1 to {MAX_LIFETIME_S:.0f}, or 'off'")
    return seconds


_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}|ipc:///[!-~]*[!-.0-~]", re.ASCII)
_ENDPOINT_FORM = "write tcp://address:port, such as tcp://127.0.0.1:5557, or ipc:///path, or 'off'"


def parse_endpoint(value: object) -> str:
    """An address to listen on: tcp:// with a port, or ipc:// with an absolute path; or the word 'off'."""
    if value == "off":
        return "off"
    if isinstance(value, str) and _ENDPOINT.fullmatch(value):
        port = value.rpartition(":")[2]
        if value.startswith("ipc://") or 0 < int(port) < 1 << 16:
            return value
    raise ValueError(_ENDPOINT_FORM)


def parse_topic(value: object) -> str:
    """Up to 255 printable characters; the word 'none' is no topic."""
    if isinstance(value, str) and re.fullmatch(r"[!-~]{0,255}", value):
        return "" if value == "none" else value
    raise ValueError("write up to 255 printable characters without blanks, or 'none'")


class HostSettings(Subsystem):
    """The host tier: one mapping of this machine's memory."""

    pool: Literal["own", "server"] = "own"
    """Whose memory it is: this process's own, or that of the kvtier-server of `server.url`."""
    size: Annotated[int | Literal["auto"], BeforeValidator(parse_host_size)] = "auto"
    """Bytes of the host pool of one engine, or 'auto'."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Engines on this machine that each hold a pool of this size."""
    slab: Annotated[int, BeforeValidator(parse_size), Field(ge=PAGE_BYTES)] = 64 << 20
    """Bytes by which the pool is handed to a size class of blocks."""
    pin: Literal["off", "prefer", "require"] = "off"
    """Whether the pool's pages are locked in memory."""
    policy: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "lru"
    """Which block gives way when the pool is full: a built-in policy, or one by entry point."""
    quotas: Annotated[Mapping[str, int], BeforeValidator(parse_quotas)] = {}
    """Bytes of the pool that each tenant's blocks may take at most."""

    @model_validator(mode="after")
    def _check(self) -> HostSettings:
        if self.slab & (self.slab - 1):
            raise ValueError(f"host.slab must be a power of two of at least {PAGE_BYTES}, not {self.slab}")
        if self.pool == "own" and self.size != "auto" and self.size < self.slab:
            raise ValueError(
                f"host.size {self.size} is smaller than one slab: raise host.size, or lower host.slab (now {self.slab})"
            )
        if self.size != "auto" and (wrong := self._quota_beyond(self.size)):
            raise ValueError(wrong)
        return self

    def _quota_beyond(self, pool_bytes: int) -> str | None:
        for name, quota in self.quotas.items():
            if quota > pool_bytes:
                return (
                    f"host.quotas: {name!r} may have {quota} bytes, more than the pool of host.size = {self.size} has "
                    f"({pool_bytes}); lower it, or raise host.size"
                )
        return None

    def pool_bytes(self, memory: MemorySnapshot) -> int:
        """Bytes of this engine's pool on a machine with this memory; ConfigError when it has not that much.

        'auto' is half of what machine and control group allow, divided by the workers, in whole slabs.
        """
        if self.size == "auto":
            share = memory.limit_bytes // 2 // self.workers // self.slab * self.slab
            if not share:
                raise ConfigError(
                    f"host.size = 'auto': half of this memory ({memory.describe()}) divided by "
                    f"host.workers = {self.workers} is less than host.slab = {self.slab}; lower one of the two"
                )
            if wrong := self._quota_beyond(share):
                raise ConfigError(wrong)
            return share
        if self.size * self.workers > memory.limit_bytes:
            raise ConfigError(
                f"host.size = {self.size} for each of host.workers = {self.workers} needs {self.size * self.workers} "
                f"bytes, more than there are ({memory.describe()}); lower host.size or host.workers, or use 'auto'"
            )
        return self.size


class StoreSettings(Subsystem):
    """The way down: which blocks are stored, and when."""

    policy: Literal["on_evict", "write_through", "off"] = "on_evict"
    """When a block is stored."""
    horizon_steps: Annotated[float, Field(gt=0, le=1000)] = 2.5
    """Steps of allocation ahead of which an evictable block is stored."""
    max_inflight_blocks: Annotated[int, Field(ge=1)] = 512
    """Blocks whose copy down may be running at once."""
    max_age_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds that a block waits at most to be written to a lower tier."""


class DiskSettings(Subsystem):
    """The disk tier, below host memory. Off unless it has a path."""

    path: Annotated[tuple[str, ...], BeforeValidator(parse_paths)] = ()
    """Directories, each on a device of its own; none: no disk tier."""
    size: Annotated[int, BeforeValidator(parse_size)] = 64 << 30
    """Bytes on disk of all directories together, headers and spare segments included."""
    min_free: Annotated[int, BeforeValidator(parse_room)] = 1 << 30
    """Bytes that stay free on each file system."""
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Writes under way at once; one read more."""
    codec: Literal["raw", "lz4", "shuffle_lz4"] = "raw"
    """How blocks are compressed."""
    min_uses: Annotated[int, Field(ge=1, le=1000)] = 1
    """The use of a block at which it is written."""
    max_write_rate: Annotated[int | Literal["off"], BeforeValidator(parse_rate)] = "off"
    """Bytes a second that are written at most, or 'off'."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """After how many seconds a read or write that has not ended counts as a failure of the device."""


class RedisSettings(Subsystem):
    """The Redis tier, below the disk. Off unless it has a URL."""

    url: Annotated[tuple[str, ...], BeforeValidator(parse_urls)] = ()
    """Servers; of a cluster or Sentinel any that are up, which name the others; none: no Redis tier."""
    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    """What these servers are."""
    service: Annotated[str, Field(min_length=1)] = "mymaster"
    """With Sentinel: the name of the master that it watches."""
    username: OptionalText = None
    """The ACL user; none: the default user."""
    password: Annotated[SecretStr, BeforeValidator(parse_password)] = SecretStr("")
    """Its password; none: that in `password_file`, if there is one."""
    password_file: OptionalText = None
    """A file with the password, read at every connect."""
    tls_ca_file: OptionalText = None
    """Certificates that the server's must be signed by; none: the system's."""
    tls_cert_file: OptionalText = None
    """A certificate to show, for servers that ask for one."""
    tls_key_file: OptionalText = None
    """Its key."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kvtier"
    """What every key begins with."""
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """Whose blocks these are: part of every key."""
    ttl_s: Annotated[float | Literal["off"], BeforeValidator(parse_lifetime)] = "off"
    """Seconds after its last use at which a block goes, or 'off'."""
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    """Connections to each server, and reads and writes under way at once."""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """After how many seconds without the whole answer a server counts as sick."""
    min_uses: Annotated[int, Field(ge=1, le=1000)] = 1
    """The use of a block at which it is written."""
    max_write_rate: Annotated[int | Literal["off"], BeforeValidator(parse_rate)] = "off"
    """Bytes a second that are written at most, or 'off'."""

    @model_validator(mode="after")
    def _check(self) -> RedisSettings:
        if not self.url:
            return self
        schemes = {urlsplit(url).scheme for url in self.url}
        if self.mode == "standalone" and len(self.url) > 1:
            raise ValueError("redis.url names several servers: set redis.mode to 'sentinel' or 'cluster', or name one")
        if self.mode != "standalone" and "unix" in schemes:
            raise ValueError(f"redis.url: a {self.mode} is reached by host and port, not by unix://; name its hosts")
        if self.password.get_secret_value() and self.password_file:
            raise ValueError("redis.password and redis.password_file are both set: keep one")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("redis.tls_cert_file and redis.tls_key_file go together: set both, or none")
        if (self.tls_ca_file or self.tls_cert_file) and schemes != {"rediss"}:
            raise ValueError("redis.tls_ca_file and redis.tls_cert_file need redis.url to begin with rediss://")
        return self


class RestoreSettings(Subsystem):
    """The way up."""

    enabled: bool = True
    """Whether stored blocks are restored at all."""
    max_inflight_blocks: Annotated[int, Field(ge=1)] = 512
    """Blocks that the copying thread has at once on their way from host memory to the GPU pool."""
    max_wait_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that a request waits at most for its blocks to come to host memory."""
    max_staging: Annotated[int, BeforeValidator(parse_size)] = 256 << 20
    """Bytes on their way from lower tiers to host memory at once."""
    margin: Annotated[float, Field(ge=0, le=100)] = 0.1
    """By how much of itself a restore must be faster than computing."""
    capacity_bound_s: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """Seconds that a restore waits at most for GPU blocks, from the first time that it is refused them."""
    episode_budget_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Seconds that lookups, stages and copies of one restore take at most, all attempts together."""
    max_attempts: Annotated[int, Field(ge=1)] = 4
    """Lookups of one restore, the first included."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose restore failed for good."""


class EventSettings(Subsystem):
    """KV events of what each tier holds, for routers. Off unless it has an endpoint."""

    endpoint: Annotated[str, BeforeValidator(parse_endpoint)] = "off"
    """Where events are published, or 'off'."""
    replay_endpoint: Annotated[str, BeforeValidator(parse_endpoint)] = "off"
    """Where listeners ask for batches that they missed, or 'off'."""
    topic: Annotated[str, BeforeValidator(parse_topic)] = ""
    """What listeners subscribe to; empty: they need not."""
    buffer_batches: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    """Past batches that may be asked for again."""

    @model_validator(mode="after")
    def _check(self) -> EventSettings:
        if self.endpoint == self.replay_endpoint != "off":
            raise ValueError("events.replay_endpoint must be another address than events.endpoint")
        return self


class Settings(Subsystem):
    """Everything that can be set. `Settings()` is the defaults; `load_settings` reads file and environment."""

    host: HostSettings = HostSettings()
    disk: DiskSettings = DiskSettings()
    redis: RedisSettings = RedisSettings()
    server: ServerSettings = ServerSettings()
    daemon: DaemonSettings = DaemonSettings()
    store: StoreSettings = StoreSettings()
    restore: RestoreSettings = RestoreSettings()
    events: EventSettings = EventSettings()

    @property
    def has_server_pool(self) -> bool:
        """Whether host memory is a kvtier-server's; ConfigError for settings that do not go with that."""
        if self.host.pool == "own":
            return False
        if not (self.server.url or "").startswith("kvtier+unix:"):
            raise ConfigError(
                "host.pool = 'server' takes the memory of a kvtier-server on this machine: set server.url to its "
                "socket, as kvtier+unix:///path, or host.pool to 'own'"
            )
        if self.host.pin != "off":
            raise ConfigError(
                "host.pin is for memory of this process's own: with host.pool = 'server' set it at the server"
            )
        if self.host.quotas:
            raise ConfigError(
                "host.quotas are for memory of this process's own: with host.pool = 'server' see daemon.tenants"
            )
        return True
