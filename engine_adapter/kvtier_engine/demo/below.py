"""The tier below host memory that the demo's two processes share: a directory, Redis under a prefix of the run, or a
kvtier-server that the demo starts."""

from __future__ import annotations

import logging
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.config import RedisSettings, load_settings
from kvtier.errors import ConfigError
from kvtier.frame import frame_bytes
from kvtier_engine.demo.directory import check_room, ended_by_exception, fresh_directory

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["Below", "disk_below", "redis_below", "server_below"]

DISK_SHARE = 2  # of the bytes of all sessions: room for segments that are open, spare or half empty
MIN_DISK_BYTES = 256 << 20
MIN_FREE_BYTES = 64 << 20
NO_DISK = {"path": "none"}
SERVER_SHARE = 2  # of the bytes of all sessions
MIN_SERVER_BYTES = 256 << 20
SCAN_COUNT = 1000
ANSWER_S = 5.0
START_S = 20.0
POLL_S = 0.01
DRAIN_S = 5.0

logger = logging.getLogger("kvtier.demo")


@dataclass(frozen=True, slots=True)
class Below:
    """name: the tier's. overrides: kvtier's settings for so many blocks of so many bytes; raises ConfigError where
    there is no room for them."""

    name: str
    overrides: Callable[[int, int], dict[str, Any]]


@contextmanager
def disk_below(parent: Path | None) -> Iterator[Below]:
    """As `fresh_directory`."""
    with fresh_directory(parent) as directory:

        def overrides(num_blocks: int, block_bytes: int) -> dict[str, Any]:
            size = max(MIN_DISK_BYTES, DISK_SHARE * num_blocks * frame_bytes(block_bytes))
            check_room(directory, size + MIN_FREE_BYTES)
            return {"disk": {"path": [str(directory)], "size": size, "min_free": MIN_FREE_BYTES}}

        yield Below("disk", overrides)


@contextmanager
def redis_below(url: str) -> Iterator[Below]:
    """A prefix that nobody else has, at that server, whose keys are removed however this ends, as far as the server
    answers then. Raises ConfigError that names --redis for a URL that cannot be used, and a server that does not
    answer."""
    prefix = f"kvtier-demo-{secrets.token_hex(6)}"
    override = {"url": url, "prefix": prefix, "mode": "standalone"}
    settings = load_settings(overrides={"disk": NO_DISK, "redis": override}).redis
    with ended_by_exception(), _client(settings) as client:
        try:
            client.ping()
        except Exception as error:
            raise ConfigError(f"--redis {url}: the server cannot be used: {error}") from error
        try:
            yield Below("redis", lambda _blocks, _bytes: {"disk": NO_DISK, "redis": override})
        finally:
            _remove_all(client, prefix)


@contextmanager
def server_below() -> Iterator[Below]:
    """A kvtier-server of the demo's own, with a socket in a fresh directory and nothing below its memory, which is the
    engines' host memory too; ended however this ends. It starts when it is known how much memory it needs. Raises
    ConfigError when it does not start."""
    with ended_by_exception(), tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory, ExitStack() as stack:
        socket = Path(directory) / "socket"

        def overrides(num_blocks: int, block_bytes: int) -> dict[str, Any]:
            stack.enter_context(_server(socket, max(MIN_SERVER_BYTES, SERVER_SHARE * num_blocks * block_bytes)))
            return {"disk": NO_DISK, "server": {"url": f"kvtier+unix://{socket}"}, "host": {"pool": "server"}}

        yield Below("server", overrides)


@contextmanager
def _server(socket: Path, pool_bytes: int) -> Iterator[None]:
    settings = {
        "host.size": pool_bytes,
        "disk.path": "none",
        "redis.url": "none",
        "server.url": "none",
        "daemon.socket": socket,
        "daemon.listen": "off",
        "daemon.http": "off",
        "daemon.tenants": "none",
        "daemon.credentials": "none",
        "daemon.log_level": "warning",
    }
    command = [sys.executable, "-P", "-c", "from kvtier.server.cli import main; main()"]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"--server: kvtier-server did not start within {START_S:g} s; it said why above")
            time.sleep(POLL_S)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _client(settings: RedisSettings) -> Iterator[Redis]:
    """With the credentials and certificates of the settings. Connects with the first command."""
    try:
        from redis import Redis
    except ImportError as error:
        raise ConfigError("--redis needs redis-py: pip install 'kvtier[redis]'") from error
    (url,) = settings.url
    password = settings.password.get_secret_value()
    if settings.password_file:
        try:
            password = Path(settings.password_file).read_text(encoding="utf-8").removesuffix("\n")
        except OSError as error:
            raise ConfigError(f"redis.password_file: {settings.password_file} cannot be read: {error}") from error
    options: dict[str, Any] = {
        "username": settings.username,
        "password": password or None,
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
    }
    if url.startswith("rediss:"):
        options |= {
            "ssl_ca_certs": settings.tls_ca_file,
            "ssl_certfile": settings.tls_cert_file,
            "ssl_keyfile": settings.tls_key_file,
        }
    with Redis.from_url(url, **options) as client:
        yield client


def _remove_all(client: Redis, prefix: str) -> None:
    try:
        for key in client.scan_iter(match=f"{prefix}:*", count=SCAN_COUNT):
            client.unlink(key)
    except Exception as error:  # noqa: BLE001 - whatever it is, the demo is over
        logger.error("keys that begin with %s: could not be removed (%s); remove them by hand", prefix, error)  # noqa: TRY400
