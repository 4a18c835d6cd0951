"""Store and connector over real Redis servers that are harmed; and the benchmark that does so, on tiny sizes."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.breaker import BreakerState
from kvtier.cli import main
from kvtier.clock import MonotonicClock
from kvtier.errors import TierError
from kvtier.keys import Extras, digest_tokens
from kvtier.metrics import RedisStats
from kvtier.testing.redis_servers import RedisConnection
from kvtier.testing.redis_servers.waiting import wait_until
from kvtier_connectors.bench import faults, remote_fault_figures, seeded, step_time
from kvtier_connectors.bench.faults import CASES, FaultSizes, quiet, seconds_until_back
from kvtier_connectors.bench.good import GOOD
from kvtier_connectors.bench.ground import Ground, RedisKind, alone, behind_proxy, clustered
from kvtier_connectors.bench.redis_faults import KILLED, STOPPED, make_room, use_up
from kvtier_connectors.bench.rig import FaultRig
from kvtier_connectors.bench.traffic import CHAIN_BLOCKS
from tests.redis_servers.needed import needs_redis_server

pytestmark = needs_redis_server

NUM_CHAINS = 6
TIMEOUT_S = 0.3
SECONDS = 10.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What is logged with a traceback holds views of the host pool, which would look like a leak."""
    with quiet():
        yield


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_ground(stack: ExitStack, kind: RedisKind = alone) -> Ground:
    ground = Ground(None, stack.enter_context(kind()))
    stack.callback(ground.heal)
    return ground


def open_rig(stack: ExitStack, ground: Ground, *, timeout_s: float = SECONDS, max_wait_s: float = SECONDS) -> FaultRig:
    """timeout_s: short where a server is to be silent; long, so that a busy machine is none, where not."""
    rig = ground.open(timeout_s=timeout_s, max_wait_s=max_wait_s)
    stack.callback(rig.close)
    stack.callback(ground.heal)  # first
    return rig


def redis_of(rig: FaultRig) -> RedisStats:
    redis = rig.store.stats().redis
    assert redis is not None
    return redis


def fill(rig: FaultRig, count: int = NUM_CHAINS) -> None:
    """Conversations 0 .. are in Redis, and nowhere else."""
    rig.run([rig.chain(number) for number in range(count)])
    assert rig.store.flush(SECONDS) == 0
    rig.forget_host()
    rig.traffic.forget_figures()


def ask(rig: FaultRig, count: int = NUM_CHAINS) -> int:
    """Ask for them; how many blocks of them were not restored."""
    lost = rig.traffic.lost
    rig.run([rig.chain(number) for number in range(count)])
    return rig.traffic.lost - lost


def verify_quiet(rig: FaultRig) -> None:
    """Between steps, once what was on its way is there or given up."""
    rig.store.flush(1.0)
    wait_until("reads given up end", lambda: rig.store.stats().leases == 0, SECONDS, MonotonicClock())
    rig.verify()
    assert rig.traffic.wrong == 0


# ---- silence, and the way back ---------------------------------------------------------------------------------------


@pytest.mark.bug("HS14")
def test_a_silent_server_costs_one_timeout_and_then_nothing(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    fill(rig)
    STOPPED.begin(ground)
    rig.run([rig.chain(number) for number in range(NUM_CHAINS)])
    assert rig.traffic.recomputed > 0
    assert not rig.tier("redis").is_available
    num_waits, asked = len(rig.traffic.waits), redis_of(rig).questions
    rig.forget_host()
    rig.run([rig.chain(number) for number in range(NUM_CHAINS)])
    assert all(wait.steps == 0 for wait in rig.traffic.waits[num_waits:]), "nobody waits a second time"
    assert redis_of(rig).questions == asked, "nor asks"
    verify_quiet(rig)


@pytest.mark.bug("HS16")
def test_a_server_that_comes_back_is_used_again(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    fill(rig)
    ground.redis.server.stop()
    ask(rig)
    found = rig.tier("redis").breaker
    assert found.state is not BreakerState.CLOSED
    assert found.open_for_s > 0, "since when"
    assert found.next_probe_in_s > 0, "when it is asked next"
    assert redis_of(rig).available == 0
    ground.redis.server.cont()
    assert seconds_until_back(rig, "redis") is not None
    assert rig.tier("redis").breaker.state is BreakerState.CLOSED
    rig.forget_host()
    assert ask(rig) == 0, "what was there is there"
    verify_quiet(rig)


@pytest.mark.bug("HS16")
def test_a_server_that_was_never_there_is_joined_later(stack: ExitStack) -> None:
    ground = make_ground(stack)
    ground.redis.server.kill()
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    ask(rig)
    assert redis_of(rig).blocks == 0
    ground.redis.server.restart()
    assert seconds_until_back(rig, "redis") is not None
    verify_quiet(rig)


@pytest.mark.bug("CR17")
def test_a_server_without_memory_is_not_stormed_and_still_read(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground)
    fill(rig)
    use_up(ground)
    before = redis_of(rig)
    ground.redis.server.command("CONFIG", "RESETSTAT")
    rig.run([rig.chain(number) for number in range(100, 130)])
    rig.store.flush(0.2)
    now = redis_of(rig)
    assert now.disconnects == before.disconnects, "an answer is no reason to leave"
    assert now.connections <= rig.store.settings.redis.connections
    refused = now.refusals["OOM"]
    assert 0 < refused < 30, "of 240 blocks"
    assert sum(count for reason, count in now.ledger.dropped.items() if reason.value == "tier_full") >= refused
    rig.forget_host()
    assert ask(rig) == 0, "reads go on"
    make_room(ground)
    assert seconds_until_back(rig, "redis") is not None
    verify_quiet(rig)


@pytest.mark.bug("CR18")
def test_slots_that_move_to_another_node_lose_nothing(stack: ExitStack) -> None:
    ground = make_ground(stack, clustered())
    rig = open_rig(stack, ground)
    fill(rig)
    cluster = ground.redis.cluster
    assert cluster is not None
    first, second, _ = cluster.masters
    end = 16384 // 3
    slots = [slot for slot in range(end) if first.command("CLUSTER", "COUNTKEYSINSLOT", slot)]
    assert slots
    cluster.migrate(slots, first, second)
    assert ask(rig) == 0
    assert redis_of(rig).redirects > 0
    verify_quiet(rig)


@pytest.mark.bug("SE11")
def test_an_oversize_reply_is_refused_and_costs_no_memory(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground)
    fill(rig)
    rig.run([rig.chain(100)])
    rig.store.flush(SECONDS)
    huge = 64 << 20
    first = rig.chain(0)[0].hex().encode()

    def extend(connection: RedisConnection, key: bytes, length: int) -> None:
        if first in key:
            connection.command("SETRANGE", key, huge, b"end")

    assert ground.redis.change_values(extend)
    rig.forget_host()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ask(rig, 1) == CHAIN_BLOCKS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < huge >> 11, "KiB: less than half of the value"
    lost = rig.traffic.lost
    rig.run([rig.chain(100)])
    assert rig.traffic.lost == lost, "others are served"
    verify_quiet(rig)


@pytest.mark.bug("LK14")
def test_misses_damage_and_refused_connections_leave_no_descriptor_open(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    fill(rig)
    before, connections = num_sockets(), redis_of(rig).connections
    next(case for case in CASES["redis"] if case.name == "halved values").begin(ground)
    ask(rig)
    for start in range(1000, 1600, 100):  # blocks that nobody has
        rig.run([rig.chain(number) for number in range(start, start + 100)])
    ground.redis.server.kill()
    rig.forget_host()
    ask(rig)
    ground.redis.server.restart()
    ground.redis.server.stop()
    rig.forget_host()
    ask(rig)
    ground.redis.server.cont()
    assert seconds_until_back(rig, "redis") is not None
    assert num_sockets() - before <= redis_of(rig).connections - connections, "others were closed"
    verify_quiet(rig)


def num_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


@pytest.mark.bug("LK05")
@pytest.mark.parametrize("is_well", [True, False])
def test_what_goes_to_redis_gives_host_memory_back(stack: ExitStack, *, is_well: bool) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    if not is_well:
        KILLED.begin(ground)
    rig.run([rig.chain(number) for number in range(13)])
    rig.store.flush(1.0)
    stats = rig.store.stats()
    assert (stats.leases, stats.host_blocks) == (0, 13 * CHAIN_BLOCKS)
    evicted = stats.evicted_blocks
    pool_blocks = rig.store.pool.capacity_slots(rig.engine.connector.space.namespace.layout.block_bytes)
    chains = -(-pool_blocks // CHAIN_BLOCKS)
    for start in range(1000, 1000 + chains, 50):
        rig.run([rig.chain(number) for number in range(start, min(start + 50, 1000 + chains))])
        rig.store.flush(1.0)
    assert rig.store.stats().evicted_blocks - evicted == 13 * CHAIN_BLOCKS, "all of them could give way"
    verify_quiet(rig)


@pytest.mark.bug("PF04")
def test_a_long_prompt_takes_few_round_trips(stack: ExitStack) -> None:
    ground = make_ground(stack, behind_proxy)
    proxy = ground.redis.proxy
    assert proxy is not None
    long = digest_tokens(range(64 * 16), 16, Extras(None, None, ()))
    rig = open_rig(stack, ground)
    rig.run([long])
    assert rig.store.flush(SECONDS) == 0
    another = open_rig(stack, ground)
    before = proxy.round_trips
    another.traffic.known = set(long)
    another.run([long])
    assert another.traffic.lost == 0
    reads = redis_of(another).reads
    assert reads == {"ok": 64}
    # One for all keys, then one for each stretch of a window of bytes; and what new connections cost.
    assert proxy.round_trips - before <= 12
    verify_quiet(another)


@pytest.mark.bug("WR03")
def test_adapters_share_nothing(stack: ExitStack) -> None:
    ground = make_ground(stack)
    tokens = range(CHAIN_BLOCKS * 16)
    chains = {adapter: digest_tokens(tokens, 16, Extras(adapter, None, ())) for adapter in ("A", "B", None)}
    rig = open_rig(stack, ground)
    rig.run([chains["A"]])
    rig.store.flush(SECONDS)
    another = open_rig(stack, ground)
    for adapter, expected in (("B", 0), (None, 0), ("A", CHAIN_BLOCKS)):
        landed = another.traffic.landed
        another.run([chains[adapter]])
        assert another.traffic.landed - landed == expected, adapter
    verify_quiet(another)


@pytest.mark.bug("WR23")
def test_a_reset_reaches_redis_or_says_that_it_did_not(stack: ExitStack) -> None:
    ground = make_ground(stack)
    rig = open_rig(stack, ground, timeout_s=TIMEOUT_S)
    fill(rig)
    assert rig.traffic.reset()
    rig.run([rig.chain(number) for number in range(NUM_CHAINS)])
    assert rig.traffic.landed == 0, "what is there now was stored since, and content differs since"
    epoch = rig.store.epoch
    rig.store.flush(SECONDS)
    again = open_rig(stack, ground)
    assert again.store.epoch == epoch, "across a restart"
    ground.redis.server.stop()
    with pytest.raises(TierError):
        rig.store.reset()
    assert not rig.traffic.reset()
    ground.redis.server.cont()
    assert rig.traffic.reset()
    verify_quiet(rig)


# ---- the benchmark ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FaultSizes", lambda: FaultSizes(num_chains=4, steps=250))
    monkeypatch.setattr(remote_fault_figures, "NEEDED_BYTES", 1 << 20)
    monkeypatch.setattr(remote_fault_figures, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(step_time, "POPULATION", 32)
    monkeypatch.setattr(seeded, "NEEDED_BYTES", 1 << 20)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]], str]:
    with pytest.raises(SystemExit) as exited:
        main(["bench", "faults", *args])
    assert isinstance(exited.value.code, int)
    out, err = capsys.readouterr()
    return exited.value.code, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.usefixtures("_small_sizes")
def test_faults_of_redis_have_a_row_each_and_the_bars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines, err = run(["--tier", "redis", "--dir", str(tmp_path), "--json"], capsys)
    assert (code, err) == (0, "")
    rows = {line["fault"]: line for line in lines if "fault" in line}
    figures = [line for line in lines if "figure" in line]
    assert set(rows) == {"none", *(case.name for case in CASES["redis"])}
    for name, row in rows.items():
        assert row["wrong_blocks"] == 0, row
        assert 0 <= row["lost_blocks"] <= row["asked_blocks"], row
        assert row["late_waits"] == 0 or name == "replies trickle", row
        assert (row["back_s"] is None) == name.endswith("for good"), row
    assert rows["none"]["lost_blocks"] == 0
    for name in ("flipped bits", "halved values", "emptied", "killed", "stopped"):
        assert rows[name]["lost_blocks"] > 0, name
        assert rows[name]["noticed_s"] is not None, name
    expected = [
        f"faults.redis.{figure}.{case}"
        for case in ("stopped", "killed", "failing_over")
        for figure in ("step_time", "waited", "unhindered", "back")
    ]
    assert [line["figure"] for line in figures] == expected
    assert set(expected) <= set(GOOD)
    assert all(math.isfinite(line["value"]) for line in figures)
    assert [line["value"] for line in figures if "unhindered" in line["figure"]] == [1.0, 1.0, 1.0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_small_sizes")
def test_faults_of_all_tiers_are_those_of_either_and_the_random_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("read errors", "killed", "emptied")
    monkeypatch.setitem(CASES, "all", [case for case in CASES["all"] if case.name in some])
    monkeypatch.setattr(remote_fault_figures, "REDIS_FIGURES", ())
    args = ["--tier", "all", "--seeded", "20", "--dir", str(tmp_path), "--json"]
    code, lines, err = run(args, capsys)
    assert code == 0, err
    assert "20 faults of seed" in err
    assert [line.get("fault", line.get("figure")) for line in lines] == [
        "none",
        "disk: read errors",
        "redis: killed",
        "redis: emptied",
        "faults.seeded",
    ]
    assert [line["wrong_blocks"] for line in lines[:4]] == [0] * 4
    assert lines[4]["value"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tier", "host"], "tier 'host' is not one of disk, redis, server, all"),
        (["--tier", "redis", "--seeded", "5"], "--seeded and --seed are for --tier all"),
    ],
)
def test_what_cannot_be_harmed_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args, capsys) == (2, [], f"kvtier: {message}\n")
