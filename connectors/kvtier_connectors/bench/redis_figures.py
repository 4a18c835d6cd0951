"""Figures of the Redis tier: blocks to servers and back, mixed traffic and look-ups, against the least client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.layout import KVLayout
from kvtier.testing.redis_servers import RedisCluster, RedisServer
from kvtier_connectors.bench.figures import Figure, measure_pairs, steady
from kvtier_connectors.bench.redis_limit import Place
from kvtier_connectors.bench.redis_traffic import LookupBench, RedisBench, RedisSizes, Values, named_place

__all__ = ["RedisSizes", "redis_figures"]

MAX_SLOW_RUNS = 5
CONCURRENCY = (1, 4, 16)
MIXED_CONCURRENCY = 4


def redis_figures(url: str | None, shape: str, layout: KVLayout, runs: int, sizes: RedisSizes) -> Iterator[Figure]:
    """Each as soon as it is measured: at servers of its own, one and then a cluster, or at the one of `url` alone.

    Raises ConfigError for a URL that cannot be used and a server without room, KVTierError without redis-server.
    """
    values = Values(layout, sizes)
    if url is not None:
        with named_place(url, sizes) as place:
            yield from _figures_at(place, "redis", shape, values, runs)
        return
    with RedisServer(maxmemory=sizes.server_bytes) as server:
        yield from _figures_at(Place([server.url]), "redis", shape, values, runs)
    with _cluster(sizes) as place:
        yield from _figures_at(place, "redis.cluster", shape, values, runs)


@contextmanager
def _cluster(sizes: RedisSizes) -> Iterator[Place]:
    # A timeout that no burst of the benchmark reaches: a fail-over would be measured otherwise.
    with RedisCluster(3, node_timeout_ms=15_000, maxmemory=sizes.server_bytes) as cluster:
        yield Place(cluster.urls, is_cluster=True)


def _figures_at(place: Place, name: str, shape: str, values: Values, runs: int) -> Iterator[Figure]:
    slow_runs = min(runs, MAX_SLOW_RUNS)
    for threads in CONCURRENCY:
        with RedisBench(place, values, threads) as bench:
            yield measure_pairs(
                f"{name}.store.c{threads}", shape, "GB/s", bench.store_blocks, bench.raw_store_blocks, slow_runs
            )
            yield measure_pairs(
                f"{name}.restore.c{threads}", shape, "GB/s", bench.restore_blocks, bench.raw_restore_blocks, slow_runs
            )
            bench.verify()
            if threads == 1:
                yield from _latency(bench, name, shape, runs)
            if threads == MIXED_CONCURRENCY:
                yield from _mixed(bench, name, shape, slow_runs)
    with LookupBench(place, values.sizes.lookup_keys) as lookups:
        for which in lookups.cases:
            value, limit = lookups.timed(which)
            yield measure_pairs(f"{name}.lookup.{which}", shape, "ms", value, limit, runs)


def _latency(bench: RedisBench, name: str, shape: str, runs: int) -> Iterator[Figure]:
    """Percentiles of single reads at random, tier and limit in turn."""
    tier_ms, raw_ms = [], []
    with steady():
        for index in bench.some_at_random(runs):
            tier_ms.append(bench.read_one(index))
            raw_ms.append(bench.raw_read_one(index))
    yield from _percentiles(f"{name}.restore", shape, tier_ms, raw_ms)


def _mixed(bench: RedisBench, name: str, shape: str, runs: int) -> Iterator[Figure]:
    """The rate of whole rounds, tier and limit in turn, and the time that single blocks took in them."""
    tier_ms: list[float] = []
    raw_ms: list[float] = []
    name = f"{name}.mixed.c{bench.threads}"
    yield measure_pairs(
        name, shape, "GB/s", lambda: bench.mix_blocks(tier_ms), lambda: bench.raw_mix_blocks(raw_ms), runs
    )
    yield from _percentiles(name, shape, tier_ms, raw_ms)


def _percentiles(name: str, shape: str, tier_ms: list[float], raw_ms: list[float]) -> Iterator[Figure]:
    for percent in (50, 99):
        value, limit = (float(np.percentile(times, percent)) for times in (tier_ms, raw_ms))
        yield Figure(f"{name}.p{percent}_ms", shape, value, "ms", limit, len(tier_ms))
