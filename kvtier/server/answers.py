"""What a daemon answers over HTTP, as requests in and responses out; no socket."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import logging
import math
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

from kvtier.clock import Clock, MonotonicClock
from kvtier.server.exposition import DaemonCollector
from kvtier.server.status import Watched, status_document

__all__ = ["KEPT_S", "LOG_PAUSE_S", "Answer", "Answers", "Asking"]

logger = logging.getLogger("kvtier.server")

KEPT_S = 0.25
"""An answer is given again to whoever asks so soon after: many watchers cost what one does."""
LOG_PAUSE_S = 60.0
"""Between two lines of the log that say that something could not be answered."""

JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The content security policy of what is no page."""
_REQUEST_LINE = re.compile(rb"([!-~]{1,32}) ([!-~]{1,4096}) HTTP/1\.[01]", re.ASCII)

Asking = Callable[[], "Answer"]
"""Finds an answer. It may take the daemon a second, so it is not for the thread of all connections; for one other."""


class Answer(NamedTuple):
    """A whole response. kind: its media type. headers: beyond those that all have. policy: what a browser may load
    and run of it."""

    status: str
    body: bytes
    kind: str = TEXT_TYPE
    headers: tuple[str, ...] = ()
    policy: str = NOTHING

    def encode(self) -> bytes:
        """As bytes of HTTP/1.1."""
        lines = (
            f"HTTP/1.1 {self.status}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            f"Content-Security-Policy: {self.policy}",
            "X-Content-Type-Options: nosniff",
            "X-Frame-Options: DENY",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            "Cross-Origin-Opener-Policy: same-origin",
            "Cache-Control: no-store",
            "Connection: close",
            *self.headers,
        )
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


def page_policy(page: bytes) -> str:
    """The content security policy of the page: its own script and style, by their hashes, and our answers."""

    def hashes(kind: bytes) -> str:
        inline = re.findall(b"<" + kind + b">(.*?)</" + kind + b">", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inline)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return f"{NOTHING}; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self'; img-src data:"


class Answers:
    """Requests in, responses out.

    is_local: the address is a loopback one. Then a request must name an address or localhost as its host: a name is
    what a page from elsewhere would use that had its name point here, to read with the operator's browser.

    Mutable state: what was answered lately, of the thread on which every `Asking` is called.
    """

    def __init__(self, daemon: Watched, *, is_local: bool, clock: Clock | None = None) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

        self._daemon = daemon
        self._is_local = is_local
        self._clock = clock or MonotonicClock()
        self._silent_until = -math.inf
        page = files("kvtier.server").joinpath("page.html").read_bytes()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(DaemonCollector(daemon))
        ProcessCollector(registry=registry)
        self._page = Answer("200 OK", page, "text/html; charset=utf-8", policy=page_policy(page))
        self._why_not = self._guarded("/healthz", self._unready)
        self._status = self._kept("/status.json", lambda: _json("200 OK", status_document(daemon.snapshot())))
        self._metrics = self._kept("/metrics", lambda: Answer("200 OK", generate_latest(registry), CONTENT_TYPE_LATEST))

    def find(self, head: bytes) -> Answer | Asking:
        """The answer to a request's line and headers, or how to find it: always the same object for the same question,
        and it does not raise. Never has anything of what the request says."""
        line, *headers = head.split(b"\r\n")
        request = _REQUEST_LINE.fullmatch(line)
        if request is None:
            return Answer("400 Bad Request", b"this is HTTP/1.1: send GET /healthz HTTP/1.1\n")
        method, path = request.groups()
        if not self._is_meant_for_us([each for each in headers if each[:5].lower() == b"host:"]):
            return Answer(
                "421 Misdirected Request", b"ask by address, or as localhost: this listens on loopback only\n"
            )
        route = self._route(path)
        if route is None:
            return Answer("404 Not Found", b"there are /, /status.json, /metrics and /healthz\n")
        if method != b"GET":
            return Answer("405 Method Not Allowed", b"GET only\n", headers=("Allow: GET",))
        return route

    def _route(self, path: bytes) -> Answer | Asking | None:
        match path:
            case b"/":
                return self._page
            case b"/healthz":
                return _json("200 OK", {"ready": True}) if self._daemon.is_ready else self._why_not
            case b"/status.json":
                return self._status
            case b"/metrics":
                return self._metrics
        return None

    def _is_meant_for_us(self, hosts: list[bytes]) -> bool:
        if len(hosts) > 1:
            return False
        if not hosts or not self._is_local:
            return True
        name = re.sub(r":\d*$", "", hosts[0][5:].decode("latin-1").strip()).strip("[]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost"
        return True

    def _unready(self) -> Answer:
        snapshot = self._daemon.snapshot()
        reason = snapshot.reason or snapshot.state
        return _json("503 Service Unavailable", {"ready": False, "state": snapshot.state, "reason": reason})

    def _kept(self, path: str, make: Asking) -> Asking:
        """As `make`, of which an answer is given again for a moment."""
        guarded = self._guarded(path, make)
        kept: tuple[float, Answer] | None = None

        def answer() -> Answer:
            nonlocal kept
            now = self._clock.now()
            if kept is None or now - kept[0] >= KEPT_S:
                kept = now, guarded()
            return kept[1]

        return answer

    def _guarded(self, path: str, make: Asking) -> Asking:
        """As `make`, of which an exception becomes an answer."""

        def answer() -> Answer:
            try:
                return make()
            except Exception:  # whoever watches must learn that it failed, not wait
                now = self._clock.now()
                if now >= self._silent_until:
                    self._silent_until = now + LOG_PAUSE_S
                    logger.exception("http: %s could not be answered", path)
                return Answer("500 Internal Server Error", b"it could not be answered: the daemon's log says why\n")

        return answer


def _json(status: str, document: dict[str, Any]) -> Answer:
    return Answer(status, json.dumps(document, allow_nan=False).encode() + b"\n", JSON_TYPE)
