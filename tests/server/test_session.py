"""One client's conversation, message by message, and what a client that does not keep to it gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Credential
from kvtier.errors import ConfigError
from kvtier.frame import payload_checksum
from kvtier.keys import DIGEST_BYTES
from kvtier.memory import PAGE_BYTES
from kvtier.protocol import messages as m
from kvtier.server.peers import Peer
from kvtier.server.session import Session
from kvtier.server.tenants import Tenants
from tests.server.session_rig import SPACE, TOKEN, Client, Rig, content, digest, hello, joined

STORED, VOID = m.CommitOutcome.STORED, m.CommitOutcome.VOID
RESERVED, ALREADY, BEING, FULL = (
    m.ReserveOutcome.RESERVED,
    m.ReserveOutcome.ALREADY_STORED,
    m.ReserveOutcome.BEING_STORED,
    m.ReserveOutcome.FULL,
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(token_file=tmp_path / "token")
    yield rig
    rig.check_integrity()
    rig.close()
    rig.verify_baseline()


def verify_ended(client: Client, code: str, words: str = "") -> None:
    failed = client.hear(m.Failed)
    assert (failed.id, failed.code) == (0, code)
    assert words in failed.text
    assert client.session.is_closed
    assert client.ends == [code]
    assert client.rig.hub.refused[code]
    client.session.handle(m.Ping(9), 0)  # nothing more is taken
    assert not client.heard
    client.session.end(clean=False)


# ---- hello -----------------------------------------------------------------------------------------------------------


def test_welcome_says_what_the_client_must_know(rig: Rig) -> None:
    client = rig.unix(greets=False)
    assert not client.session.has_hello
    assert client.session.tenant_name is None
    client.say(hello(5, [1, 7]))
    heard = client.heard.popleft()
    pool = rig.store.pool
    assert heard.fd == rig.store.memory.fd
    assert isinstance(heard.message, m.Welcome)
    assert heard.message == m.Welcome(
        id=5,
        version=1,
        software=heard.message.software,
        tenant="a",
        mapping_bytes=pool.buffer.nbytes,
        checksums=True,
        epoch=0,
        credits=64,
        max_payload_bytes=8 * PAGE_BYTES,
        capacity_bytes=16 * PAGE_BYTES,
        tiers=[],
    )
    assert client.session.has_hello
    assert client.session.is_mapped
    assert client.session.max_payload_bytes == 0


def test_who_wants_no_mapping_or_cannot_be_watched_gets_none(rig: Rig) -> None:
    for client in (rig.unix(wants_mapping=False), rig.unix(pid=0), rig.tcp()):
        assert not client.session.is_mapped
        assert client.session.max_payload_bytes == 8 * PAGE_BYTES
    greeted = rig.unix(pid=0, greets=False)
    greeted.say(hello())
    heard = greeted.heard.popleft()
    assert heard.fd is None
    assert isinstance(heard.message, m.Welcome)
    assert heard.message.mapping_bytes == 0


@pytest.mark.bug("US05")
def test_without_a_version_in_common_both_sides_versions_are_named(rig: Rig) -> None:
    client = rig.unix(greets=False)
    client.say(hello(versions=[7, 3], software="kvtier 9.1"))
    verify_ended(client, m.FailureCode.VERSION, "('kvtier 9.1') speaks 3, 7, the server (kvtier ")


def test_anything_before_hello_and_a_second_hello_end_the_connection(rig: Rig) -> None:
    client = rig.unix(greets=False)
    client.say(m.Ping(1))
    verify_ended(client, m.FailureCode.PROTOCOL, "Ping came before Hello")
    client = rig.unix()
    client.say(hello())
    verify_ended(client, m.FailureCode.PROTOCOL, "a second Hello")


def test_who_shows_no_credential_of_a_tenant_is_denied(rig: Rig) -> None:
    for peer, token in (
        (Peer("unix", "unix", 3000, 7), ""),
        (Peer("unix", "unix", 3000, 7), TOKEN),  # on a Unix socket only the user counts
        (Peer("tcp", "10.0.0.1:4"), ""),
        (Peer("tcp", "10.0.0.1:4"), TOKEN + "x"),
        (Peer("tcp", "10.0.0.1:4"), TOKEN[:-1]),
        (Peer("tcp", "10.0.0.1:4", certificate_name="1000"), ""),
    ):
        client = Client(rig, peer)
        client.say(hello(token=token))
        verify_ended(client, m.FailureCode.DENIED, "no tenant is bound to")
    assert rig.hub.num_sessions == 0


def test_certificates_and_tokens_show_tenants_that_agree(rig: Rig, tmp_path: Path) -> None:
    credentials = [Credential("a", "token", str(tmp_path / "token")), Credential("b", "cert", "engine-7")]
    tenants = Tenants(rig.tenants, credentials)

    def named(token: str, name: str | None) -> str | None:
        found = tenants.find(Peer("tcp", "10.0.0.1:4", certificate_name=name), token)
        return None if found is None else found.name

    assert named(TOKEN, None) == "a"
    assert named("", "engine-7") == "b"
    assert named(TOKEN, "engine-7") is None  # two things, two tenants
    assert named("wrong", "engine-7") is None
    assert named(TOKEN, "engine-8") == "a"
    assert named("", "engine-8") is None


def test_bad_credentials_are_refused_by_name_and_change_nothing(rig: Rig, tmp_path: Path) -> None:
    short, same = tmp_path / "short", tmp_path / "same"
    short.write_text("1234\n")
    same.write_text(f" {TOKEN}\n")
    token = Credential("a", "token", str(tmp_path / "token"))
    tenants = rig.hub.tenants
    for credentials, words in (
        ([Credential("c", "uid", "1")], "'c'"),
        ([Credential("a", "token", str(tmp_path / "none"))], f"{tmp_path / 'none'} cannot be read"),
        ([Credential("a", "token", str(short))], "16 to 512 characters"),
        ([token, Credential("b", "token", str(same))], "'a' and 'b' have the same token"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            tenants.reload(credentials)
    assert rig.unix().session.tenant_name == "a"
    tenants.reload([token, Credential("a", "token", str(same))])  # two files of one tenant's may agree


@pytest.mark.bug("SE09")
def test_a_tenants_blocks_are_there_for_its_own_clients_and_for_nobody_else(rig: Rig) -> None:
    writer, reader, stranger = rig.unix(1000), rig.tcp(), rig.unix(2000)
    assert writer.store([1, 2]) == [STORED] * 2
    assert reader.lookup([1, 2]) == [1, 1]
    assert stranger.lookup([1, 2]) == [0, 0]
    assert list(stranger.stage([1, 2]).outcomes) == [m.StageOutcome.MISS] * 2
    assert list(stranger.reserve([1]).outcomes) == [RESERVED]  # nor can it tell that they exist
    assert rig.tenants[0].mapping_fd != rig.tenants[1].mapping_fd
    assert rig.tenant(writer) is rig.tenants[0]
    assert rig.tenant(stranger) is rig.tenants[1]


def test_who_comes_and_goes_is_logged_without_what_could_forge_a_line_or_be_a_secret(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvtier.server"):
        rig.unix(pid=4711).say(m.Bye())
        denied = Client(rig, Peer("tcp", "10.0.0.9:4"))
        denied.say(hello(software="evil\nline", token="a secret that nobody may see"))
        old = rig.unix(greets=False)
        old.say(hello(versions=[9], software="evil\nline"))
    assert "uid 1000, pid 4711, 'test 1') is of tenant a" in caplog.text
    assert "of tenant a (unix) said goodbye" in caplog.text
    assert "(10.0.0.9:4): ended, denied" in caplog.text
    assert "secret" not in caplog.text
    assert "evil\\nline" in caplog.text
    assert "evil\n" not in caplog.text
    denied.session.end(clean=False)
    old.session.end(clean=False)


# ---- one block's way -------------------------------------------------------------------------------------------------


def test_what_is_stored_is_found_staged_and_released(rig: Rig) -> None:
    client = rig.unix()
    assert client.lookup([0, 1, 2]) == [0, 0, 0]
    assert client.store([0, 1]) == [STORED] * 2
    assert client.lookup([0, 1, 2]) == [1, 1, 0]
    staged = client.stage([0, 1, 2])
    assert list(staged.outcomes) == [m.StageOutcome.OK, m.StageOutcome.OK, m.StageOutcome.MISS]
    assert [client.at(offset) for offset in staged.offsets] == [content(0), content(1)]
    assert staged.checksums == [payload_checksum(content(0)), payload_checksum(content(1))]
    assert rig.store.stats().leases == client.session.num_leases == 2
    client.release(staged)
    assert rig.store.stats().leases == 0


def test_over_tcp_blocks_come_and_go_as_payload(rig: Rig) -> None:
    client = rig.tcp(reads=False)
    assert client.store([0, 1], 24) == [STORED] * 2
    client.say(client.stage_message([1, 0], block_bytes=24))
    heard = client.heard.popleft()
    assert isinstance(heard.message, m.Staged)
    assert heard.payload == [content(1, 24), content(0, 24)]
    assert (heard.message.leases, heard.message.offsets) == ([], [])
    assert heard.message.checksums == [payload_checksum(content(1, 24)), payload_checksum(content(0, 24))]
    assert rig.store.stats().leases == 2  # until it is out
    client.take_payloads()
    assert rig.store.stats().leases == 0


def test_a_block_is_findable_from_its_commit_on_and_not_before(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    reserved = client.reserve([0])
    client.fill(reserved.offsets[0], content(0))
    assert other.lookup([0]) == [0]
    assert list(other.stage([0]).outcomes) == [m.StageOutcome.MISS]
    assert client.commit(reserved, [content(0)]) == [STORED]
    assert other.lookup([0]) == [1]


def test_a_block_of_another_length_is_a_miss(rig: Rig) -> None:
    client = rig.unix()
    client.store([0], 64)
    assert list(client.stage([0], block_bytes=PAGE_BYTES).outcomes) == [m.StageOutcome.MISS]
    assert rig.store.stats().leases == 0
    assert list(client.stage([0], block_bytes=64).outcomes) == [m.StageOutcome.OK]


def test_aborted_slots_are_free_and_their_keys_too(rig: Rig) -> None:
    client = rig.unix()
    reserved = client.reserve([0, 1])
    assert client.ask(m.Abort(9, reserved.reservations), m.Done).id == 9
    client.say(m.Abort(0, reserved.reservations))  # of before: ignored
    client.ask(m.Abort(9, reserved.reservations), m.Done)
    assert not client.heard
    assert list(client.reserve([0, 1]).outcomes) == [RESERVED] * 2


def test_handles_that_were_never_given_are_invalid(rig: Rig) -> None:
    client = rig.unix()
    for message in (m.Abort(9, [1]), m.Release(9, [3]), m.Commit(9, [1], [1])):
        failed = client.ask(message, m.Failed)
        assert (failed.id, failed.code) == (9, m.FailureCode.INVALID)
    client.say(m.Release(0, [55]))
    assert not client.heard
    reserved = client.reserve([0])
    client.ask(m.Release(9, reserved.reservations), m.Done)  # no lease, but a handle of before: not an error
    assert client.commit(reserved, [content(0)]) == [STORED]
    assert client.commit(reserved, [content(0)]) == [VOID]
    twice = client.reserve([1])
    handles = twice.reservations * 2
    assert client.ask(m.Commit(9, handles, [1, 1]), m.Failed).code == m.FailureCode.INVALID
    assert client.commit(twice, [content(1)]) == [STORED]  # nothing had been done


def test_handles_are_never_used_again(rig: Rig) -> None:
    client = rig.unix()
    seen: list[int] = []
    for number in range(5):
        reserved = client.reserve([number])
        client.commit(reserved, [content(number)])
        staged = client.stage([number])
        client.release(staged)
        seen += [*reserved.reservations, *staged.leases]
    assert len(set(seen)) == len(seen) == 10


@pytest.mark.bug("CR20")
def test_two_clients_store_one_key_one_fills_and_the_others_of_the_batch_go_on(rig: Rig) -> None:
    first, second = rig.unix(), rig.tcp()
    mine = first.reserve([5])
    theirs = second.reserve(list(range(4, 8)))
    assert list(theirs.outcomes) == [RESERVED, BEING, RESERVED, RESERVED]
    assert first.commit(mine, [content(5)]) == [STORED]
    assert second.commit(theirs, [content(4), content(6), content(7)]) == [STORED] * 3
    again = second.reserve(list(range(4, 14)))
    assert list(again.outcomes) == [ALREADY] * 4 + [RESERVED] * 6
    assert second.lookup(list(range(4, 8))) == [1] * 4


def test_a_key_named_twice_in_one_message_is_being_stored_the_second_time(rig: Rig) -> None:
    assert list(rig.unix().reserve([3, 3]).outcomes) == [RESERVED, BEING]


@pytest.mark.bug("AC09")
def test_three_times_the_pool_stays_within_it_and_the_counts_add_up(rig: Rig) -> None:
    client = rig.unix()
    numbers = list(range(0, 96, 2))  # no chain: a prompt never eats its own prefix
    for number in numbers:
        assert client.store([number]) == [STORED]
    stats = rig.store.stats()
    assert stats.host_blocks == 16
    assert stats.stored_blocks - stats.evicted_blocks == stats.host_blocks
    assert stats.host_used_bytes <= stats.host_reserved_bytes
    assert client.lookup(numbers) == [0] * 32 + [1] * 16  # the oldest gone


# ---- what ends a connection, and what only a request -----------------------------------------------------------------


def test_more_requests_than_credits_end_the_connection(tmp_path: Path) -> None:
    rig = Rig(daemon={"credits": 3})
    client = rig.unix()
    for number in (101, 102, 103):
        client.say(m.StartEpoch(number, number))  # its thread has not begun
    assert client.session.num_requests == 3
    client.say(m.Touch(SPACE, digest(0), b""))  # no request
    client.say(m.Ping(104))
    verify_ended(client, m.FailureCode.BUSY, "more than 3 requests")
    rig.close()


def test_an_id_that_has_no_answer_yet_ends_the_connection(rig: Rig) -> None:
    client = rig.unix()
    client.say(m.StartEpoch(7, 1))
    client.say(m.Ping(7))
    verify_ended(client, m.FailureCode.PROTOCOL, "request 7 has no answer yet")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_payload_where_none_belongs_ends_the_connection(rig: Rig, kind: str) -> None:
    client = rig.unix() if kind == "unix" else rig.tcp()
    message: m.ClientMessage = m.Commit(7, [1], [1]) if kind == "unix" else m.Ping(7)
    client.reserve([0])
    assert client.session.handle(message, 5) is None
    verify_ended(client, m.FailureCode.PROTOCOL, "5 bytes of payload")


def test_a_payload_of_another_length_than_the_blocks_ends_the_connection(rig: Rig) -> None:
    client = rig.tcp()
    reserved = client.reserve([0, 1])
    assert client.session.handle(m.Commit(7, reserved.reservations, [1, 1]), PAGE_BYTES) is None
    verify_ended(client, m.FailureCode.PROTOCOL, f"{PAGE_BYTES} bytes follow Commit 7, whose blocks have")


def test_a_message_within_a_payload_ends_the_connection(rig: Rig) -> None:
    client = rig.tcp()
    reserved = client.reserve([0])
    assert client.session.handle(m.Commit(7, reserved.reservations, [1]), PAGE_BYTES) is not None
    assert client.session.num_requests == 1
    client.session.handle(m.Ping(8), 0)
    verify_ended(client, m.FailureCode.PROTOCOL, "before the payload of Commit 7 was whole")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digests": joined([0, 0])}, "named twice"),
        ({"block_bytes": 1 << 31}, "does not fit a slab"),
        ({"block_bytes": 1 << 31, "inline": True}, "of one payload"),
    ],
)
def test_a_stage_that_cannot_be_met_fails_alone(rig: Rig, change: dict[str, Any], words: str) -> None:
    client = rig.unix()
    failed = client.ask(client.stage_message([0], **change), m.Failed)
    assert failed.code == m.FailureCode.INVALID
    assert words in failed.text
    assert client.session.num_requests == 0
    client.ask(m.Ping(9), m.Pong)


def test_requests_that_cannot_be_met_fail_alone(rig: Rig) -> None:
    client = rig.unix()
    zeros = bytes(DIGEST_BYTES)
    for message, words in (
        (m.Reserve(9, SPACE, 1 << 31, digest(1), zeros), "does not fit a slab"),
        (m.WaitDurable(9, SPACE, digest(1), "tape", 10), "no tape tier"),
        (m.StartEpoch(9, 1 << 40), "an epoch is"),
    ):
        failed = client.ask(message, m.Failed)
        assert (failed.id, failed.code) == (9, m.FailureCode.INVALID)
        assert words in failed.text
    over_tcp = rig.tcp()
    assert over_tcp.ask(over_tcp.stage_message([1], inline=False), m.Failed).code == m.FailureCode.INVALID
    client.ask(m.Ping(9), m.Pong)


def test_an_error_of_ours_fails_the_request_and_not_the_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = rig.unix()
    monkeypatch.setattr(rig.store.host, "committed", lambda *_: 1 / 0)
    assert client.ask(m.Lookup(9, SPACE, digest(1)), m.Failed).code == m.FailureCode.FAILED
    assert "Lookup failed" in caplog.text
    monkeypatch.undo()
    client.ask(m.Ping(9), m.Pong)


# ---- resets, removals, counts ----------------------------------------------------------------------------------------


def test_a_new_epoch_forgets_all_and_is_at_least_that_asked_for(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix(2000)
    client.store([0])
    other.store([0])
    client.say(m.StartEpoch(9, 5))
    assert not client.heard  # on the tenant's thread
    client.ask(m.Ping(10), m.Pong)  # answers come in any order
    rig.run_jobs()
    assert client.hear(m.Epoch) == m.Epoch(9, 5)
    assert client.lookup([0]) == [0]
    client.say(m.StartEpoch(9, 3))
    rig.run_jobs()
    assert client.hear(m.Epoch).epoch == 6
    assert other.lookup([0]) == [1]
    assert rig.unix(2000).session.tenant_name == "b"


def test_a_reset_voids_what_is_being_filled_and_its_slot_stays_the_clients(rig: Rig) -> None:
    client = rig.unix()
    reserved = client.reserve([0])
    client.say(m.StartEpoch(9, 0))
    rig.run_jobs()
    client.hear(m.Epoch)
    other = rig.unix()
    offsets = other.reserve(list(range(10))).offsets
    assert reserved.offsets[0] not in offsets
    assert client.commit(reserved, [content(0)]) == [VOID]
    assert other.lookup([0]) == [0]


def test_removed_blocks_are_gone_and_counted(rig: Rig) -> None:
    client = rig.unix()
    client.store([0, 1])
    client.say(m.Remove(9, SPACE, joined([0, 1, 2])))
    rig.run_jobs()
    assert client.hear(m.Count) == m.Count(9, 2)
    assert client.lookup([0, 1]) == [0, 0]


def test_stats_are_counts_by_name(rig: Rig) -> None:
    client, other = rig.unix(), rig.tcp()
    client.store([0])
    client.stage([0, 1])
    other.reserve([7])
    stats = client.ask(m.Stats(9), m.StatsAnswer).stats
    assert stats["stored_blocks"] == 1
    assert stats["host_blocks"] == 1
    assert stats["asked_blocks"] == 2
    assert stats["hit_blocks"] == 1
    clients = stats["clients"]
    assert isinstance(clients, dict)
    assert (clients["unix"], clients["tcp"], clients["leases"], clients["reservations"]) == (1, 1, 1, 1)
    assert (clients["outcomes.ok"], clients["outcomes.miss"]) == (1, 1)
    assert clients["served_bytes"] == PAGE_BYTES


def test_without_checksums_none_is_kept_or_given_out() -> None:
    rig = Rig(daemon={"checksums": False})
    client = rig.unix()
    reserved = client.reserve([0])
    assert list(client.ask(m.Commit(9, reserved.reservations, [7]), m.Committed).outcomes) == [STORED]
    assert client.stage([0]).checksums == [0]
    rig.check_integrity()
    rig.close()


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_bye_gives_all_back_at_once_and_closes(rig: Rig) -> None:
    client = rig.unix()
    client.store([0])
    client.stage([0])
    client.reserve([1])
    client.say(m.Bye())
    assert client.session.is_closed
    assert client.ends == ["goodbye"]
    assert rig.hub.num_sessions == 0
    rig.verify_baseline()
    client.session.end(clean=False)
    assert client.peer.process is not None
    assert client.peer.process.closed  # type: ignore[attr-defined]


def test_a_tcp_clients_end_gives_all_back_at_once(rig: Rig) -> None:
    client = rig.tcp(reads=False)
    client.store([0])
    client.say(client.stage_message([0]))
    client.session.handle(m.Reserve(50, SPACE, PAGE_BYTES, digest(1), digest(0)), 0)
    client.session.end(clean=False)
    rig.verify_baseline()
    assert list(rig.tcp().reserve([1]).outcomes) == [RESERVED]


def test_an_end_within_a_payload_stores_nothing(rig: Rig) -> None:
    client = rig.tcp()
    reserved = client.reserve([0])
    targets = client.session.handle(m.Commit(7, reserved.reservations, [1]), PAGE_BYTES)
    assert targets is not None
    del targets
    client.session.end(clean=False)
    client.session.payload_end()
    rig.verify_baseline()
    assert rig.tcp().lookup([0]) == [0]


def test_a_closing_daemon_says_so_once(rig: Rig) -> None:
    client = rig.unix()
    client.session.fail(m.FailureCode.CLOSING, "the server is going down")
    client.session.fail(m.FailureCode.CLOSING, "the server is going down")
    verify_ended(client, m.FailureCode.CLOSING, "going down")


def test_a_session_that_never_said_hello_leaves_nothing(rig: Rig) -> None:
    session = Session(rig.hub, Peer("tcp", "10.0.0.1:4"), lambda *_: None, lambda _: None)
    assert rig.hub.num_sessions == 1
    session.end(clean=False)
    session.end(clean=True)
    assert rig.hub.num_sessions == 0
    assert not rig.hub.has_requests
