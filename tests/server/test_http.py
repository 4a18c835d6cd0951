"""What a daemon answers over HTTP: the right numbers to whoever asks well, nothing of use to anybody else."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.breaker import BreakerSnapshot, BreakerState
from kvtier.config import MemorySnapshot, load_settings
from kvtier.errors import ConfigError
from kvtier.families import samples
from kvtier.server import answers, http
from kvtier.server.http import HttpServer, serve
from kvtier.server.status import ClientCounts, DaemonSnapshot, QuarantineCounts, problems, status_document
from kvtier.store import Store
from kvtier.testing import FakeClock
from tests.server.watching import (
    BLOCK_BYTES,
    FakeDaemon,
    Response,
    TurningClock,
    ask,
    open_store,
    put,
    receive,
    request,
)

PATHS = ("/", "/status.json", "/metrics", "/healthz")
DEADLINE_S = 20.0

Serve = Callable[..., HttpServer]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, Store]]:
    with open_store(tmp_path / "disk") as first, open_store() as second:
        put(first, 5)
        put(second, 3)
        yield {"alpha": first, "beta": second}


@pytest.fixture
def daemon(stores: dict[str, Store]) -> FakeDaemon:
    return FakeDaemon(stores)


@pytest.fixture
def serving() -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def make(daemon: Any, host: str = "127.0.0.1", clock: Any = None) -> HttpServer:
            server = serve(daemon, host, 0, clock or TurningClock())
            stack.callback(server.close)
            return server

        yield make


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def connect(server: HttpServer, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(server.address, DEADLINE_S)
    connection.sendall(sent)
    return connection


def get(server: HttpServer, path: str) -> Response:
    return ask(server, request(path))


def document(server: HttpServer) -> dict[str, Any]:
    response = get(server, "/status.json")
    assert response.status == 200
    found = json.loads(response.body)
    assert isinstance(found, dict)
    return found


# ---- health ----------------------------------------------------------------------------------------------------------


def test_a_daemon_that_serves_is_healthy(daemon: FakeDaemon, serving: Serve) -> None:
    response = get(serving(daemon), "/healthz")
    assert (response.status, json.loads(response.body)) == (200, {"ready": True})
    assert daemon.num_snapshots == 0, "asked often, by probes: it must cost nothing"


def test_one_that_does_not_says_why(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    daemon.state, daemon.reason = "starting", "the disk tier of tenant alpha is being opened"
    response = get(server, "/healthz")
    assert response.status == 503
    assert json.loads(response.body) == {"ready": False, "state": "starting", "reason": daemon.reason}
    daemon.state, daemon.reason = "draining", ""
    assert json.loads(get(server, "/healthz").body)["reason"] == "draining"
    daemon.state = "serving"
    assert get(server, "/healthz").status == 200


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_every_tenants_store(daemon: FakeDaemon, serving: Serve) -> None:
    response = get(serving(daemon), "/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    text = response.body.decode()
    typed = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(typed) == len(set(typed)), "the text format has each metric once"
    told = {
        (sample.name.removesuffix("_total"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, store in daemon.stores.items():
        for sample in samples(store.stats(), "kvtier"):
            if not sample.labels:
                assert told[sample.name, frozenset({("tenant", name)})] == sample.value, sample.name
    assert told["kvtier_host_blocks", frozenset({("tenant", "alpha")})] == 5
    assert told["kvtier_disk_blocks", frozenset({("tenant", "alpha")})] == 5
    assert ("kvtier_disk_blocks", frozenset({("tenant", "beta")})) not in told


def test_metrics_have_all_that_is_counted_of_clients(daemon: FakeDaemon, serving: Serve) -> None:
    numbers = {field.name: index + 3 for index, field in enumerate(dataclasses.fields(ClientCounts)[:-1])}
    daemon.clients["beta"] = ClientCounts(**numbers, outcomes={"ok": 70, "timeout": 71})
    daemon.quarantine["beta"] = QuarantineCounts(80, 81, 82)
    daemon.refused["denied"] = 90
    families = text_string_to_metric_families(get(serving(daemon), "/metrics").body.decode())
    told = [sample for family in families for sample in family.samples if sample.name.startswith("kvtier_daemon_")]
    values = {sample.value for sample in told if sample.labels.get("tenant") == "beta"}
    assert values == {*numbers.values(), 70, 71, 80, 81, 82}
    own = {sample.name: sample.value for sample in told if "tenant" not in sample.labels}
    assert own == {
        "kvtier_daemon_info": 1,
        "kvtier_daemon_ready": 1,
        "kvtier_daemon_uptime_seconds": daemon.uptime_s,
        "kvtier_daemon_max_clients": 1024,
        "kvtier_daemon_refused_total": 90,
    }


# ---- status ----------------------------------------------------------------------------------------------------------


def test_the_status_has_the_stores_numbers(daemon: FakeDaemon, serving: Serve) -> None:
    daemon.clients["alpha"] = ClientCounts(unix=2, tcp=1, leases=4, served_bytes=9 * BLOCK_BYTES)
    status = document(serving(daemon))
    assert (status["state"], status["version"], status["clients"]) == ("serving", "1.2.3", 3)
    alpha, beta = status["tenants"]
    assert [tier["name"] for tier in alpha["tiers"]] == ["host", "disk"]
    assert [tier["name"] for tier in beta["tiers"]] == ["host"]
    stats = daemon.stores["alpha"].stats()
    assert stats.disk is not None
    host, disk = alpha["tiers"]
    assert (host["used_bytes"], host["capacity_bytes"]) == (stats.host_used_bytes, stats.host_reserved_bytes)
    assert (disk["used_bytes"], disk["capacity_bytes"]) == (stats.disk.used_bytes, stats.disk.capacity_bytes)
    assert disk["breaker"] == {"state": "closed", "open_for_s": 0.0, "next_probe_in_s": 0.0, "times_opened": 0}
    assert (alpha["stored_bytes"], alpha["served_bytes"]) == (5 * BLOCK_BYTES, 9 * BLOCK_BYTES)


def test_the_status_has_what_it_is_meant_to_have_and_nothing_else(daemon: FakeDaemon, serving: Serve) -> None:
    def names(part: Any, path: str = "") -> Iterator[str]:
        """Where there are values, but for those that are counted by reason or outcome."""
        if isinstance(part, dict) and not path.endswith(("hits", "misses", "fallbacks", "errors", "refused", "reads")):
            for name, value in part.items():
                yield from names(value, f"{path}.{name}" if path else name)
        elif isinstance(part, list):
            for each in part:
                yield from names(each, path)
        else:
            yield path

    top = {"state", "reason", "version", "uptime_s", "clients", "max_clients", "refused", "tenants"}
    tenant = {"name", "lookups", "asked_blocks", "hit_blocks", "hits", "misses", "fallbacks", "stored_blocks", "errors"}
    tenant |= {"stored_bytes", "evicted_blocks", "resets", "served_bytes", "tiers", "clients", "waits", "quarantine"}
    tiers = {"name", "blocks", "used_bytes", "capacity_bytes", "touched_bytes", "pinned_bytes", "leases", "breaker"}
    tiers |= {
        "staging_bytes",
        "reads",
        "read_bytes",
        "writes",
        "written_bytes",
        "queued_bytes",
        "errors",
        "due",
        "pending",
    }
    tiers |= {"due", "pending"}
    status = document(serving(daemon))
    found = set(names(status))
    assert {name.split(".")[0] for name in found} == top
    assert {name.split(".")[1] for name in found if name.startswith("tenants.")} == tenant
    assert {name.split(".")[2] for name in found if name.startswith("tenants.tiers.")} == tiers


def test_what_is_wrong_comes_first(daemon: FakeDaemon) -> None:
    assert problems(daemon.snapshot()) == []
    daemon.clients["alpha"] = ClientCounts(unix=1, tcp=1, outcomes={"ok": 5, "damaged": 2, "full": 1})
    daemon.quarantine["beta"] = QuarantineCounts(1, 7, 7 * BLOCK_BYTES)
    daemon.max_clients = 2
    daemon.state, daemon.reason = "draining", "it was told to end"
    snapshot = daemon.snapshot()
    sick = BreakerSnapshot(BreakerState.OPEN, 3, 12.0, 4.0, 1, 9)
    alpha, beta = snapshot.tenants
    disk = alpha.stats.disk
    assert disk is not None
    disk = dataclasses.replace(disk, read_only={"/mnt/a": "the file system is full"}, damaged_blocks=3)
    alpha = dataclasses.replace(
        alpha, breakers={"disk": sick}, stats=dataclasses.replace(alpha.stats, disk=disk, errors={"OSError": 4})
    )
    found = problems(dataclasses.replace(snapshot, tenants=[alpha, beta]))
    assert [problem.is_now for problem in found] == [True] * 5 + [False] * 4
    texts = [f"{problem.tenant}: {problem.text}" for problem in found]
    assert texts[0] == ": not serving: it was told to end"
    assert "all 2 clients that daemon.max_clients allows" in texts[1]
    assert texts[2].startswith("alpha: the disk tier is sick")
    assert texts[3] == "alpha: /mnt/a takes no writes: the file system is full"
    assert texts[4].startswith("beta: slots in quarantine: 7")
    assert all(word in " ".join(texts[5:]) for word in ("disk tier: 3", "checksum says: 2", "in use: 1", "more: 4"))


def test_answers_are_kept_for_a_moment(daemon: FakeDaemon, serving: Serve) -> None:
    clock = FakeClock()
    server = serving(daemon, clock=clock)
    for _ in range(5):
        document(server)
    assert daemon.num_snapshots == 1
    clock.advance(answers.KEPT_S)
    document(server)
    assert daemon.num_snapshots == 2


# ---- what may not get out --------------------------------------------------------------------------------------------


@pytest.mark.bug("SE05")
def test_no_secret_is_in_any_answer(
    tmp_path: Path, serving: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "s3cr3t-c0ffee-bad-f00d"
    monkeypatch.setenv("SOME_API_KEY", secret)
    monkeypatch.setenv("KVTIER_REDIS__PASSWORD", secret)
    token = tmp_path / secret / "token"
    token.parent.mkdir()
    token.write_text(secret)
    caplog.set_level(logging.DEBUG)
    redis: dict[str, Any] = {"redis__url": ["redis://127.0.0.1:1"], "redis__username": secret}
    redis |= {"redis__password": secret, "redis__timeout_s": 0.2}
    with (
        open_store(**redis) as store,
        open_store(redis__url=["redis://127.0.0.1:1"], redis__password_file=str(token)) as other,
    ):
        daemon = FakeDaemon({"alpha": store, "beta": other})
        server = serving(daemon)
        given = [get(server, path) for path in (*PATHS, "/environ", f"/{secret}", f"/status.json?{secret}")]
        given.append(ask(server, request(headers=[f"Authorization: Bearer {secret}"])))
        given.append(ask(server, request(method=secret)))
        assert [tier["name"] for tier in document(server)["tenants"][0]["tiers"]] == ["host", "redis"]
        for answer in given:
            assert secret not in f"{answer.headers} {answer.body.decode()}"
    assert secret not in caplog.text


@pytest.mark.bug("SE05")
def test_no_secret_of_a_whole_daemon_is_in_any_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.server.daemon import Daemon

    secret = "s3cr3t-c0ffee-bad-f00d"
    monkeypatch.setenv("SOME_API_KEY", secret)
    token = tmp_path / "tokens" / "of-alpha"
    token.parent.mkdir()
    token.write_text(secret)
    settings: dict[str, Any] = {
        "host.size": 16 << 20,
        "host.slab": 1 << 20,
        "disk.path": [str(tmp_path / "blocks")],
        "disk.size": "64MiB",
        "disk.min_free": 1,
        "redis.url": ["redis://127.0.0.1:1"],
        "redis.password": secret,
        "redis.timeout_s": 0.2,
        "daemon.socket": "off",
        "daemon.admin_socket": "off",
        "daemon.listen": "127.0.0.1:0",
        "daemon.http": "127.0.0.1:0",
        "daemon.tenants": "alpha=4MiB,beta=4MiB",
        "daemon.credentials": f"alpha=token:{token},beta=token:{token}-too",
        "daemon.drain_s": 1.0,
    }
    token.with_name("of-alpha-too").write_text(f"{secret}-too")
    with Daemon(load_settings(env={}, overrides=settings), memory=MemorySnapshot(1 << 34, 1 << 34)) as daemon:
        assert daemon.http_address is not None
        for path in PATHS:
            with contextlib.closing(socket.create_connection(daemon.http_address, DEADLINE_S)) as connection:
                connection.sendall(request(path))
                answer = receive(connection)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert secret.encode() not in answer
            assert str(token.parent).encode() not in answer
            assert b"alpha" in answer or path in ("/", "/healthz")


def test_paths_lead_to_no_file_and_queries_to_nothing(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    hostile = ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html", "/status.json/", "/%2f"]
    hostile += ["/?", "/metrics?name[]=x", "/status.json?callback=x", "http://localhost/metrics", "*", "/\\..\\x", "/;"]
    for path in hostile:
        assert get(server, path).status == 404, path
    assert daemon.num_snapshots == 0


def test_all_but_get_is_refused(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get"):
        response = ask(server, request("/status.json", method=method, headers=["Content-Length: 3"]) + b"abc")
        assert (response.status, response.headers["Allow"]) == (405, "GET"), method


@pytest.mark.bug("SE01")
def test_what_is_no_http_is_refused(daemon: FakeDaemon, serving: Serve, tmp_path: Path) -> None:
    server = serving(daemon)
    made = tmp_path / "made"
    pickled = b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(made)
    for sent in (
        pickled,
        b"\0" * 40,
        b"GET /healthz",
        b"GET / HTTP/2.0",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"\xff",
    ):
        assert ask(server, sent + b"\r\n\r\n").status == 400, sent
    assert not made.exists()
    with contextlib.closing(connect(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 2000)) as tls:
        tls.shutdown(socket.SHUT_WR)
        assert b" 431 " in receive(tls)
    assert get(server, "/healthz").status == 200


def test_headers_are_capped(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    assert ask(server, request(headers=["A: " + "b" * 8000])).status == 200
    assert ask(server, request(headers=["A: " + "b" * 8200])).status == 431
    assert ask(server, request("/" + "a" * 5000)).status == 400


def test_a_name_that_is_not_ours_is_refused_on_loopback(daemon: FakeDaemon, serving: Serve) -> None:
    """A page from elsewhere may have its own name point to 127.0.0.1, to read this in an operator's browser."""
    server = serving(daemon)
    for host in ("localhost", "LOCALHOST:9407", "127.0.0.1", "127.0.0.1:80", "[::1]:9407", "10.0.0.7"):
        assert ask(server, request("/healthz", host=host)).status == 200, host
    for host in ("evil.example", "localhost.evil.example:9407", "", "127.0.0.1.evil.example"):
        assert ask(server, request("/healthz", host=host)).status == 421, host
    assert ask(server, request("/healthz", headers=["Host: evil.example"])).status == 421
    assert ask(server, b"GET /healthz HTTP/1.0\r\n\r\n").status == 200


def test_every_answer_forbids_what_it_does_not_need(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    answers = [get(server, path) for path in (*PATHS, "/none")]
    answers += [ask(server, request(method="POST")), ask(server, b"\r\n\r\n"), ask(server, b"x" * 9000)]
    for answer in answers:
        headers = answer.headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
        assert (headers["Cache-Control"], headers["Connection"]) == ("no-store", "close")
        assert "Access-Control-Allow-Origin" not in headers
        assert "Server" not in headers


def test_the_page_is_whole_and_runs_only_its_own_script(daemon: FakeDaemon, serving: Serve) -> None:
    response = get(serving(daemon), "/")
    page, policy = response.body.decode(), response.headers["Content-Security-Policy"]
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"\bsrc=|url\(|@import|innerHTML|insertAdjacent|document\.write|eval\(", page)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_pages_colours_can_be_told_apart(daemon: FakeDaemon, serving: Serve) -> None:
    page = get(serving(daemon), "/").body.decode()
    palettes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", each)) for each in re.findall(r":root {([^}]+)}", page)
    ]
    assert len(palettes) == 2, "light and dark"
    on = {"text": ("page", "card", "bad-page", "note-page"), "soft": ("page", "card"), "good": ("card",)}
    on |= {"bad": ("card", "bad-page"), "note": ("card", "note-page")}
    for palette in palettes:
        for text, grounds in on.items():
            for ground in grounds:
                dark, light = sorted((luminance(palette[text]), luminance(palette[ground])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"
        for line in ("used", "restore", "store", "hit"):
            dark, light = sorted((luminance(palette[line]), luminance(palette["card"])))
            assert (light + 0.05) / (dark + 0.05) >= 3.0, line


# ---- clients that harm -----------------------------------------------------------------------------------------------


def test_who_trickles_is_cut_and_holds_nobody_up(
    daemon: FakeDaemon, serving: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)
    server = serving(daemon)
    with contextlib.closing(connect(server, b"GET /heal")) as trickling:
        assert get(server, "/healthz").status == 200
        with contextlib.suppress(ConnectionError):
            until(lambda: trickling.send(b"x") == 0)  # each byte in time, the whole never
    assert get(server, "/healthz").status == 200


def test_who_reads_nothing_is_cut(daemon: FakeDaemon, serving: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.2)
    server = serving(daemon)
    before = num_descriptors()
    with contextlib.closing(connect(server, request())) as deaf:
        until(lambda: num_descriptors() == before + 1)  # ours; the server's end is closed
        assert get(server, "/healthz").status == 200
        assert deaf.fileno() >= 0


def test_who_goes_on_sending_is_cut(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    with contextlib.closing(connect(server, request())) as talking, contextlib.suppress(ConnectionError):
        until(lambda: talking.send(b"x" * (1 << 16)) == 0)
    assert get(server, "/healthz").status == 200


def test_a_thousand_connections_at_once_harm_nobody(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    before = num_descriptors()
    with contextlib.ExitStack() as stack:
        for turn in range(1000):
            stack.enter_context(contextlib.closing(connect(server, b"GET / HT"[: turn % 8])))
            if turn % 100 == 99:
                assert get(server, "/healthz").status == 200
        until(lambda: num_descriptors() <= before + 1000 + http.MAX_CONNECTIONS)
        assert get(server, "/status.json").status == 200
    until(lambda: num_descriptors() == before)


def test_ten_thousand_requests_one_after_the_other(daemon: FakeDaemon, serving: Serve) -> None:
    server = serving(daemon)
    before = num_descriptors()
    for _ in range(10_000):
        with contextlib.closing(connect(server, b"GET /healthz HTTP/1.1\r\n\r\n")) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
    until(lambda: num_descriptors() == before)


class SlowDaemon(FakeDaemon):
    """Is asked for a moment that does not come until it is let go."""

    def __init__(self, stores: dict[str, Store]) -> None:
        super().__init__(stores)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    def snapshot(self) -> DaemonSnapshot:
        self.is_asked.set()
        assert self.may_answer.wait(DEADLINE_S)
        return super().snapshot()


def test_health_is_told_while_a_snapshot_takes_its_time(stores: dict[str, Store], serving: Serve) -> None:
    daemon = SlowDaemon(stores)
    server = serving(daemon, clock=FakeClock())
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(contextlib.closing(connect(server, request("/status.json")))) for _ in range(20)]
        assert daemon.is_asked.wait(DEADLINE_S)
        assert get(server, "/healthz").status == 200, "who came last was heard: so were all before"
        for _ in range(2 * http.MAX_CONNECTIONS):  # a crowd that says nothing costs those nothing who have asked
            stack.enter_context(contextlib.closing(connect(server)))
        assert get(server, "/healthz").status == 200
        daemon.may_answer.set()
        for connection in waiting:
            assert receive(connection).startswith(b"HTTP/1.1 200 OK\r\n")
    assert daemon.num_snapshots == 1, "asked once for all"


# ---- the server itself -----------------------------------------------------------------------------------------------


class BrokenDaemon(FakeDaemon):
    def snapshot(self) -> DaemonSnapshot:
        raise RuntimeError("a private reason")


def test_a_daemon_that_cannot_be_asked_is_no_silence(
    stores: dict[str, Store], serving: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    server = serving(BrokenDaemon(stores), clock=clock)
    for path in ("/status.json", "/metrics", "/status.json"):
        response = get(server, path)
        assert response.status == 500
        assert b"private" not in response.body
    assert get(server, "/healthz").status == 200
    assert caplog.text.count("could not be answered") == 1
    clock.advance(answers.LOG_PAUSE_S)
    get(server, "/metrics")
    assert caplog.text.count("could not be answered") == 2


def test_an_address_that_cannot_be_had_is_named(daemon: FakeDaemon, serving: Serve) -> None:
    taken = serving(daemon).address
    with pytest.raises(ConfigError, match=rf"daemon\.http = '127\.0\.0\.1:{taken[1]}' cannot be listened on"):
        serve(daemon, *taken)
    with pytest.raises(ConfigError, match=r"daemon\.http = '192\.0\.2\.1:0' cannot"):
        serve(daemon, "192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"daemon\.http = 'no\.such\.invalid:1' is no address"):
        serve(daemon, "no.such.invalid", 1)


@pytest.mark.bug("SE03")
def test_only_what_listens_beyond_this_machine_warns(
    daemon: FakeDaemon, serving: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serving(daemon)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    server = serving(daemon, "0.0.0.0")
    (warned,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "can be reached from elsewhere" in warned.getMessage()
    there = request("/healthz", host="kvtier.svc.cluster.local:9407")
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.address[1]), DEADLINE_S)) as connection:
        connection.sendall(there)
        assert receive(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def test_closing_cuts_who_is_there_and_may_be_done_twice(daemon: FakeDaemon) -> None:
    server = serve(daemon, "127.0.0.1", 0)
    with contextlib.closing(connect(server, b"GET ")) as waiting:
        assert get(server, "/healthz").status == 200
        server.close()
        server.close()
        with contextlib.suppress(ConnectionError):
            assert waiting.recv(1) == b""
    with pytest.raises(ConnectionError):
        connect(server)


def test_the_document_is_what_json_has(daemon: FakeDaemon) -> None:
    document = status_document(daemon.snapshot())
    assert json.loads(json.dumps(document, allow_nan=False)) == document
