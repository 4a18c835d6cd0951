"""The conformance suite on the Redis tier: one server, a Unix socket, lifetimes, TLS, and a cluster of three."""

from __future__ import annotations

import pytest

from kvtier.clock import MonotonicClock
from kvtier.frame import frame_bytes
from kvtier.testing.conformance import TierConformance
from kvtier.testing.redis_servers import RedisCluster, RedisServer, TlsFiles
from kvtier.tiers.base import Tier
from kvtier.tiers.redis import RedisTier
from tests.redis.rig import settings_of

SLACK_BYTES = 4 << 20
"""For what connections take while a block is on its way."""


class RedisConformance(TierConformance):
    block_bytes = 256 << 10

    def bound(self, server: RedisServer, capacity_blocks: int) -> None:
        used = int(server.info("memory")["used_memory"])
        room = used + SLACK_BYTES + capacity_blocks * frame_bytes(self.block_bytes)
        server.command("CONFIG", "SET", "maxmemory", str(room))


class TestOneServer(RedisConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.server = server

    def make_tier(self, capacity_blocks: int) -> Tier:
        self.bound(self.server, capacity_blocks)
        return RedisTier(settings_of(self.server.url, timeout_s=5.0), MonotonicClock())


class TestOddLengthWithLifetimes(TestOneServer):
    block_bytes = 3 * 4096 - 1000

    def make_tier(self, capacity_blocks: int) -> Tier:
        self.bound(self.server, capacity_blocks)
        return RedisTier(settings_of(self.server.url, timeout_s=5.0, ttl_s=60.0), MonotonicClock())


class TestUnixSocket(TestOneServer):
    def make_tier(self, capacity_blocks: int) -> Tier:
        self.bound(self.server, capacity_blocks)
        return RedisTier(settings_of(f"unix://{self.server.socket_path}", timeout_s=5.0), MonotonicClock())


class TestTls(RedisConformance):
    @pytest.fixture(autouse=True)
    def _server(self, tls_server: RedisServer, tls_files: TlsFiles) -> None:
        self.server, self.ca_file = tls_server, tls_files.ca_file

    def make_tier(self, capacity_blocks: int) -> Tier:
        self.bound(self.server, capacity_blocks)
        settings = settings_of(self.server.url, timeout_s=5.0, tls_ca_file=str(self.ca_file))
        return RedisTier(settings, MonotonicClock())


class TestCluster(RedisConformance):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    def make_tier(self, capacity_blocks: int) -> Tier:
        for node in self.cluster.masters:
            self.bound(node, capacity_blocks)
        settings = settings_of(tuple(self.cluster.urls[:1]), mode="cluster", timeout_s=5.0)
        return RedisTier(settings, MonotonicClock())
