"""Servers that the tests of a module share, empty at the beginning of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.errors import KVTierError
from kvtier.testing.redis_servers import RedisCluster, RedisServer, TlsFiles, make_tls_files, require_redis_server

try:
    require_redis_server()
    REASON = ""
except KVTierError as error:
    REASON = str(error)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    if REASON:
        pytest.skip(REASON)
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """One that nobody kills."""
    shared_server.command("FLUSHALL")
    shared_server.command("CONFIG", "SET", "maxmemory", "0")
    return shared_server


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[RedisCluster]:
    if REASON:
        pytest.skip(REASON)
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> RedisCluster:
    for node in shared_cluster.nodes:
        node.command("FLUSHALL")
        node.command("CONFIG", "SET", "maxmemory", "0")
    return shared_cluster


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if REASON:
        pytest.skip(REASON)
    return make_tls_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def shared_tls_server(tls_files: TlsFiles) -> Iterator[RedisServer]:
    with RedisServer(tls=tls_files) as server:
        yield server


@pytest.fixture
def tls_server(shared_tls_server: RedisServer) -> RedisServer:
    shared_tls_server.command("FLUSHALL")
    return shared_tls_server
