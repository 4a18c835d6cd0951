"""Tokens, certificates and tenants, over a daemon; and what is said where msgspec is missing."""

from __future__ import annotations

import http.server
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.clock import MonotonicClock
from kvtier.testing.redis_servers import TlsFiles
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.server import ServerTier
from tests.server_tier.rig import DaemonAt, daemon_at, get, key_of, opened, put, settings_of

STORED, OK, MISS = WriteOutcome.STORED, ReadOutcome.OK, ReadOutcome.MISS
TIMEOUT_S = 3.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonAt]:
    with daemon_at(tmp_path, {"host.size": "4MiB", "host.slab": "1MiB"}) as daemon:
        yield daemon


def test_a_tenants_blocks_are_one_whichever_way_they_come(daemon: DaemonAt) -> None:
    with (
        opened(daemon.unix_url, timeout_s=TIMEOUT_S) as near,
        opened(daemon.tcp_url, timeout_s=TIMEOUT_S, token_file=daemon.token_file) as far,
    ):
        assert put(near, "near") == [STORED]
        assert put(far, "far", "near") == [STORED, WriteOutcome.ALREADY_STORED]
        for tier in (near, far):
            assert get(tier, "near", "far") == [OK, OK]
        assert near.remove([key_of("far")]) == 1
        assert get(far, "far") == [MISS]
        far.start_epoch(far.epoch + 1)
        assert get(near, "near") == [MISS]
        assert (near.snapshot().mapped_bytes, far.snapshot().mapped_bytes) == (4 << 20, 0)


@pytest.mark.bug("SE09")
def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    names = ("a", "b")
    for name in names:
        (tmp_path / name).write_text(f"the token of {name} in these tests\n")
        (tmp_path / name).chmod(0o600)
    settings = {
        "host.slab": "1MiB",
        "daemon.tenants": "a=2MiB,b=3MiB",
        "daemon.credentials": f"a=uid:{os.getuid()},a=token:{tmp_path / 'a'},b=token:{tmp_path / 'b'}",
    }
    with (
        daemon_at(tmp_path, settings) as daemon,
        opened(daemon.unix_url, timeout_s=TIMEOUT_S) as near_a,
        opened(daemon.tcp_url, timeout_s=TIMEOUT_S, token_file=str(tmp_path / "a")) as far_a,
        opened(daemon.tcp_url, timeout_s=TIMEOUT_S, token_file=str(tmp_path / "b")) as far_b,
        opened(daemon.unix_url, timeout_s=TIMEOUT_S, token_file=str(tmp_path / "b")) as near_with_bs_token,
    ):
        assert put(near_a, "x") == [STORED]
        assert get(far_a, "x") == [OK]
        assert get(far_b, "x") == [MISS]
        assert far_b.contains([key_of("x")]) == [False]
        assert get(near_with_bs_token, "x") == [OK], "the kernel's word for who it is, not the client's"
        far_b.start_epoch(1)
        assert get(near_a, "x") == [OK]
        assert [tier.usage().capacity_bytes for tier in (near_a, far_b)] == [2 << 20, 3 << 20]


@pytest.mark.parametrize("token", ["another token, and a wrong one", None])
def test_without_the_token_nothing_is_had(
    daemon: DaemonAt, tmp_path: Path, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(token or "")
    token_file = str(wrong) if token else None
    with opened(daemon.tcp_url, timeout_s=TIMEOUT_S, token_file=token_file) as tier:
        assert not tier.is_joined
        assert put(tier, "x") == [WriteOutcome.ERROR]
        assert tier.snapshot().errors == {"denied": 2}
        lines = [each.getMessage() for each in caplog.records if each.name == "kvtier.tiers.server"]
        assert len(lines) == 1
        assert "see server.token_file" in lines[0]
        assert "wrong one" not in caplog.text


def served(tls: TlsFiles) -> dict[str, object]:
    return {
        "host.size": "4MiB",
        "host.slab": "1MiB",
        "daemon.tls_cert_file": str(tls.server_cert_file),
        "daemon.tls_key_file": str(tls.server_key_file),
    }


def test_tls_with_a_token(tmp_path: Path, tls: TlsFiles) -> None:
    with daemon_at(tmp_path, served(tls)) as daemon:
        url, ca_file, token_file = daemon.tcp_url, str(tls.ca_file), daemon.token_file
        with opened(url, tls_ca_file=ca_file, token_file=token_file, timeout_s=TIMEOUT_S) as tier:
            assert put(tier, *range(20)) == [STORED] * 20
            assert get(tier, *range(20)) == [OK] * 20
            assert put(tier, "long", nbytes=300_000) == [STORED]
            assert get(tier, "long", nbytes=300_000) == [OK]
        for without in ({"tls_ca_file": None}, {"token_file": None}):
            files = {"tls_ca_file": ca_file, "token_file": token_file} | without
            tier = ServerTier(settings_of(url, timeout_s=TIMEOUT_S, **files), MonotonicClock())
            assert not tier.is_joined
            tier.close()


def test_who_speaks_plain_to_tls_is_told_what_to_set(
    tmp_path: Path, tls: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        daemon_at(tmp_path, served(tls)) as daemon,
        opened(daemon.tcp_url, token_file=daemon.token_file, timeout_s=TIMEOUT_S),
    ):
        (said,) = [message for message in caplog.messages if "welcomed us" in message]
        assert "set server.tls_ca_file" in said


def test_tls_with_a_certificate_of_the_clients(tmp_path: Path, tls: TlsFiles) -> None:
    settings = {
        "daemon.tls_client_ca_file": str(tls.ca_file),
        "daemon.credentials": "default=cert:kvtier testing client",
    }
    with daemon_at(tmp_path, served(tls) | settings) as daemon:
        own = {"tls_cert_file": str(tls.client_cert_file), "tls_key_file": str(tls.client_key_file)}
        for shown in (own, {}):
            url, ca_file = daemon.tcp_url.replace("127.0.0.1", "localhost"), str(tls.ca_file)
            tier = ServerTier(settings_of(url, timeout_s=TIMEOUT_S, tls_ca_file=ca_file, **shown), MonotonicClock())
            assert tier.is_joined is bool(shown)
            assert put(tier, "x") == [STORED if shown else WriteOutcome.ERROR]
            tier.close()


@pytest.mark.bug("US05")
def test_a_daemon_of_another_release_is_named_with_this_one(
    daemon: DaemonAt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.tiers.server.opening.VERSIONS", (98, 99))
    caplog.set_level(logging.WARNING, "kvtier.tiers")
    with opened(daemon.unix_url, timeout_s=TIMEOUT_S) as tier:
        assert get(tier, "x") == [ReadOutcome.ERROR]
        assert put(tier, "x") == [WriteOutcome.ERROR]
        (line,) = [each.getMessage() for each in caplog.records if each.name == "kvtier.tiers.server"]
        assert line.count(f"kvtier {__version__}") == 2, "both are named"
        assert "98, 99" in line
        monkeypatch.undo()
        assert put(tier, "x") == [STORED]


@pytest.mark.bug("US05")
def test_what_speaks_http_is_not_taken_for_a_daemon(caplog: pytest.LogCaptureFixture) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            began = time.monotonic()
            with opened(f"kvtier+tcp://127.0.0.1:{server.server_address[1]}", timeout_s=0.4) as tier:
                assert get(tier, "x") == [ReadOutcome.ERROR]
                assert time.monotonic() - began < 2.0
                assert "server.url = kvtier+tcp://127.0.0.1" in caplog.text
        finally:
            server.shutdown()
            thread.join()


WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = None
from kvtier.clock import MonotonicClock
from kvtier.config import ServerSettings
from kvtier.errors import ConfigError
from kvtier.opened import open_server
try:
    open_server(ServerSettings(url="kvtier+unix:///nowhere"), MonotonicClock())
except ConfigError as error:
    print(error)
"""


def test_without_msgspec_it_is_said_what_to_install() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_MSGSPEC], capture_output=True, text=True, check=True)
    assert found.stdout == "server.url is set, but msgspec is not installed: pip install 'kvtier[server]'\n"
