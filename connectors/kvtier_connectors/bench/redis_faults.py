"""The faults of Redis: what is done to real servers, or to what lies between, and how it ends."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from kvtier.testing.redis_servers import RedisConnection, RedisReplyError
from kvtier_connectors.bench.fault_case import Change, FaultCase
from kvtier_connectors.bench.ground import (
    PASSWORD,
    USER,
    Ground,
    RedisKind,
    alone,
    behind_proxy,
    clustered,
    named_user,
    watched,
)

__all__ = [
    "FAILING_OVER",
    "KILLED",
    "REDIS_FAULTS",
    "STOPPED",
    "empty",
    "end_connections",
    "flip_values",
    "kill",
    "make_room",
    "restart",
    "stop",
    "use_up",
]

SLOTS = 16384
SLOTS_A_MOVE = 64
KILLING_PAUSE_S = 0.02
ROOM_BYTES = 1 << 30
KEPT_SHARE = 3  # of what is used when memory becomes scarce, all but one such part may stay
BUSY_TIMEOUT_S = 30.0
MEAN_CUT_BYTES = 100_000
TRICKLE_BYTES = 64  # every 10 ms: a block of 32 KiB takes 5 s


# ---- the process -----------------------------------------------------------------------------------------------------


def stop(ground: Ground) -> None:
    ground.redis.server.stop()


def kill(ground: Ground) -> None:
    ground.redis.server.kill()


def restart(ground: Ground) -> None:
    ground.redis.server.restart()


def _restart_twice(ground: Ground) -> None:
    restart(ground)
    restart(ground)


# ---- its memory ------------------------------------------------------------------------------------------------------


def flip_values(ground: Ground) -> int:
    """A bit of every block, somewhere in it; of how many blocks."""

    def flip(connection: RedisConnection, key: bytes, length: int) -> None:
        at = ground.random.randrange(length)
        byte = connection.command("GETRANGE", key, at, at)
        assert isinstance(byte, bytes)
        if byte:  # else it is gone since
            connection.command("SETRANGE", key, at, bytes([byte[0] ^ 1]))

    return ground.redis.change_values(flip)


def _flip(ground: Ground) -> None:
    flip_values(ground)


def _halve(ground: Ground) -> None:
    def halve(connection: RedisConnection, key: bytes, length: int) -> None:
        half = connection.command("GETRANGE", key, 0, length // 2)
        assert isinstance(half, bytes)
        connection.command("SET", key, half)

    ground.redis.change_values(halve)


def empty(ground: Ground) -> None:
    ground.redis.server.command("FLUSHALL")


def use_up(ground: Ground) -> None:
    """Its memory is what it uses now, and it evicts nothing."""
    used = ground.redis.server.info("memory")["used_memory"]
    ground.redis.server.command("CONFIG", "SET", "maxmemory", used)


def _make_small(ground: Ground) -> None:
    """It may keep two thirds of what it uses now, and evicts the rest."""
    used = int(ground.redis.server.info("memory")["used_memory"])
    ground.redis.server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    ground.redis.server.command("CONFIG", "SET", "maxmemory", used - used // KEPT_SHARE)


def make_room(ground: Ground) -> None:
    ground.redis.server.command("CONFIG", "SET", "maxmemory", ROOM_BYTES)


# ---- what it lets us do ----------------------------------------------------------------------------------------------


def end_connections(ground: Ground) -> None:
    """Of every client."""
    ground.redis.server.command("CLIENT", "KILL", "TYPE", "normal")


def _change_password(ground: Ground) -> None:
    """And end the connections that had the old one, which would stay as they are."""
    ground.redis.server.command("ACL", "SETUSER", USER, "resetpass", ">another")
    end_connections(ground)


def _change_password_back(ground: Ground) -> None:
    ground.redis.server.command("ACL", "SETUSER", USER, "resetpass", f">{PASSWORD}")


def _keep_busy(ground: Ground) -> None:
    def run_script() -> None:
        with ground.redis.server.connect(BUSY_TIMEOUT_S) as connection:
            connection.command("EVAL", "while true do end", 0)

    ground.redis.keep_doing(run_script, times=1)


def _let_go(ground: Ground) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RedisReplyError):  # it has not begun yet
            ground.redis.server.command("SCRIPT", "KILL")
            break
        time.sleep(KILLING_PAUSE_S)
    ground.redis.rest()


# ---- connections -----------------------------------------------------------------------------------------------------


def _keep_ending_connections(ground: Ground) -> None:
    ground.redis.keep_doing(lambda: end_connections(ground), pause_s=KILLING_PAUSE_S)


def _cut_replies(ground: Ground) -> None:
    assert ground.redis.proxy is not None
    ground.redis.proxy.cut_bytes = MEAN_CUT_BYTES


def _trickle(ground: Ground) -> None:
    assert ground.redis.proxy is not None
    ground.redis.proxy.trickle_bytes = TRICKLE_BYTES


def _heal_proxy(ground: Ground) -> None:
    assert ground.redis.proxy is not None
    ground.redis.proxy.heal()


# ---- several servers -------------------------------------------------------------------------------------------------


def _fail_over(ground: Ground) -> None:
    """In the midst of what follows: the master dies at once, and another is named a second or two later."""
    assert ground.redis.sentinel is not None
    ground.redis.keep_doing(ground.redis.sentinel.fail_over, times=1)


def _rest(ground: Ground) -> None:
    ground.redis.rest()


def _migrate(ground: Ground) -> None:
    """From the first master to the second, some slots after the others, for as long as it lasts."""
    cluster = ground.redis.cluster
    assert cluster is not None
    source, target = cluster.masters[:2]

    end = SLOTS // len(cluster.masters)
    left = iter([range(start, min(start + SLOTS_A_MOVE, end)) for start in range(0, end, SLOTS_A_MOVE)])

    def move() -> None:
        if slots := next(left, None):
            cluster.migrate(slots, source, target)

    ground.redis.keep_doing(move)


def _await_replica(ground: Ground) -> None:
    """Until it has taken over."""
    assert ground.redis.cluster is not None
    ground.redis.cluster.wait_ok()


def _case(name: str, injected: str, begin: Change, end: Change = Ground.heal, **more: Any) -> FaultCase:
    return FaultCase(name, injected, begin, end, **{"tier": "redis", "redis": alone, **more})


def _met_again(
    lasts_s: float, name: str, injected: str, begin: Change, end: Change, redis: RedisKind = alone
) -> FaultCase:
    return _case(name, injected, begin, end, lasts_s=lasts_s, is_met_again=True, redis=redis)


STOPPED = _case("stopped", "SIGSTOP for 1.5 s", stop, lasts_s=1.5)
KILLED = _case("killed", "SIGKILL, and back without its data", kill, restart, lasts_s=0.5)
FAILING_OVER = _met_again(2.0, "failing over", "SIGKILL of a master; its replica is named", _fail_over, _rest, watched)
REDIS_FAULTS = (
    STOPPED,
    _case("stopped for good", "SIGSTOP", stop, is_endless=True, lasts_s=1.0),
    KILLED,
    _case("killed for good", "SIGKILL", kill, is_endless=True, lasts_s=1.0),
    _case("restarted twice", "SIGKILL and start, twice, at once", _restart_twice),
    _case("flipped bits", "a bit of every value, by SETRANGE", _flip),
    _case("halved values", "every value is cut to half", _halve),
    _case("emptied", "FLUSHALL", empty),
    _case("no memory", "maxmemory is reached under noeviction, then raised", use_up, make_room, lasts_s=0.5),
    _case("evicting", "allkeys-lru with a third less than is used", _make_small, make_room),
    _case(
        "password changed",
        "and connections ended; then changed back",
        _change_password,
        _change_password_back,
        lasts_s=1.0,
        redis=named_user,
    ),
    _case("busy", "a script that loops, then SCRIPT KILL", _keep_busy, _let_go, lasts_s=1.0),
    FAILING_OVER,
    _met_again(2.0, "slots moving", "a third of a cluster's, to another node", _migrate, _rest, clustered()),
    _met_again(
        2.0, "a master killed", "of a cluster; its replica takes over", kill, _await_replica, clustered(replicas=1)
    ),
    _met_again(0.5, "connections ended", "CLIENT KILL, every 20 ms", _keep_ending_connections, _rest),
    _met_again(0.5, "replies cut", "every 100 kB or so", _cut_replies, _heal_proxy, behind_proxy),
    _met_again(1.0, "replies trickle", "64 bytes every 10 ms", _trickle, _heal_proxy, behind_proxy),
)
