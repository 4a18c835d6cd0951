"""The Redis tier's benchmark on sizes too small to say anything of speed: what it prints, and that it is measured."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.testing.redis_servers import RedisServer
from kvtier_connectors.bench import redis_figures, redis_limit, redis_traffic
from kvtier_connectors.bench.good import GOOD
from kvtier_connectors.bench.redis_limit import Place, RawClient
from kvtier_connectors.bench.redis_traffic import RedisBench, RedisSizes, Values
from kvtier_connectors.shapes import SHAPES
from tests.redis_servers.needed import needs_redis_server

pytestmark = needs_redis_server

SMALL = RedisSizes(moved_bytes=4 << 20, lookup_keys=5000, reads_a_run=4, mixed_ops=5)
OWN_SERVERS = "Redis servers of its own, on free ports of 127.0.0.1: one, then a cluster of three\n"


def figures_of(topology: str) -> list[str]:
    moved = {threads: [f"store.c{threads}", f"restore.c{threads}"] for threads in (1, 4, 16)}
    return [
        f"{topology}.{figure}"
        for figure in (
            *moved[1],
            "restore.p50_ms",
            "restore.p99_ms",
            *moved[4],
            "mixed.c4",
            "mixed.c4.p50_ms",
            "mixed.c4.p99_ms",
            *moved[16],
            "lookup.hits",
            "lookup.holes",
            "lookup.none",
        )
    ]


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_figures, "RedisSizes", lambda: SMALL)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["bench", "tiers", *args])
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


def verify_lines(out: str, names: list[str]) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [line["figure"] for line in lines] == names
    for line in lines:
        assert line["figure"] in GOOD
        assert math.isfinite(line["value"])
        assert line["value"] > 0
        assert line["limit"] > 0
        assert line["runs"] >= 1


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_figure_is_printed(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["--tier", "redis", "--shape", shape, "--json", "--runs", "1"], capsys)
    assert (code, err) == (0, OWN_SERVERS)
    verify_lines(out, figures_of("redis") + figures_of("redis.cluster"))


def test_a_server_that_is_named_is_used_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as server:
        server.command("SET", "another's", "value")
        code, out, err = run(["--tier", "redis", "--redis", server.url, "--json", "--runs", "1"], capsys)
        assert (code, err) == (0, "")
        verify_lines(out, figures_of("redis"))
        assert server.command("KEYS", "*") == [b"another's"]
        sets = int(server.info("commandstats")["cmdstat_set"].split("calls=")[1].split(",")[0])
        assert sets > 2 * 3 * 2  # two sides, three numbers of threads, two blocks at least


def test_the_limit_moves_the_same_bytes_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict.fromkeys(("store", "restore", "ask"), 0)

    def count(owner: type, name: str) -> None:
        real: Callable[..., None] = getattr(owner, name)

        def counted(*args: Any) -> None:
            calls[name] += len(args[1]) if len(args) > 1 else 1
            real(*args)

        monkeypatch.setattr(owner, name, counted)

    count(RawClient, "store")
    count(RawClient, "restore")
    count(redis_limit.RawLookup, "ask")
    with RedisServer() as server:
        found = list(redis_figures.redis_figures(server.url, "smollm2", SHAPES["smollm2"], 2, SMALL))
    assert [figure.figure for figure in found] == figures_of("redis")
    blocks = (4 << 20) // SHAPES["smollm2"].block_bytes
    mixed = 4 * 5 * 3
    # One to warm up and two measured, with 1, 4 and 16 threads; each verified once; single reads; mixed traffic.
    assert calls["store"] + calls["restore"] == 3 * (3 + 3 + 1) * blocks + 2 * 4 + mixed
    assert calls["store"] > 3 * 3 * blocks
    assert calls["ask"] == 3 * 3


def test_blocks_differ_and_damage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    values = Values(SHAPES["smollm2"], SMALL)
    assert len({bytes(block) for block in values.sources}) == values.num_blocks == 11
    with RedisServer() as server, RedisBench(Place([server.url]), values, 2) as bench:
        bench.store_blocks()
        bench.raw_store_blocks()
        bench.verify()
        names = server.command("KEYS", "*:raw:*")
        assert isinstance(names, list)
        assert len(names) == 11
        assert isinstance(names[0], bytes)
        server.command("SETRANGE", names[0], 1000, b"\0" * 8)
        with pytest.raises(AssertionError, match="1 of 11 blocks of the limit came back with other bytes"):
            bench.verify()


def test_a_failed_benchmark_still_empties_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: RedisBench) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(RedisBench, "restore_blocks", fail)
    with RedisServer() as server:
        figures = redis_figures.redis_figures(server.url, "smollm2", SHAPES["smollm2"], 1, SMALL)
        with pytest.raises(ZeroDivisionError):
            list(figures)
        assert server.command("DBSIZE") == 0


def test_credentials_come_of_the_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(redis_figures, "CONCURRENCY", (1,))
    with RedisServer(users={"default": "off", "ann": ">of-ann ~* +@all"}) as server:
        args = ["--tier", "redis", "--redis", server.url, "--json", "--runs", "1"]
        code, _, err = run(args, capsys)
        assert (code, len(err.splitlines())) == (2, 1)
        assert f"--redis {server.url} cannot be used: NOAUTH" in err
        monkeypatch.setenv("KVTIER_REDIS__USERNAME", "ann")
        monkeypatch.setenv("KVTIER_REDIS__PASSWORD", "of-ann")
        code, out, err = run(args, capsys)
        assert (code, err) == (0, "")
        assert "redis.lookup.none" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--redis", "redis://127.0.0.1:1"], "--redis is for --tier redis"),
        (["--tier", "redis", "--dir", "x"], "--dir is for --tier disk"),
        (["--tier", "redis", "--redis", "rediss://127.0.0.1:1"], "measured over TCP without TLS"),
        (["--tier", "redis", "--redis", "redis://127.0.0.1:1"], "--redis redis://127.0.0.1:1 cannot be used: "),
        (["--tier", "redis", "--redis", "127.0.0.1:1"], "write redis://host:port"),
    ],
)
def test_bad_options_are_one_clear_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_server_without_room_is_told_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer(maxmemory=16 << 20) as server:
        code, out, err = run(["--tier", "redis", "--redis", server.url], capsys)
    assert (code, out) == (2, "")
    assert "needs 272 MiB of free memory there, and of maxmemory 16 MiB" in err


def test_a_short_reply_of_the_server_ends_the_measurement() -> None:
    with RedisServer() as server, RawClient(Place([server.url]), 1) as raw:
        (made,) = [raw.block(b"kvtier-bench-x", 100)]
        value = memoryview(bytearray(random.randbytes(100)))
        raw.store([made], [value])
        raw.restore([made], [value])
        server.command("SET", "kvtier-bench-x", b"z" * 101)
        with pytest.raises(AssertionError, match="another answer was expected"):
            raw.restore([made], [value])
    assert redis_traffic.new_key() != redis_traffic.new_key()
