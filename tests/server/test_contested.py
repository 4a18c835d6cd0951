"""What goes wrong when two things happen at once: a goodbye while blocks are sent, a fork that outlives its parent, a
reset while blocks come from disk, a flood beside a question. And who could be taken for another."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, cast

import pytest

from kvtier.clock import MonotonicClock
from kvtier.errors import ConfigError
from kvtier.fence import Fence
from kvtier.keys import BlockDigest
from kvtier.protocol import messages as m
from kvtier.protocol.admin import AskHealth
from kvtier.protocol.wire import pack
from kvtier.reasons import DropReason, MissReason
from kvtier.server import admin_client
from kvtier.server.admin_client import AdminClient, AdminError
from kvtier.server.listening import UnixSocket
from kvtier.server.logs import TextFormatter
from kvtier.server.peers import Peer, Process, note_connect
from kvtier.server.serving import TURN_S, Connection
from kvtier.server.session import Session
from kvtier.server.tenants import read_token
from kvtier.tiers.reservation import Reservation
from kvtier.tiers.server.address import Address
from kvtier.tiers.server.channel import Channel
from tests.server.daemon_rig import BLOCK_BYTES, NAMESPACE, ServerProcess, make_blocks, short_directory, wait_for
from tests.server.daemon_rig import Client as Caller
from tests.server.session_rig import SPACE, FakeProcess, Rig, digest
from tests.server.test_session_stages import store_below

if TYPE_CHECKING:
    from kvtier.pool import Owner
    from kvtier.stage import StageRead
    from kvtier.tiers.host import HostTier

# ---- Bye -------------------------------------------------------------------------------------------------------------


def test_blocks_that_are_being_sent_are_nobody_elses_though_the_client_said_goodbye(tmp_path: Path) -> None:
    rig = Rig(blocks=8, token_file=tmp_path / "token")
    writer, reader = rig.unix(), rig.tcp(reads=False)
    assert writer.store([0, 1]) == [m.CommitOutcome.STORED] * 2
    reader.reserve([8])
    reader.stage([0, 1])
    reader.say(m.Bye())
    assert reader.ends == ["goodbye"]
    assert rig.store.pool.usage().num_slots_leased == 2  # and none for the block that it was to fill
    rig.hub.check_integrity()
    reader.take_payloads()
    assert not rig.hub.quarantine.counts("a").slots
    reader.session.end(clean=False)
    rig.check_integrity()
    rig.verify_baseline()
    rig.close()


def test_whoever_says_goodbye_before_it_reads_gets_no_others_bytes() -> None:
    with short_directory() as directory:
        server = ServerProcess(directory, {"host.size": "8MiB", "daemon.checksums": "false"})
        with server, server.connect() as writer, server.connect() as reader:
            writer.hello()
            reader.hello()
            blocks = make_blocks(1, 200)
            writer.store(blocks)
            reader.send(m.Stage(5, NAMESPACE, BLOCK_BYTES, b"".join(blocks), b"", 0, inline=True))
            reader.send(m.Bye())
            writer.ping()
            for first in range(1000, 2000, 50):  # whatever slots can be had
                new = make_blocks(first, 50)
                given = writer.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(new), bytes(32) * 50)
                mine = [block for block, outcome in zip(new.values(), given.outcomes, strict=True) if not outcome]
                writer.ask(m.Commit, given.reservations, [0] * len(mine), payload=mine)
            staged = reader.receive()
            assert isinstance(staged, m.Staged)
            assert not any(staged.outcomes)
            assert bytes(reader.payload) == b"".join(blocks.values())


def test_a_goodbye_is_heard_though_the_answers_before_it_cannot_be_given() -> None:
    with short_directory() as directory, ServerProcess(directory) as server, server.connect() as other:
        other.hello()
        client = server.connect()
        client.hello(wants_mapping=True)
        server.signal(signal.SIGSTOP)
        client.send(m.Reserve(2, NAMESPACE, BLOCK_BYTES, b"".join(make_blocks(0, 3)), bytes(96)))
        client.sock.sendall(b"".join(pack(m.Ping(number)) for number in range(3, 203)))
        client.send(m.Bye())
        client.close()
        server.signal(signal.SIGCONT)
        wait_for("the end", lambda: other.ask(m.Stats).stats["clients"]["unix"] == 1 or None)
        stats = other.ask(m.Stats).stats
        assert (stats["leases"], stats["quarantine"]["slots"]) == (0, 0)


# ---- a fork of the client's ------------------------------------------------------------------------------------------


def test_a_fork_that_outlives_its_client_keeps_no_slot() -> None:
    with short_directory() as directory, ServerProcess(directory) as server:
        told, tells = os.pipe()
        pid = os.fork()
        if not pid:
            client = server.connect()
            client.hello(wants_mapping=True)
            client.ask(m.Reserve, NAMESPACE, BLOCK_BYTES, b"".join(make_blocks(0, 3)), bytes(96))
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            os.write(tells, str(child).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        child = int(os.read(told, 20))
        os.close(told)
        os.close(tells)
        try:
            with server.connect() as other:
                other.hello()
                wait_for("the slots", lambda: other.ask(m.Stats).stats["leases"] == 0 or None)
        finally:
            os.kill(child, signal.SIGKILL)


def test_whoever_has_a_dead_process_connection_gets_no_memory() -> None:
    process = FakeProcess(7)
    peer = Peer("unix", "unix", 1000, 7, process)
    assert peer.can_map
    process.dead = True
    assert not peer.can_map


# ---- a reset while blocks come from below ----------------------------------------------------------------------------


def test_a_block_that_comes_from_disk_during_a_reset_is_not_there_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(blocks=8, disk=tmp_path)
    store_below(rig, [0, 1])
    client = rig.unix()
    lower, reset = rig.store.lower[0], rig.store.lower[0].start_epoch

    def stage_first(epoch: int) -> None:
        """Host memory has forgotten its blocks, and the disk has not."""
        monkeypatch.setattr(lower, "start_epoch", lambda epoch: None)
        client.say(client.stage_message([0, 1]))
        rig.jobs.run_all()
        monkeypatch.undo()
        lower.tier.start_epoch(epoch)

    assert reset is not None
    monkeypatch.setattr(lower, "start_epoch", stage_first)
    client.say(m.StartEpoch(50, 3))
    rig.run_jobs()
    heard = [each.message for each in client.heard]
    assert m.Epoch(50, 3) in heard
    (staged,) = (message for message in heard if isinstance(message, m.Staged))
    assert list(staged.outcomes) == [m.StageOutcome.MISS] * 2
    assert rig.store.host.committed(SPACE, [digest(0), digest(1)]) == bytes(2)
    rig.close()


def test_a_slot_that_was_taken_as_a_reset_began_is_given_back() -> None:
    with ExitStack() as resets:

        class Host:
            aborted: ClassVar[list[object]] = []

            def reserve_all(self, *_: object, **__: object) -> list[object]:
                resets.enter_context(fence.shut())
                return [slot, DropReason.HOST_FULL]

            def abort(self, reserved: object) -> None:
                self.aborted.append(reserved)

        fence = Fence(cast("HostTier", Host()), cast("Owner", None))
        waiter = SimpleNamespace(tenant="")
        slot = Reservation(SPACE, BlockDigest(digest(0)), None, 1)
        reads = [
            SimpleNamespace(
                waiters=[(waiter, 0)],
                namespace=SPACE,
                digest=digest(number),
                parent=None,
                nbytes=1,
                reservation=None,
                failure=None,
            )
            for number in range(2)
        ]
        fence.reserve([cast("StageRead", read) for read in reads])
        assert [(read.failure, read.reservation) for read in reads] == [(MissReason.RESET, None)] * 2
        assert Host.aborted == [slot]


# ---- epochs ----------------------------------------------------------------------------------------------------------


def test_the_last_epoch_is_followed_by_none() -> None:
    rig = Rig()
    client = rig.unix()
    last = (1 << 32) - 2
    for number, asked in enumerate((last, 0, last)):
        client.say(m.StartEpoch(50 + number, asked))
        rig.run_jobs()
    assert client.hear(m.Epoch).epoch == last
    for _ in range(2):
        failed = client.hear(m.Failed)
        assert failed.code == m.FailureCode.INVALID
        assert "no epoch is left" in failed.text
    assert rig.store.epoch == last
    rig.close()


# ---- a flood ---------------------------------------------------------------------------------------------------------


def test_one_connections_turn_is_bounded_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    handle, turn = Session.handle, Connection._handle_turn
    turns: list[int] = []

    def slow(self: Session, message: m.ClientMessage, payload_bytes: int) -> object:
        rig.clock.advance(TURN_S)
        turns[-1] += 1
        return handle(self, message, payload_bytes)

    def counted(self: Connection, session: Session) -> tuple[int, bool]:
        turns.append(0)
        return turn(self, session)

    monkeypatch.setattr(Session, "handle", slow)
    monkeypatch.setattr(Connection, "_handle_turn", counted)

    async def serve(ours: socket.socket, theirs: Caller) -> None:
        ended = asyncio.Event()
        peer = Peer("unix", "unix", 1000, os.getpid(), Process.open(os.getpid()))
        connection = Connection(rig.hub, ours, peer, rig.clock, lambda _: ended.set())
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
        pings = b"".join(pack(m.Ping(number)) for number in range(2, 32))
        theirs.sock.sendall(pack(m.Hello(1, [1], "test", "", wants_mapping=False)) + pings)
        theirs.sock.settimeout(0.0)
        answers = 0
        while answers < 31:
            await asyncio.sleep(0.001)
            try:
                answers += theirs.receive() is not None
            except BlockingIOError:
                continue
        theirs.sock.close()
        await ended.wait()

    ours, theirs = socket.socketpair()
    ours.settimeout(0.0)
    asyncio.run(asyncio.wait_for(serve(ours, Caller(theirs)), 20))
    assert sum(turns) == 31
    assert max(turns) <= 3
    rig.close()


# ---- who could be taken for another ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_another_users_directory_is_refused() -> None:
    with short_directory() as directory:
        os.chown(directory, 12345, -1)
        with pytest.raises(ConfigError, match="user 12345's, who could put a socket of theirs in its place"):
            UnixSocket(str(directory / "kv.sock"), "daemon.socket")
        assert not list(directory.iterdir())


@pytest.mark.parametrize(
    "name", ["worker uid=0 tenant=prod outcome=welcome", "worker\nINFO kvtier.audit: connect", "é"]
)
def test_a_certificates_name_cannot_look_like_other_fields_or_lines(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtier.audit")
    note_connect(Peer("tcp", "[::1]:4000", certificate_name=name), "default", "welcome")
    line = TextFormatter("%(message)s").format(caplog.records[-1])
    assert line.startswith("connect [::1]:4000: welcome (peer=tcp address=[::1]:4000 ")
    assert line.count("\n") == 0
    assert f"certificate={name!a} tenant=default outcome=welcome)" in line


def test_a_token_that_others_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text("a token of more than sixteen characters")
    file.chmod(0o600)
    read_token(str(file))
    assert not caplog.records
    file.chmod(0o640)
    read_token(str(file))
    assert f"others may use the token's file {file}" in caplog.text


def test_a_fork_does_not_keep_a_connection_that_its_parent_closed() -> None:
    """As one that was given up within a message, and could say no goodbye."""
    ours, theirs = socket.socketpair()
    with theirs, ours.dup():
        theirs.settimeout(5.0)
        Channel(ours, Address("unix", 0, "/kv.sock"), MonotonicClock()).close()
        assert theirs.recv(1) == b""


# ---- an operator -----------------------------------------------------------------------------------------------------


def test_a_daemon_that_is_stopped_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "SHORT_TIMEOUT_S", 0.3)
    with short_directory() as directory, ServerProcess(directory) as server:
        path = f"{server.socket}.admin"
        with AdminClient(path, "a test") as client:
            server.signal(signal.SIGSTOP)
            tasks = list(Path(f"/proc/{server.pid}/task").glob("*/stat"))
            wait_for("the stop", lambda: all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks))
            with pytest.raises(AdminError, match="has not answered"):
                list(client.ask(AskHealth(client.next_id())))
            with pytest.raises(AdminError, match="has not answered"):
                AdminClient(path, "a test")
