"""Passwords, users with few rights, TLS, and settings that cannot work."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import MonotonicClock
from kvtier.errors import ConfigError, TierError
from kvtier.testing.redis_servers import RedisCluster, RedisServer, TlsFiles
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.redis import RedisTier
from kvtier.tiers.redis.replies import COMMANDS
from tests.redis.conftest import REASON
from tests.redis.rig import get, key_of, opened, put, settings_of

STORED = WriteOutcome.STORED
OK, ERROR = ReadOutcome.OK, ReadOutcome.ERROR

RIGHTS = " ".join(word for word in COMMANDS.replace(",", "").split() if word.startswith("+"))


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[RedisServer]:
    """Users: the default one with a password, one with the rights that we say we need, one that may only read."""
    if REASON:
        pytest.skip(REASON)
    users = {
        "kvtier": f">its-secret ~kvtier:* {RIGHTS}",
        "reader": ">its-secret ~kvtier:* +get +exists +info +ping",
        "blind": ">its-secret ~kvtier:* -@all",
    }
    with RedisServer(password="open sesame", users=users) as server:
        yield server


def everything_works(tier: RedisTier) -> None:
    tier.start_epoch(tier.epoch + 1)
    assert put(tier, 1, ttl_s=50.0) == [STORED]
    assert put(tier, 1) == [WriteOutcome.ALREADY_STORED]
    assert get(tier, 1) is OK
    tier.touch([key_of(1)])
    assert tier.contains([key_of(1)]) == [True]
    assert tier.remove([key_of(1)]) == 1
    tier.probe()
    assert tier.snapshot().errors == {}
    assert tier.usage().capacity_bytes > 0


def test_a_password(guarded_server: RedisServer) -> None:
    with opened(guarded_server.url, password="open sesame") as tier:
        everything_works(tier)
    with opened(f"unix://{guarded_server.socket_path}", password="open sesame") as tier:
        everything_works(tier)


def test_the_rights_that_we_name_are_enough(guarded_server: RedisServer) -> None:
    with opened(guarded_server.url, username="kvtier", password="its-secret", ttl_s=60.0) as tier:
        everything_works(tier)


def test_the_rights_that_we_name_are_enough_in_a_cluster() -> None:
    if REASON:
        pytest.skip(REASON)
    with (
        RedisCluster(users={"kvtier": f">its-secret ~kvtier:* {RIGHTS}"}) as cluster,
        opened(tuple(cluster.urls), mode="cluster", username="kvtier", password="its-secret", ttl_s=60.0) as tier,
    ):
        everything_works(tier)


def verify_told(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Once, with the way out, and without a secret."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [line for line in lines if all(word in line for word in words)]
    assert told, lines
    assert len(lines) <= 2
    for secret in ("its-secret", "open sesame", "wrong-secret"):
        assert secret not in caplog.text


@pytest.mark.parametrize("user", [{}, {"username": "kvtier"}, {"username": "nobody"}])
def test_a_wrong_password(guarded_server: RedisServer, user: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with opened(guarded_server.url, password="wrong-secret", **user) as tier:
        for _ in range(3):
            assert get(tier, 1) is ERROR
            assert put(tier, 1) == [WriteOutcome.ERROR]
        with pytest.raises(TierError) as failure:
            tier.contains([key_of(1)])
        assert "wrong-secret" not in f"{failure.value!r} {failure.value.__cause__!r} {tier!r} {vars(tier)!r}"
        assert tier.snapshot().connections == 0
        assert tier.snapshot().errors["WRONGPASS"] >= 8
    verify_told(caplog, "redis.username", "redis.password")


def test_no_password_where_one_is_wanted(guarded_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(guarded_server.url) as tier:
        for _ in range(3):
            assert get(tier, 1) is ERROR
    verify_told(caplog, "redis.password")


def test_a_password_where_none_is_wanted(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(server.url, password="wrong-secret") as tier:
        assert get(tier, 1) is ERROR
    verify_told(caplog, "redis.password")


def test_a_user_who_may_only_read(guarded_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(guarded_server.url, password="open sesame") as tier:
        put(tier, "there")
    with opened(guarded_server.url, username="reader", password="its-secret") as tier:
        assert get(tier, "there") is OK
        for name in range(5):
            assert put(tier, name) == [WriteOutcome.ERROR]
        assert tier.snapshot().disconnects == 0
        assert tier.snapshot().errors["NOPERM"] >= 5
    verify_told(caplog, "redis.username", "+unlink")


def test_a_user_who_may_do_nothing(guarded_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(guarded_server.url, username="blind", password="its-secret") as tier:
        assert get(tier, "there") is ERROR
    verify_told(caplog, "redis.username", "+unlink")


def test_a_password_file_is_read_at_each_connect(guarded_server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("wrong-secret\n")
    with opened(guarded_server.url, password_file=str(path)) as tier:
        assert get(tier, 1) is ERROR
        path.write_text("open sesame\n")
        tier.probe()
        assert put(tier, 1) in ([STORED], [WriteOutcome.ALREADY_STORED])
        path.unlink()
        guarded_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert get(tier, 1) is ERROR
        path.write_text("open sesame")
        tier.probe()


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_password_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"redis\.password_file"):
        RedisTier(settings_of("redis://127.0.0.1:1", password_file=str(path)), MonotonicClock())


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_tls(tls_server: RedisServer, tls_files: TlsFiles) -> None:
    with opened(tls_server.url, tls_ca_file=str(tls_files.ca_file), timeout_s=5.0) as tier:
        everything_works(tier)
        assert put(tier, *range(8), nbytes=1 << 20) == [STORED] * 8


def test_a_certificate_of_ours(tls_files: TlsFiles) -> None:
    ours: dict[str, Any] = {
        "tls_ca_file": str(tls_files.ca_file),
        "tls_cert_file": str(tls_files.client_cert_file),
        "tls_key_file": str(tls_files.client_key_file),
    }
    with RedisServer(tls=tls_files, options=["tls-auth-clients yes"]) as server:
        with opened(server.url, timeout_s=5.0, **ours) as tier:
            everything_works(tier)
        with opened(server.url, timeout_s=1.0, tls_ca_file=ours["tls_ca_file"]) as tier:
            assert get(tier, 1) is ERROR


def test_a_server_that_is_not_trusted(tls_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tls_server.url, timeout_s=1.0) as tier:
        assert get(tier, 1) is ERROR
        assert put(tier, 1) == [WriteOutcome.ERROR]
    assert "certificate" in caplog.text


def test_no_tls_where_the_server_wants_it(tls_server: RedisServer) -> None:
    with opened(tls_server.url.replace("rediss", "redis"), timeout_s=1.0) as tier:
        assert get(tier, 1) is ERROR


def test_tls_where_the_server_has_none(server: RedisServer) -> None:
    with opened(server.url.replace("redis:", "rediss:")) as tier:
        assert get(tier, 1) is ERROR


def test_a_restart_and_a_hang_with_tls(tls_files: TlsFiles) -> None:
    with (
        RedisServer(tls=tls_files) as server,
        opened(server.url, tls_ca_file=str(tls_files.ca_file), timeout_s=1.0) as tier,
    ):
        put(tier, 1)
        server.restart()
        assert put(tier, 1) == [STORED]
        server.stop()
        assert get(tier, 1) is ERROR
        server.cont()
        tier.probe()
        assert get(tier, 1) is OK


def test_tls_files_that_cannot_be_used(tmp_path: Path, tls_files: TlsFiles) -> None:
    def refused(**files: Path) -> str:
        with pytest.raises(ConfigError) as failure:
            RedisTier(settings_of("rediss://127.0.0.1:1", **{n: str(p) for n, p in files.items()}), MonotonicClock())
        return str(failure.value)

    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    cert, key = tls_files.client_cert_file, tls_files.client_key_file
    for path in (nonsense, tmp_path / "missing"):
        assert "redis.tls_ca_file" in refused(tls_ca_file=path)
        assert "redis.tls_cert_file" in refused(tls_cert_file=path, tls_key_file=key)
        assert "redis.tls_key_file" in refused(tls_cert_file=cert, tls_key_file=path)
    assert "redis.tls_cert_file" in refused(tls_cert_file=cert, tls_key_file=tls_files.server_key_file)


# ---- what is missing -------------------------------------------------------------------------------------------------


def test_no_server_is_named() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        RedisTier(settings_of(()), MonotonicClock())


def test_redis_py_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_redis(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "redis":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[redis\]'"):
        RedisTier(settings_of("redis://127.0.0.1:1"), MonotonicClock())


def test_redis_py_has_changed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection keeps its socket elsewhere."""
    from redis.connection import Connection

    monkeypatch.setattr(Connection, "connect", lambda self: None)
    with pytest.raises(ConfigError, match=r"redis-py \d"):
        RedisTier(settings_of(server.url), MonotonicClock())


def test_a_host_that_does_not_exist() -> None:
    with opened("redis://no-such-host.invalid", timeout_s=1.0) as tier:
        assert put(tier, 1) == [WriteOutcome.ERROR]
