"""Operators' commands to a live daemon: what is answered, and that nobody else is held up, harmed or let in."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, IntegrityError
from kvtier.keys import split_key
from kvtier.protocol import admin as a
from kvtier.protocol import messages as m
from kvtier.protocol.wire import pack
from kvtier.server import admin as serving
from kvtier.server import operations, verifying
from kvtier.server.admin import AdminServer
from kvtier.server.listening import unix_peer
from kvtier.server.operations import Operations
from kvtier.server.status import status_document
from kvtier.store import Store
from kvtier.testing import ManualExecutor
from kvtier.tiers.base import ReadOutcome, ReadRequest
from tests.server.admin_rig import (
    BLOCK_BYTES,
    NAMESPACES,
    Operator,
    RigDaemon,
    content_of,
    daemon_of,
    open_store,
    put,
    scribble,
)
from tests.server.daemon_rig import short_directory, wait_for


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def daemon(directory: Path) -> Iterator[RigDaemon]:
    """Tenant a has a disk, tenant b none."""
    with daemon_of({"a": open_store(directory / "disk"), "b": open_store()}) as rig:
        yield rig


@pytest.fixture
def server(daemon: RigDaemon, directory: Path) -> Iterator[AdminServer]:
    server = AdminServer(daemon, str(directory / "admin"))
    yield server
    server.close()
    server.close()
    assert not (directory / "admin").exists()


def store_of(daemon: RigDaemon, name: str = "a") -> Store:
    return next(tenant.store for tenant in daemon.tenants if tenant.name == name)


def answers_of(daemon: RigDaemon, request: a.AdminRequest) -> list[Any]:
    """Those that a command shows."""
    answers = [each for each in Operations(daemon).answers(request) if each is not None]
    assert isinstance(answers[-1], a.Ended | a.Failed)
    return [each for each in answers if not isinstance(each, a.Progress)]


# ---- how it is -------------------------------------------------------------------------------------------------------


def test_health_says_whether_it_serves_and_why_not(daemon: RigDaemon, server: AdminServer) -> None:
    with Operator(server.path) as operator:
        assert operator.ask(a.AskHealth(1)) == [
            a.Health(1, is_ready=True, state="serving", reason="", uptime_s=4.5),
            a.Ended(1, is_cut=False),
        ]
        daemon.state, daemon.reason = "draining", "it was told to stop"
        assert operator.ask(a.AskHealth(2))[0] == a.Health(2, False, "draining", "it was told to stop", 4.5)  # noqa: FBT003


def test_the_status_is_that_of_the_status_page(daemon: RigDaemon, server: AdminServer) -> None:
    put(store_of(daemon), range(3))
    assert store_of(daemon).flush(10.0) == 0
    with Operator(server.path) as operator:
        own, *tenants, ended = operator.ask(a.AskStatus(1))
        document = {**json.loads(own.document), "tenants": [json.loads(part.document) for part in tenants]}
        assert document == json.loads(json.dumps(status_document(daemon.snapshot())))
        assert [part.tenant for part in tenants] == ["a", "b"]
        assert not ended.is_cut
        assert [part.tenant for part in operator.ask(a.AskStatus(2, "b"))[:-1]] == ["", "b"]


@pytest.mark.parametrize(
    "request_",
    [
        a.AskStatus(1, "c"),
        a.AskNamespaces(1, "c"),
        a.AskBlocks(1, 10, "c"),
        a.AskFlush(1, 0, "c"),
        a.AskDrop(1, "c"),
        a.AskVerify(1, False, "c"),  # noqa: FBT003
    ],
)
def test_a_tenant_that_is_none_is_named_with_those_there_are(daemon: RigDaemon, request_: a.AdminRequest) -> None:
    assert answers_of(daemon, request_) == [a.Failed(1, "invalid", "there is no tenant 'c'; there are: a, b")]


@pytest.mark.parametrize("request_", [a.AskBlocks(1, 10, "b", "tape"), a.AskFlush(1, 0, "", "tape"), a.AskVerify(1, False, "a", "tape")])  # fmt: skip  # noqa: E501, FBT003
def test_a_tier_that_is_none_is_named_with_those_there_are(daemon: RigDaemon, request_: a.AdminRequest) -> None:
    (failed,) = answers_of(daemon, request_)
    assert (failed.code, "no tape tier" in failed.text) == ("invalid", True)


# ---- what it holds ---------------------------------------------------------------------------------------------------


def test_blocks_are_counted_by_tenant_tier_and_namespace(daemon: RigDaemon, server: AdminServer) -> None:
    store = store_of(daemon)
    put(store, range(5))
    put(store, range(5, 7), NAMESPACES[1])
    put(store_of(daemon, "b"), range(1))
    assert store.flush(10.0) == 0
    with Operator(server.path) as operator:
        *rows, _ = operator.ask(a.AskNamespaces(1))
        found = {(row.tenant, row.tier, row.namespace): (row.blocks, row.nbytes) for row in rows}
        on_disk = BLOCK_BYTES + 4096
        assert found == {
            ("a", "host", NAMESPACES[0]): (5, 5 * BLOCK_BYTES),
            ("a", "host", NAMESPACES[1]): (2, 2 * BLOCK_BYTES),
            ("a", "disk", NAMESPACES[0]): (5, 5 * on_disk),
            ("a", "disk", NAMESPACES[1]): (2, 2 * on_disk),
            ("b", "host", NAMESPACES[0]): (1, BLOCK_BYTES),
        }
        assert {row.tenant for row in operator.ask(a.AskNamespaces(2, "b"))[:-1]} == {"b"}


def test_blocks_come_in_pages_within_the_limit(tmp_path: Path) -> None:
    with daemon_of({"a": open_store(tmp_path / "disk", blocks=700)}) as daemon:
        keys = put(store_of(daemon), range(600))
        assert store_of(daemon).flush(20.0) == 0
        for tier in ("host", "disk"):
            *pages, ended = answers_of(daemon, a.AskBlocks(1, 600, "", tier))
            assert max(len(page.lengths) for page in pages) <= m.MAX_BLOCKS
            assert {page.tier for page in pages} == {tier}
            digests = b"".join(page.digests for page in pages)
            assert sorted(digests[at : at + 32] for at in range(0, len(digests), 32)) == sorted(
                split_key(key)[1] for key in keys
            )
            assert {length for page in pages for length in page.lengths} == {BLOCK_BYTES}
            assert not ended.is_cut
        *pages, ended = answers_of(daemon, a.AskBlocks(1, 599))
        assert (sum(len(page.lengths) for page in pages), ended.is_cut) == (599, True)
        assert answers_of(daemon, a.AskBlocks(1, 599, namespace=NAMESPACES[1])) == [a.Ended(1, is_cut=False)]


# ---- writing down, forgetting ----------------------------------------------------------------------------------------


def test_a_flush_writes_what_is_due(daemon: RigDaemon, server: AdminServer) -> None:
    put(store_of(daemon), range(9))
    with Operator(server.path) as operator:
        (flushed, _) = operator.ask(a.AskFlush(1, 20_000))
        assert (flushed.tenant, flushed.tier, flushed.blocks_left) == ("a", "disk", 0)
        assert operator.ask(a.AskFlush(2, 20_000, "b")) == [a.Ended(2, is_cut=False)]
    assert store_of(daemon).lower[0].tier.usage().num_blocks == 9


def test_a_flush_is_bounded_and_says_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FLUSH_SLICE_S", 0.01)
    with daemon_of({"a": open_store(tmp_path / "disk", ManualExecutor())}) as daemon:
        put(store_of(daemon), range(4))
        answers = list(Operations(daemon).answers(a.AskFlush(1, 50)))
        assert answers[-2:] == [a.Flushed(1, "a", "disk", 4, 0), a.Ended(1, is_cut=False)]
        assert a.Progress(1, 0) in answers
        (flushed, _) = answers_of(daemon, a.AskFlush(2, 0, tier="disk"))
        assert flushed.blocks_left == 4


def test_nothing_is_written_to_host_memory(daemon: RigDaemon) -> None:
    (failed,) = answers_of(daemon, a.AskFlush(1, 0, tier="host"))
    assert (failed.code, "name one of those" in failed.text) == ("invalid", True)


def test_dropping_forgets_a_tenants_blocks_in_every_tier_and_no_others(daemon: RigDaemon, server: AdminServer) -> None:
    store = store_of(daemon)
    put(store, range(6))
    put(store_of(daemon, "b"), range(2))
    assert store.flush(10.0) == 0
    with Operator(server.path) as operator:
        assert operator.ask(a.AskDrop(1, "a"))[:-1] == [a.Dropped(1, "a", 6, 1)]
    assert (store.host.num_blocks, store.lower[0].tier.usage().num_blocks, store.lower[0].epoch) == (0, 0, 1)
    assert store_of(daemon, "b").host.num_blocks == 2


# ---- verifying -------------------------------------------------------------------------------------------------------


def test_what_is_whole_verifies_and_stays(daemon: RigDaemon, server: AdminServer) -> None:
    put(store_of(daemon), range(5))
    assert store_of(daemon).flush(10.0) == 0
    with Operator(server.path) as operator:
        assert operator.ask(a.AskVerify(1, integrity=True)) == [
            a.Verified(1, "a", "host", 5, 5 * BLOCK_BYTES, 0, ""),
            a.Verified(1, "a", "disk", 5, 5 * BLOCK_BYTES, 0, ""),
            a.Integrity(1, "a", ""),
            a.Verified(1, "b", "host", 0, 0, 0, ""),
            a.Integrity(1, "b", ""),
            a.Integrity(1, "", ""),
            a.Ended(1, is_cut=False),
        ]
    assert store_of(daemon).host.num_blocks == 5


def test_a_block_that_was_scribbled_over_is_found_named_and_forgotten(daemon: RigDaemon) -> None:
    store = store_of(daemon, "b")
    keys = put(store, range(5))
    scribble(store, 3)
    damage, verified, _ = answers_of(daemon, a.AskVerify(1, False, "b", "host"))  # noqa: FBT003
    assert (damage.tenant, damage.tier, damage.key) == ("b", "host", keys[3])
    assert verified == a.Verified(1, "b", "host", 5, 5 * BLOCK_BYTES, 1, "")
    assert store.host.contains(keys) == [True, True, True, False, True]
    assert answers_of(daemon, a.AskVerify(2, False, "b"))[0] == a.Verified(2, "b", "host", 4, 4 * BLOCK_BYTES, 0, "")  # noqa: FBT003


def test_a_block_damaged_on_disk_is_found_named_and_forgotten(daemon: RigDaemon, directory: Path) -> None:
    store = store_of(daemon)
    keys = put(store, range(5))
    assert store.flush(10.0) == 0
    for path in (directory / "disk").glob("*.kvt"):
        at = path.read_bytes().find(content_of(2))
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(b"\xff")
            os.sync()
    *damage, verified, _ = answers_of(daemon, a.AskVerify(1, False, "a", "disk"))  # noqa: FBT003
    assert [each.key for each in damage] == [keys[2]]
    assert verified == a.Verified(1, "a", "disk", 5, 5 * BLOCK_BYTES, 1, "")
    assert store.lower[0].tier.contains(keys) == [True, True, False, True, True]


def test_verifying_a_disk_is_no_use_of_its_blocks(daemon: RigDaemon) -> None:
    store = store_of(daemon)
    keys = put(store, range(5))
    assert store.flush(10.0) == 0
    device: Any = store.lower[0].device
    (segment,) = [each for each in device._catalog.segments_of(0) if each.num_live]
    answers_of(daemon, a.AskVerify(1, False, "a", "disk"))  # noqa: FBT003
    assert not segment.used
    buffer = memoryview(bytearray(BLOCK_BYTES))
    assert device.read([ReadRequest(keys[0], buffer)]) == [ReadOutcome.OK]
    assert segment.used


def test_without_checksums_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    with daemon_of({"a": open_store(keeps_checksums=False)}) as daemon:
        put(store_of(daemon), range(2))
        verified, _ = answers_of(daemon, a.AskVerify(1, integrity=False))
        assert (verified.blocks, "daemon.checksums = false" in verified.skipped) == (0, True)


def test_counts_that_disagree_are_told_as_they_are(daemon: RigDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "INTEGRITY_PAUSE_S", 0.0)
    daemon.broken = IntegrityError("quarantine: 3 slots counted, 2 held")
    *_, own, _ = answers_of(daemon, a.AskVerify(1, integrity=True))
    assert own == a.Integrity(1, "", "quarantine: 3 slots counted, 2 held")
    daemon.broken = TimeoutError()
    *_, own, _ = answers_of(daemon, a.AskVerify(2, integrity=True))
    assert "the loop is busy" in own.problem


def test_a_check_that_fails_once_under_load_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "INTEGRITY_PAUSE_S", 0.0)
    outcomes = iter([IntegrityError("in passing"), None])

    def check() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    assert verifying.check_integrity(1, "a", check) == a.Integrity(1, "a", "")


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_answer_that_nobody_waits_for_any_more_holds_nothing(daemon: RigDaemon, steps: int) -> None:
    put(store_of(daemon), range(20))
    assert store_of(daemon).flush(10.0) == 0
    answers = Operations(daemon).answers(a.AskVerify(1, integrity=True))
    for _ in range(steps):
        next(answers)
    answers.close()
    assert store_of(daemon).pool.usage().num_leases == 0


def test_a_store_that_is_closed_is_a_failure_in_words(daemon: RigDaemon) -> None:
    store_of(daemon, "b").close()
    (failed,) = answers_of(daemon, a.AskDrop(1, "b"))
    assert (failed.code, "closed" in failed.text) == ("failed", True)


# ---- the socket ------------------------------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone(server: AdminServer) -> None:
    assert stat.S_IMODE(Path(server.path).stat().st_mode) == 0o600


def test_another_user_is_refused_by_the_kernels_word(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        monkeypatch.setattr(serving, "unix_peer", stranger(unix_peer))
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    with Operator(server.path, greet=False) as operator:
        failed = operator.failure()
    assert (failed.id, failed.code) == (0, "denied")
    assert "ask as that user, or as root" in failed.text


def stranger(know: Callable[[socket.socket], Any]) -> Callable[[socket.socket], Any]:
    def strange(sock: socket.socket) -> Any:
        peer = know(sock)
        peer.process.close()
        return type(peer)(kind="unix", address="unix", uid=12345, pid=peer.pid)

    return strange


def test_versions_that_do_not_meet_are_named_on_both_sides(server: AdminServer) -> None:
    with Operator(server.path, greet=False) as operator:
        operator.send(a.Greet([7, 8], "kvtier 99.1"))
        failed = operator.failure()
    assert failed.code == "version"
    assert all(part in failed.text for part in ("speaks version 1 ", "kvtier 99.1 speaks 7, 8"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(m.Hello(1, [1], "an engine", "", wants_mapping=False)),
        pack(a.AskHealth(1)),
        b"KVT1" + (1 << 20).to_bytes(4, "little") + bytes(4),
        b"KVT1" + (5).to_bytes(4, "little") + (5).to_bytes(4, "little"),
        pack(a.Greet([1], "x"))[:-1] + b"\xc1",
    ],
)
def test_who_says_something_else_is_told_and_let_go(server: AdminServer, data: bytes) -> None:
    with Operator(server.path, greet=False) as operator:
        operator.sock.sendall(data)
        assert operator.failure().code == "protocol"
    with Operator(server.path) as operator:
        assert operator.ask(a.AskHealth(1))


def test_a_second_greeting_ends_the_connection(server: AdminServer) -> None:
    with Operator(server.path) as operator:
        operator.send(a.Greet([1], "again"))
        assert operator.failure().code == "protocol"


def test_there_are_a_few_operators_at_once(server: AdminServer) -> None:
    operators = [Operator(server.path) for _ in range(serving.MAX_CONNECTIONS)]
    try:
        with Operator(server.path, greet=False) as late:
            assert late.failure().code == "busy"
        operators.pop().sock.close()

        def is_let_in() -> bool:
            with Operator(server.path, greet=False) as again:
                try:
                    again.send(a.Greet([1], "again"))
                except BrokenPipeError:
                    return False
                return isinstance(again.receive(), a.Greeted)

        wait_for("a free place", is_let_in)
    finally:
        for operator in operators:
            operator.sock.close()


def test_a_thousand_operators_one_after_the_other(server: AdminServer) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(1000):
        wait_for("a place", lambda: len(server._connections) < serving.MAX_CONNECTIONS or None)
        with Operator(server.path) as operator:
            operator.send(a.AskHealth(1))
    wait_for("their end", lambda: not server._connections)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1


@pytest.mark.parametrize("said", [b"", b"KVT1", pack(a.Greet([1], "x"))[:-1]])
def test_who_does_not_go_on_loses_the_place(server: AdminServer, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(serving, "FIRST_TIMEOUT_S", 0.05)
    with Operator(server.path, greet=False) as operator:
        operator.sock.sendall(said)
        assert operator.receive() is None


def test_who_reads_nothing_holds_up_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SEND_TIMEOUT_S", 0.2)
    with short_directory() as directory, daemon_of({"a": open_store(blocks=4096)}) as daemon:
        put(store_of(daemon), range(4000))
        server = AdminServer(daemon, str(directory / "admin"))
        try:
            with Operator(server.path) as deaf, Operator(server.path) as other:
                for number in range(1, 31):
                    deaf.send(a.AskBlocks(number, 1 << 20))
                assert other.ask(a.AskHealth(1))
                wait_for("the deaf one's end", lambda: len(server._connections) == 1)
                assert other.ask(a.AskHealth(2))
        finally:
            server.close()


def test_closing_the_connection_ends_what_was_asked(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended, steps = endless(monkeypatch)
    with Operator(server.path) as operator:
        operator.send(a.AskHealth(1))
        wait_for("its work", lambda: len(steps) > 3)
    assert has_ended.wait(10.0)


def test_closing_the_server_ends_what_was_asked(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended, steps = endless(monkeypatch)
    with Operator(server.path) as operator:
        operator.send(a.AskHealth(1))
        wait_for("its work", lambda: len(steps) > 3)
        server.close()
        assert has_ended.is_set()
        assert operator.receive() is None


def endless(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Make every request one without an end. Whether it ended, and how far it went."""
    has_ended, steps = threading.Event(), list[int]()

    def forever(self: Operations, request: a.AdminRequest) -> Iterator[None]:
        try:
            while True:
                steps.append(1)
                has_ended.wait(0.001)
                yield None
        finally:
            has_ended.set()

    monkeypatch.setattr(Operations, "answers", forever)
    return has_ended, steps


def test_a_fault_of_ours_is_told_and_no_silence(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Operations, request: a.AdminRequest) -> Iterator[None]:
        raise ZeroDivisionError
        yield None

    monkeypatch.setattr(Operations, "answers", broken)
    with Operator(server.path) as operator:
        operator.send(a.AskHealth(1))
        failed = operator.failure()
        assert (failed.code, "its log says more" in failed.text) == ("failed", True)


def test_a_path_that_cannot_be_had_names_the_setting(daemon: RigDaemon, directory: Path, server: AdminServer) -> None:
    (directory / "file").write_text("mine")
    for name in ("file", "admin"):
        with pytest.raises(ConfigError, match=r"daemon\.admin_socket"):
            AdminServer(daemon, str(directory / name))
