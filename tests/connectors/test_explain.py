"""What is said of a request afterwards: by the store that decided, and by a daemon that was told, to an operator."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.clock import MonotonicClock
from kvtier.decisions import ADMITTED, FAILED, MAX_DECISIONS, RECOMPUTED, Decision, DecisionLog
from kvtier.explain_command import sentence
from kvtier.fallbacks import Fallback
from kvtier.reasons import MissReason
from kvtier.testing import FakeClock
from kvtier_connectors.contract import KVOptions
from kvtier_connectors.history import given_up
from kvtier_engine.testing.rig import ConnectorRig
from tests.server.daemon_rig import short_directory
from tests.server_tier.rig import daemon_at, until

TOKENS = list(range(12))  # three blocks of four


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path
    gc.collect()  # loops that a daemon ran


def serve(rig: ConnectorRig, request_id: str, num_local: int = 0) -> None:
    """A request that comes back: it is admitted with what can be restored."""
    rig.start(request_id, TOKENS)
    match = rig.scheduler.match(request_id, num_local, 3)
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    rig.scheduler.admit(request_id, num_local, 3, blocks[: match.num_blocks])
    rig.copy_all()
    rig.finish(request_id, blocks)


def test_the_store_knows_what_each_request_was_served(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(policy="write_through", clock=FakeClock())
    serve(rig, "before")
    blocks = rig.compute("first", TOKENS)
    rig.store_all()
    rig.finish("first", blocks)
    serve(rig, "after")
    (before,) = rig.store.decisions.find("before")
    assert before.decision == Decision("before", ADMITTED, 3, {}, "absent")
    (after,) = rig.store.decisions.find("after")
    assert after.decision == Decision("after", ADMITTED, 3, {"host": 3})
    assert rig.store.decisions.find("never") == []


def test_a_request_that_may_restore_nothing_is_no_decision(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(clock=FakeClock())
    rig.start("off", TOKENS, options=KVOptions(restore=False))
    rig.scheduler.admit("off", 0, 3, [])
    assert rig.store.decisions.find("off") == []


@pytest.mark.parametrize(("is_fatal", "fate"), [(False, RECOMPUTED), (True, FAILED)])
def test_a_restore_that_is_given_up_is_told_with_its_wait(fate: str, *, is_fatal: bool) -> None:
    fallback = Fallback("r", "disk", 30, 480, 2.5, 2.0, MissReason.TIMEOUT, is_fatal)
    assert given_up(fallback) == Decision("r", fate, 30, {}, "timeout", "disk", 2.5, 2.0)


def test_a_log_keeps_the_last_and_finds_long_names() -> None:
    clock = FakeClock()
    log = DecisionLog(clock)
    name = "x" * 200
    for number in range(MAX_DECISIONS + 1):
        log.note(Decision(f"r{number}", ADMITTED, 1, {}))
    log.note(Decision(name, ADMITTED, 1, {}), "client 3")
    assert log.find("r0") == log.find("r1") == []
    assert len(log.find("r2")) == 1
    ((_, client, at_s),) = log.find(name)
    assert (client, at_s) == ("client 3", clock.now())


def test_a_daemon_explains_what_an_engine_told_it(
    directory: Path, open_rig: Callable[..., ConnectorRig], capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon_at(directory, {"host.size": "8MiB", "host.slab": "1MiB"}) as at:
        rig = open_rig(policy="write_through", clock=MonotonicClock(), server__url=at.unix_url, server__timeout_s=5.0)
        serve(rig, "chat-7")
        (tenant,) = at.daemon.tenants
        until("the daemon is told", lambda: bool(tenant.store.decisions.find("chat-7")))
        socket = f"{directory}/kvtier.sock.admin"
        assert main_exits(["explain", "chat-7", "--socket", socket]) == 0
        assert "taken up: 0 of 3 blocks restored, the rest computed: absent" in capsys.readouterr().out
        assert main_exits(["explain", "chat-7", "--socket", socket, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["fate"], row["asked"], row["served"], row["reason"]) == ("admitted", 3, {}, "absent")
        assert row["tenant"] == "default"
        assert main_exits(["explain", "chat-8", "--socket", socket]) == 1
        err = capsys.readouterr().err
        assert "nothing is known of a request 'chat-8'" in err
        assert len(err.splitlines()) == 1
        rig.close()


def main_exits(args: list[str]) -> object:
    with pytest.raises(SystemExit) as exited:
        main(args)
    return exited.value.code


def test_sentences() -> None:
    row = {
        "tenant": "a",
        "client": "client 3",
        "age_s": 65.0,
        "fate": "admitted",
        "asked": 30,
        "served": {"host": 8, "disk": 4},
        "reason": "evicted",
        "waited_for": "",
        "waited_s": 0.0,
        "limit_s": 0.0,
    }
    assert sentence(row) == (
        "1 min 5 s ago, client 3 (tenant a): taken up: 12 of 30 blocks restored (8 from host, 4 from disk), the rest "
        "computed: evicted"
    )
    lost = row | {"fate": "recomputed", "served": {}, "reason": "timeout", "waited_for": "redis", "waited_s": 1.5}
    assert sentence(lost | {"limit_s": 2.0}).endswith(
        "restore given up: 30 blocks, which are computed: timeout; waited 1.500 s of 2.000 s for redis"
    )
    assert "and the request fails" in sentence(lost | {"fate": "failed"})
