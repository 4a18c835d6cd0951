"""The tiers below host memory that settings name, opened, and what the store must know of each to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtier.clock import Clock
from kvtier.config import DiskSettings, RedisSettings, ServerSettings
from kvtier.errors import ConfigError
from kvtier.keys import Key
from kvtier.memory import HostMemory
from kvtier.metrics import DiskStats, LowerStats, RedisStats, ServerStats, fields_of
from kvtier.slots import SlotPool
from kvtier.tiers.base import Tier
from kvtier.tiers.host import HostTier
from kvtier.tiers.watched import OnGone

if TYPE_CHECKING:
    from kvtier.tiers.disk import Files

__all__ = ["OpenedTier", "TierLimits", "open_disk", "open_redis", "open_server"]

MAX_REMOTE_COOLDOWN_S = 5.0
"""A remote tier is asked again at least so often: nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What bounds the traffic with a tier.

    writers: writes under way at once; one thread more only reads. timeout_s: after which a call that has not ended
    counts as a failure. max_cooldown_s: the longest time for which a sick tier is left alone. min_uses: the use at
    which a block is written. max_write_rate: bytes a second, or 'off'.
    """

    writers: int
    timeout_s: float
    max_cooldown_s: float = 60.0
    min_uses: int = 1
    max_write_rate: int | Literal["off"] = "off"


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """A tier, not yet in use.

    tier: owned by whoever gets this. check_block: raises ConfigError for blocks of a length that it can never hold.
    describe: adds to the counts of any tier those that this one has. words: what was found, for the log. on_gone:
    takes a callback for blocks that it gives up by itself. keys: which blocks of a namespace it holds, with parents
    where these are known, if it can tell. host_pool: the slots of host memory, where those are the tier's; serve: has
    it supply them to the host tier over that pool. host_memory: what they lie in, if it is at hand.
    """

    tier: Tier
    limits: TierLimits
    check_block: Callable[[int], None] = lambda _: None
    describe: Callable[[LowerStats], LowerStats] = lambda stats: stats
    words: str = ""
    on_gone: Callable[[OnGone], object] = lambda _: None
    keys: Callable[[bytes], Sequence[tuple[Key, Key | None]]] = lambda _: ()
    host_pool: SlotPool | None = None
    serve: Callable[[HostTier], None] = lambda _: None
    host_memory: Callable[[], HostMemory | None] = lambda: None


def open_disk(settings: DiskSettings, clock: Clock, files: Files | None = None) -> OpenedTier:
    """The disk tier of these settings, recovered from what its directories hold. Blocks on I/O; raises ConfigError."""
    from kvtier.tiers.disk import DiskTier  # and with it lz4 and xxhash, which a store without a disk needs not

    tier = DiskTier(
        [Path(path).expanduser() for path in settings.path],
        settings.size,
        min_free_bytes=settings.min_free,
        codec=settings.codec,
        clock=clock,
        files=files,
    )
    found = tier.snapshot()
    modes = ", ".join(f"{path} ({mode} I/O)" for path, mode in found.mode.items())

    def describe(stats: LowerStats) -> DiskStats:
        disk = tier.snapshot()
        return DiskStats(
            **fields_of(stats),
            device_written_bytes=disk.written_bytes,
            evicted_blocks=disk.evicted_blocks,
            readmitted_blocks=disk.readmitted_blocks,
            recovered_blocks=disk.recovered_blocks,
            damaged_blocks=disk.damaged,
            reclaimed_files=disk.reclaimed_files,
            modes=disk.mode,
            read_only={path: reason for path, reason in disk.read_only.items() if reason},
        )

    return OpenedTier(
        tier,
        TierLimits(
            writers=settings.threads,
            timeout_s=settings.timeout_s,
            min_uses=settings.min_uses,
            max_write_rate=settings.max_write_rate,
        ),
        tier.check_block,
        describe,
        f"{found.num_blocks} blocks found, {found.used_bytes} of {found.capacity_bytes} bytes used, {modes}",
        tier.subscribe_gone,
        tier.keys,
    )


def _remote_limits(settings: RedisSettings | ServerSettings) -> TierLimits:
    return TierLimits(
        writers=max(1, settings.connections - 1),
        timeout_s=settings.timeout_s,
        max_cooldown_s=MAX_REMOTE_COOLDOWN_S,
        min_uses=settings.min_uses,
        max_write_rate=settings.max_write_rate,
    )


def open_redis(settings: RedisSettings, clock: Clock) -> OpenedTier:
    """The Redis tier of these settings. Waits for the server at most `redis.timeout_s`; one that does not answer is
    joined later. Raises ConfigError for settings that can be known to be wrong without it."""
    from kvtier.tiers.redis import RedisTier  # and with it redis-py, which few installations have

    tier = RedisTier(settings, clock)

    def describe(stats: LowerStats) -> RedisStats:
        redis = tier.snapshot()
        return RedisStats(
            **fields_of(stats),
            damaged_blocks=redis.damaged,
            connections=redis.connections,
            connects=redis.connects,
            disconnects=redis.disconnects,
            redirects=redis.redirects,
            refusals=redis.errors,
            nodes=redis.nodes,
            server_used_bytes=redis.server_used_bytes,
        )

    return OpenedTier(
        tier,
        _remote_limits(settings),
        tier.check_block,
        describe,
        f"{', '.join(settings.url)} ({settings.mode}), "
        + (f"epoch {tier.epoch}" if tier.is_joined else "which cannot be used yet"),
    )


def open_server(settings: ServerSettings, clock: Clock, host_bytes: int | None = None) -> OpenedTier:
    """The server tier of these settings. Waits for the server at most `server.timeout_s`; one that does not answer is
    joined later. Raises ConfigError for settings that can be known to be wrong without it. host_bytes: as in
    `ServerTier`."""
    try:
        from kvtier.tiers.server import ServerTier  # and with it msgspec, which few installations have
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise ConfigError("server.url is set, but msgspec is not installed: pip install 'kvtier[server]'") from error

    tier = ServerTier(settings, clock, host_bytes)

    def describe(stats: LowerStats) -> ServerStats:
        server = tier.snapshot()
        return ServerStats(
            **fields_of(stats),
            damaged_blocks=server.damaged,
            connections=server.connections,
            connects=server.connects,
            disconnects=server.disconnects,
            refusals=server.errors,
            mapped_bytes=server.mapped_bytes,
        )

    return OpenedTier(
        tier,
        _remote_limits(settings),
        tier.check_block,
        describe,
        f"{settings.url}, "
        + (f"{tier.snapshot().server}, epoch {tier.epoch}" if tier.is_joined else "which cannot be used yet")
        + ("" if tier.host_pool is None else f"; host memory is of its memory, {tier.host_pool.nbytes} bytes at most"),
        host_pool=tier.host_pool,
        serve=tier.serve,
        host_memory=lambda: tier.host_memory,
    )
