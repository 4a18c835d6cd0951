"""The daemon: tenants' stores opened, served to whoever may use them, drained and closed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Self

from kvtier import __version__
from kvtier.clock import Clock, MonotonicClock
from kvtier.config import MemorySnapshot, Settings
from kvtier.config.serving import split_address
from kvtier.config.supervisor import Supervisor
from kvtier.errors import ClosedError, KVTierError
from kvtier.protocol.messages import FailureCode
from kvtier.server.admin import AdminServer
from kvtier.server.gate import Gate
from kvtier.server.http import serve as serve_http
from kvtier.server.hub import POLL_S, Hub
from kvtier.server.listening import UnixSocket, listen_tcp, tls_context
from kvtier.server.notify import Notifier
from kvtier.server.opening import close_tenants, credentials_of, flush_tenants, open_tenants, plan_tenants
from kvtier.server.reloading import apply_settings
from kvtier.server.status import DaemonSnapshot, State, tenant_snapshot
from kvtier.server.tenants import Tenant, Tenants

__all__ = ["Daemon"]

logger = logging.getLogger("kvtier.server")

SWEEP_S = 0.5
LOOP_TIMEOUT_S = 10.0
"""For the loop's answer to another thread."""
SAY_CLOSING_S = 1.0
"""For clients to read that the daemon closes."""
CLOSE_S = 5.0
"""For threads and tiers to end, after what `daemon.drain_s` allows."""
START_TIMEOUT_S = 300.0


class Daemon:
    """Serves the stores of its tenants, from `run`'s start to the end that `stop` asks for.

    `run` is for a process of its own: on its main thread it takes SIGTERM and SIGINT (drain, then return; the second
    one ends the process at once) and SIGHUP (read the settings again). As a context manager it runs on a thread of its
    own, takes no signal, and is ready when the block begins. `stop`, `reload`, `snapshot` and the properties may be
    called from any thread.

    Mutable state: the loop's thread's, but for `_state`, which any thread may read.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[], Settings] | None = None,
        memory: MemorySnapshot | None = None,
        supervisor: Supervisor | None = None,
        clock: Clock | None = None,
        touch: bool = True,
    ) -> None:
        """Raises ConfigError for settings that no daemon can have here; opens nothing yet.

        load: the settings as they are now, for `reload`. supervisor: who is told how the daemon is. touch: whether the
        pools' pages are made ahead.
        """
        settings.daemon.check()
        self._settings = settings
        self._load = load
        self._memory = memory or MemorySnapshot.read()
        self._plans = plan_tenants(settings, self._memory)
        self._tls = tls_context(settings.daemon) if settings.daemon.listen != "off" else None
        self._notifier = Notifier(supervisor or Supervisor())
        self._clock = clock or MonotonicClock()
        self._touch = touch
        self._began_at = self._clock.now()
        self._state: State = "starting"
        self._tenants: Sequence[Tenant] = ()
        self._sockets: list[UnixSocket] = []
        self._hub: Hub | None = None
        self._gate: Gate | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_woken = False
        self._wants_stop = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.tcp_address: tuple[str, int] | None = None
        """Where it listens for other machines, once it does; the port is found where 0 was asked for."""
        self.http_address: tuple[str, int] | None = None
        """Where metrics and the status page are, once they are."""

    # ---- for whoever watches

    @property
    def settings(self) -> Settings:
        """In effect now."""
        return self._settings

    @property
    def is_ready(self) -> bool:
        """Whether clients are served: pools and tiers are open, and it is not draining."""
        return self._state == "serving"

    @property
    def tenants(self) -> Sequence[Tenant]:
        return self._tenants

    def snapshot(self) -> DaemonSnapshot:
        """One moment: counts, and no setting or credential."""
        hub = self._hub
        reason = {
            "starting": "the stores are being opened",
            "draining": "it was told to stop, and finishes what was asked for",
            "closed": "it has ended",
        }.get(self._state, "")
        tenants = []
        for tenant in self._tenants:
            with suppress(ClosedError):
                clients = hub.client_counts(tenant.name) if hub else None
                kept = hub.quarantine.counts(tenant.name) if hub else None
                tenants.append(tenant_snapshot(tenant.name, tenant.store, clients, kept))
        return DaemonSnapshot(
            state=self._state,
            reason=reason,
            version=__version__,
            uptime_s=self._clock.now() - self._began_at,
            max_clients=self._settings.daemon.max_clients,
            tenants=tenants,
            refused=hub.refused if hub else {},
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError where connections and quarantine disagree with what they hold. Not on the loop's
        thread; waits for it, and raises TimeoutError where it does not answer within LOOP_TIMEOUT_S."""
        hub, loop = self._hub, self._loop
        if hub is None or loop is None or loop.is_closed():
            return
        answer: Future[None] = Future()

        def check() -> None:
            try:
                hub.check_integrity(stores=False)
            except Exception as error:  # noqa: BLE001 - raised on the thread that asked
                answer.set_exception(error)
            else:
                answer.set_result(None)

        with suppress(RuntimeError):  # it has just closed
            loop.call_soon_threadsafe(check)
            answer.result(LOOP_TIMEOUT_S)

    # ---- its life

    def stop(self) -> None:
        """Ask it to drain and end. Returns at once; idempotent."""
        self._wants_stop = True
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(stopping.set)

    def reload(self) -> None:
        """Read the settings again; see `apply_settings`. Returns at once; what is wrong is logged."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._reload)

    def run(self) -> None:
        """Serve until told to stop, then drain.

        Raises ConfigError for what cannot be opened or listened on; on the main thread SystemExit too, where SIGTERM
        comes while it starts.
        """
        try:
            with ExitStack() as stack:
                self._heed_signals(stack)
                self._run(stack)
        finally:
            self._state = "closed"
            self._ended.set()

    def start(self) -> None:
        """Run on a thread of its own. Returns when it is ready; raises what kept it from that."""
        self._thread = threading.Thread(target=self._run_in_thread, name="kvtier-server", daemon=True)
        self._thread.start()
        self._ready.wait(START_TIMEOUT_S)
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self) -> None:
        """Stop, and wait for the end: `daemon.drain_s` and some seconds at most. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(self._settings.daemon.drain_s + 2 * CLOSE_S + SAY_CLOSING_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException as error:  # raised by whoever waits for the start
            self._error = error
            if self._ready.is_set():
                logger.exception("the server ended")
        self._ready.set()

    def _run(self, stack: ExitStack) -> None:
        """Take what is only ever one's, open, serve; close in the opposite order."""
        daemon = self._settings.daemon
        if daemon.socket != "off":
            self._sockets.append(UnixSocket(daemon.socket, "daemon.socket", daemon.socket_group))
            stack.callback(self._sockets[-1].close)
        tcp = None
        if daemon.listen != "off":
            tcp = listen_tcp(daemon.listen)
            stack.callback(tcp.close)
            self.tcp_address = tcp.getsockname()[:2]
        if daemon.http != "off":
            http = serve_http(self, *split_address(daemon.http))
            stack.callback(http.close)
            self.http_address = http.address
        admin = AdminServer(self, daemon.admin_path) if daemon.admin_path != "off" else None
        if admin is not None:
            stack.callback(admin.close)
        self._tenants = open_tenants(self._plans, checksums=daemon.checksums, memory=self._memory, clock=self._clock)
        stack.callback(close_tenants, self._tenants, CLOSE_S)
        if admin is not None:
            stack.callback(admin.close)  # before the stores
        loop = self._loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        loop.run_until_complete(self._serve(loop, tcp))

    async def _serve(self, loop: asyncio.AbstractEventLoop, tcp: socket.socket | None) -> None:
        daemon = self._settings.daemon
        self._stopping = asyncio.Event()
        hub = self._hub = Hub(Tenants(self._tenants, credentials_of(self._settings)), daemon, self._clock, self._wake)
        gate = self._gate = Gate(hub, self._clock, self._tls)
        try:
            for each in self._sockets:
                gate.listen_unix(each.sock)
            if tcp is not None:
                gate.listen_tcp(tcp)
            self._take_signals(loop)
            tasks = [
                loop.create_task(self._every(POLL_S, self._poll)),
                loop.create_task(self._every(min(SWEEP_S, daemon.client_timeout_s / 4), gate.sweep)),
            ]
            if (period := self._notifier.watchdog_period_s) is not None:
                tasks.append(loop.create_task(self._every(period, self._notifier.alive)))
            self._tell_ready()
            if self._wants_stop:
                self._stopping.set()
            await self._stopping.wait()
            await self._drain(hub, gate)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            gate.close_listeners()
            hub.close()

    def _tell_ready(self) -> None:
        self._state = "serving"
        places = [str(each.path) for each in self._sockets]
        if self.tcp_address is not None:
            places.append(f"{self.tcp_address[0]}:{self.tcp_address[1]}")
        took_s = self._clock.now() - self._began_at
        names = ", ".join(tenant.name for tenant in self._tenants)
        logger.info("ready after %.3f s: listening on %s, for %s", took_s, " and ".join(places), names)
        self._notifier.ready(f"serving {names} on {' and '.join(places)}")
        self._ready.set()
        if self._touch:
            for tenant in self._tenants:
                tenant.store.start_touching()

    async def _drain(self, hub: Hub, gate: Gate) -> None:
        """Take no more, answer what was asked, write what is due, say goodbye: all within `daemon.drain_s`."""
        self._state = "draining"
        self._notifier.stopping()
        drain_s = self._settings.daemon.drain_s
        deadline = time.monotonic() + drain_s
        logger.info("stopping: up to %g s for %d connections and what is not written yet", drain_s, hub.num_sessions)
        gate.close_listeners()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "kvtier-drains") as threads:
            flushing = loop.run_in_executor(threads, flush_tenants, self._tenants, drain_s)
            while (hub.has_requests or gate.has_backlog) and time.monotonic() < deadline:
                hub.poll()
                await asyncio.sleep(0.01)
            gate.fail_all(FailureCode.CLOSING, "the server is stopping; connect again once it is back")
            await gate.close(min(SAY_CLOSING_S, max(0.1, deadline - time.monotonic())))
            await flushing
            # Once more: requests that were answered meanwhile may have stored blocks.
            left_s = max(0.0, deadline - time.monotonic())
            unwritten = await loop.run_in_executor(threads, flush_tenants, self._tenants, left_s)
        if unwritten:
            logger.warning(
                "%d blocks were not written to a lower tier within daemon.drain_s = %g s, and are lost; raise it where "
                "they matter",
                unwritten,
                drain_s,
            )

    # ---- on the loop

    async def _every(self, period_s: float, call: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                call()
            except Exception:  # the others go on
                logger.exception("the server's housekeeping failed")

    def _wake(self) -> None:
        """Any thread: have `poll` called soon. Many calls come to one."""
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._poll)

    def _poll(self) -> None:
        self._is_woken = False
        if self._hub is not None:
            self._hub.poll()

    def _reload(self) -> None:
        if self._load is None or self._hub is None or self._gate is None:
            logger.warning("settings are not read again: this daemon was given them by a program")
            return
        self._notifier.reloading()
        try:
            self._settings = apply_settings(self._settings, self._load(), self._hub, self._gate, self._tenants)
        except KVTierError as error:
            logger.error("settings were not read again, and stay as they are: %s", error)  # noqa: TRY400 - a caller's mistake
        self._notifier.ready("serving")

    @staticmethod
    def _heed_signals(stack: ExitStack) -> None:
        """Until the loop takes them: the first process of a container gets none that nobody takes."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_by, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _end_by(self, number: signal.Signals) -> None:
        assert self._stopping is not None
        if not self._stopping.is_set():
            self._stopping.set()
            return
        logger.warning("%s for the second time: ending at once", number.name)
        for each in self._sockets:
            each.unlink()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
