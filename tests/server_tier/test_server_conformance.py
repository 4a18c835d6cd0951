"""The conformance suite on the tier over a daemon: its memory mapped, and over TCP; with checksums and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.clock import MonotonicClock
from kvtier.testing.conformance import TierConformance
from kvtier.tiers.base import Tier
from kvtier.tiers.host import HostTier
from kvtier.tiers.server import ServerTier
from tests.server_tier.rig import daemon_at, settings_of


class TestMapped(TierConformance):
    block_bytes = 256 << 10
    kind = "unix"
    settings: dict[str, object] = {}  # noqa: RUF012 - read only

    @pytest.fixture(autouse=True)
    def _places(self, tmp_path: Path) -> Iterator[None]:
        with ExitStack() as self.stack:
            self.directory = tmp_path
            yield

    def make_tier(self, capacity_blocks: int) -> Tier:
        url, token_file = self.start_daemon(capacity_blocks)
        return ServerTier(settings_of(url, timeout_s=5.0, token_file=token_file), MonotonicClock())

    def start_daemon(self, capacity_blocks: int) -> tuple[str, str | None]:
        """Where it is, and a token's file for it."""
        # One client may hold half of the pool: twice as much is as if that were all.
        size = 2 * capacity_blocks * self.block_bytes
        settings = {"host.size": max(size, 1 << 20), "host.slab": "1MiB"} | self.settings
        daemon = self.stack.enter_context(daemon_at(self.directory, settings))
        return (daemon.unix_url, None) if self.kind == "unix" else (daemon.tcp_url, daemon.token_file)


class TestHostPool(TestMapped):
    """Of a process whose host pool is the server's memory: blocks of its own memory go there and back all the same."""

    def make_tier(self, capacity_blocks: int) -> Tier:
        url, _ = self.start_daemon(capacity_blocks)
        tier = ServerTier(settings_of(url, timeout_s=5.0), MonotonicClock(), host_bytes=1 << 20)
        pool = tier.host_pool
        assert pool is not None
        self.stack.callback(pool.close)
        tier.serve(HostTier(pool))
        return tier


class TestMappedWithoutChecksums(TestMapped):
    settings = {"daemon.checksums": False}  # noqa: RUF012


class TestOddLength(TestMapped):
    block_bytes = 3 * 4096 - 1000


class TestOneCredit(TestMapped):
    settings = {"daemon.credits": 1}  # noqa: RUF012


class TestTcp(TestMapped):
    kind = "tcp"


class TestTcpOddLengthWithoutChecksums(TestTcp):
    block_bytes = 3 * 4096 - 1000
    settings = {"daemon.checksums": False}  # noqa: RUF012
