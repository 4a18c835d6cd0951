"""The status page in a browser: it shows a daemon's numbers, follows them, and says when the daemon is gone."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvtier.server.http import HttpServer, serve
from kvtier.server.status import ClientCounts, DaemonSnapshot, QuarantineCounts
from kvtier.store import Store
from tests.server.watching import BLOCK_BYTES, FakeDaemon, TurningClock, open_store, put

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 90.0
DEADLINE_S = 20.0
VIRTUAL_S = 20  # seconds of the page's time, which pass as fast as the daemon answers

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install -y --no-install-recommends chromium"
)


class Page(HTMLParser):
    """A document as its reader sees it: text, and text and titles by element's id or by label."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.titles: dict[str, str] = {}
        self.meters: dict[str, dict[str, str]] = {}
        self.lines: list[str] = []
        self.is_gone = '<main id="tenants" class="gone">' in source
        self._title = ""
        self._is_hidden = False
        self.feed(source)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.text += " "
        self._is_hidden = tag in ("script", "style", "noscript")
        self._title = found.get("title", "")
        if found.get("role") == "meter" and "hidden" not in found:
            self.meters[found["aria-label"].partition(":")[0]] = found
        if tag == "path" and found.get("class") != "area":
            self.lines.append(found.get("d", ""))

    def handle_endtag(self, tag: str) -> None:
        self._is_hidden = False
        self._title = ""

    def handle_data(self, data: str) -> None:
        if not self._is_hidden:
            self.text += data
            if self._title:
                self.titles[data] = self._title


def browse(server: HttpServer, directory: Path, virtual_s: int = VIRTUAL_S) -> Page:
    """What the page is after so many seconds of its time. Fails on whatever the browser complains of."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += [
        f"--user-data-dir={directory / 'profile'}",
        "--enable-logging=stderr",
        "--disable-background-networking",
    ]
    command += [f"--virtual-time-budget={virtual_s * 1000}", "--dump-dom"]
    url = f"http://127.0.0.1:{server.address[1]}/"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    # A line of its console, but for those of the network, which say that a daemon is gone.
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "net::ERR" not in line]
    assert complaints == []
    return Page(done.stdout)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "disk") as store:
        yield store


class BusyDaemon(FakeDaemon):
    """Serves and stores a block each second."""

    def snapshot(self) -> DaemonSnapshot:
        turn = self.num_snapshots + 1
        if turn <= 8:
            put(self.stores["default"], turn)
        self.clients["default"] = ClientCounts(
            unix=2,
            tcp=1,
            leases=17,
            waiting=1,
            longest_wait_s=0.25,
            served_bytes=turn * (3 << 20),
            outcomes={"ok": 900, "timeout": 12},
        )
        return super().snapshot()


def test_it_shows_the_daemons_numbers_and_follows_them(store: Store, tmp_path: Path) -> None:
    daemon = BusyDaemon({"default": store})
    server = serve(daemon, "127.0.0.1", 0, TurningClock())
    try:
        page = browse(server, tmp_path)
    finally:
        server.close()
    stats = store.stats()
    assert stats.disk is not None
    assert daemon.num_snapshots > 5
    assert "✓ Serving Nothing is wrong now." in page.text
    assert "Tenant default 3 clients connected" in page.text
    assert "version 1.2.3" in page.text
    # The last numbers, in words and as they are.
    assert stats.host_used_bytes == 8 * BLOCK_BYTES
    assert "32 KiB of 64 KiB, 50 %" in page.titles
    assert page.titles["32 KiB of 64 KiB, 50 %"] == f"{stats.host_used_bytes} of {stats.host_reserved_bytes} bytes"
    assert f"{stats.disk.used_bytes} of {stats.disk.capacity_bytes} bytes" in page.titles.values()
    assert page.meters["host"]["aria-valuetext"] == "50 % of 64 KiB"
    assert (page.meters["host"]["aria-valuenow"], page.meters["host"]["aria-valuemax"]) == ("50", "100")
    assert page.meters["disk"]["aria-valuetext"].endswith(" of 4 MiB")
    assert "wait for a lower tier now 1 the longest of these, for 250 ms" in page.text
    assert "timeout a lower tier did not bring it in time 12" in page.text
    # A second between snapshots, by the daemon's own time: 3 MiB each.
    assert "Restores 3 MiB/s" in page.text
    assert f"highest 3 MiB/s · {daemon.num_snapshots * 3} MiB in all" in page.text
    restores, stores, _ = page.lines
    assert restores.count("L") == daemon.num_snapshots - 2
    assert stores.count("L") == daemon.num_snapshots - 2


class LeavingDaemon(FakeDaemon):
    """Is gone after its third answer."""

    def __init__(self, store: Store) -> None:
        super().__init__({"default": store})
        self.quarantine["default"] = QuarantineCounts(1, 2, 3)
        self.leaves = threading.Event()
        self.is_leaving = threading.Event()

    def snapshot(self) -> DaemonSnapshot:
        if self.num_snapshots == 2:
            self.leaves.set()
            assert self.is_leaving.wait(DEADLINE_S)
        return super().snapshot()


def test_it_says_when_the_daemon_is_gone(store: Store, tmp_path: Path) -> None:
    daemon = LeavingDaemon(store)
    server = serve(daemon, "127.0.0.1", 0, TurningClock())

    def leave() -> None:
        if daemon.leaves.wait(DEADLINE_S):
            daemon.is_leaving.set()
            server.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    try:
        page = browse(server, tmp_path, 60)
    finally:
        leaving.join()
        server.close()
    assert "▲ No answer from the daemon It cannot be reached." in page.text
    assert re.search(r"The numbers below are of \d+ s ago", page.text)
    assert page.is_gone
    assert "Serving" not in page.text
    assert "▲ at that time slots in quarantine: 2" in page.text
    assert "host memory" in page.text, "the last numbers stay, marked as old"


def test_it_says_what_is_sick_first(store: Store, tmp_path: Path) -> None:
    daemon = FakeDaemon({"default": store})
    daemon.quarantine["default"] = QuarantineCounts(2, 12, 12 * BLOCK_BYTES)
    daemon.state, daemon.reason = "draining", "<img src=x onerror=alert(1)> it was told to end"
    server = serve(daemon, "127.0.0.1", 0, TurningClock())
    try:
        page = browse(server, tmp_path, 3)
    finally:
        server.close()
    assert "▲ Not serving: draining <img src=x onerror=alert(1)> it was told to end" in html.unescape(page.text)
    assert page.text.index("Not serving") < page.text.index("slots in quarantine: 12") < page.text.index("Tenant")
    assert "▲ 12 (48 KiB)" in page.titles


def test_where_there_is_nothing_yet_it_says_so(tmp_path: Path) -> None:
    with open_store() as store:
        server = serve(FakeDaemon({"default": store}), "127.0.0.1", 0, TurningClock())
        try:
            page = browse(server, tmp_path, 3)
        finally:
            server.close()
    for words in (
        "No lower tier is configured: what leaves host memory is gone.",
        "No client has connected yet.",
        "no lookup since the start",
        "None was missed.",
        "no client connected",
    ):
        assert words in page.text


def test_a_daemon_without_a_tenant_is_no_blank_page(tmp_path: Path) -> None:
    daemon = FakeDaemon({})
    daemon.state, daemon.reason = "starting", "the pool of tenant default is being opened"
    server = serve(daemon, "127.0.0.1", 0, TurningClock())
    try:
        page = browse(server, tmp_path, 3)
    finally:
        server.close()
    assert "▲ Not serving: starting the pool of tenant default is being opened" in page.text
    assert "No tenant is open yet." in page.text
