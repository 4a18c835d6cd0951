"""The conformance suite on the tier over a daemon: its memory mapped, and over TCP; with checksums and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.clock import MonotonicClock
from kvtier.testing.conformance import TierConformance
from kvtier.tiers.base import Tier
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
        # One client may hold half of the pool: twice as much is as if that were all.
        size = 2 * capacity_blocks * self.block_bytes
        settings = {"host.size": max(size, 1 << 20), "host.slab": "1MiB"} | self.settings
        daemon = self.stack.enter_context(daemon_at(self.directory, settings))
        url = daemon.unix_url if self.kind == "unix" else daemon.tcp_url
        token_file = None if self.kind == "unix" else daemon.token_file
        return ServerTier(settings_of(url, timeout_s=5.0, token_file=token_file), MonotonicClock())


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
