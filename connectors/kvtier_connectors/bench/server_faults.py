"""The faults of a kvtier-server: what is done to its process, and how it ends."""

from __future__ import annotations

from typing import Any

from kvtier_connectors.bench.fault_case import Change, FaultCase
from kvtier_connectors.bench.ground import Ground, in_memory, over_disk, over_tcp

__all__ = ["KILLED", "RESTARTING", "SERVER_FAULTS", "STOPPED", "kill", "restart", "stop"]

RESTART_PAUSE_S = 1.0


def stop(ground: Ground) -> None:
    ground.server.server.stop()


def cont(ground: Ground) -> None:
    ground.server.server.cont()


def kill(ground: Ground) -> None:
    ground.server.server.kill()


def _flush_and_kill(ground: Ground) -> None:
    """What it was given is on its disk."""
    ground.server.server.flush()
    kill(ground)


def restart(ground: Ground) -> None:
    ground.server.server.restart()


def _restart_twice(ground: Ground) -> None:
    restart(ground)
    restart(ground)


def _keep_restarting(ground: Ground) -> None:
    ground.server.keep_doing(ground.server.server.restart, pause_s=RESTART_PAUSE_S)


def _rest(ground: Ground) -> None:
    ground.server.rest()


def _case(name: str, injected: str, begin: Change, end: Change = Ground.heal, **more: Any) -> FaultCase:
    return FaultCase(name, injected, begin, end, **{"tier": "server", "server": in_memory, **more})


STOPPED = _case("stopped", "SIGSTOP for 1.5 s", stop, lasts_s=1.5)
KILLED = _case("killed", "SIGKILL, and back without its blocks", kill, restart, lasts_s=0.5)
RESTARTING = _case(
    "restarting", "SIGKILL and start, every second or two", _keep_restarting, _rest, lasts_s=3.0, is_met_again=True
)
SERVER_FAULTS = (
    STOPPED,
    _case("stopped for good", "SIGSTOP", stop, is_endless=True, lasts_s=1.0),
    KILLED,
    _case("killed over a disk", "SIGKILL, and back with it", _flush_and_kill, restart, lasts_s=0.5, server=over_disk),
    _case("killed for good", "SIGKILL", kill, is_endless=True, lasts_s=1.0),
    _case("restarted twice", "SIGKILL and start, twice, at once", _restart_twice),
    RESTARTING,
    _case("stopped, over TCP", "SIGSTOP for 1.5 s", stop, lasts_s=1.5, server=over_tcp),
    _case("killed, over TCP", "SIGKILL, and back without its blocks", kill, restart, lasts_s=0.5, server=over_tcp),
)
