"""Which server has a key, and how that is found out: one server, what Sentinels name, or a cluster's slots."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.config.settings import RedisSettings
from kvtier.errors import TierError
from kvtier.tiers.redis.address import DEFAULT_PORT, SENTINEL_PORT, Address, parse_address
from kvtier.tiers.redis.channel import Channel, ChannelError, LostError
from kvtier.tiers.redis.opening import DeniedError, Opener
from kvtier.tiers.redis.replies import COMMANDS, Meaning, Redirect, hint, meaning
from kvtier.tiers.redis.resp import ErrorReply, Reply, encode

__all__ = ["NUM_SLOTS", "Router", "Routes", "WrongModeError"]

NUM_SLOTS = 1 << 14
NO_MASTER = -1


class WrongModeError(TierError):
    """The servers are not what redis.mode says."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The masters, and which of them has a slot."""

    masters: tuple[Address, ...]
    masters_by_slot: tuple[int, ...] | None
    """Positions in `masters`, NO_MASTER where a slot has none; None: one master has all."""

    def master_of(self, slot: int) -> Address | None:
        number = 0 if self.masters_by_slot is None else self.masters_by_slot[slot]
        return None if number == NO_MASTER else self.masters[number]

    def moved(self, slot: int, address: Address) -> Routes:
        """As these, but that a slot has moved."""
        if self.masters_by_slot is None:
            return self
        masters = self.masters if address in self.masters else (*self.masters, address)
        by_slot = [*self.masters_by_slot]
        by_slot[slot] = masters.index(address)
        return Routes(masters, tuple(by_slot))


class Finder(ABC):
    """Finds routes, by asking servers. No state; any thread."""

    @abstractmethod
    def find(self, known: Sequence[Address], deadline: float) -> Routes:
        """known: masters of the routes before. Raises a ChannelError, or WrongModeError."""


class StandaloneFinder(Finder):
    """There is nothing to ask."""

    def __init__(self, address: Address) -> None:
        self._routes = Routes((address,), None)

    def find(self, known: Sequence[Address], deadline: float) -> Routes:
        del known, deadline
        return self._routes


class AskingFinder(Finder):
    """Asks one server after the other until one knows; each gets an equal share of the time that is left."""

    def __init__(self, seeds: Sequence[Address], opener: Opener, clock: Clock) -> None:
        self._seeds = tuple(seeds)
        self._opener = opener
        self._clock = clock

    def _ask_each(self, addresses: Sequence[Address], deadline: float, *, authenticate: bool) -> Routes:
        failures: list[Exception] = []
        for number, address in enumerate(addresses):
            now = self._clock.now()
            share = now + (deadline - now) / (len(addresses) - number)
            try:
                channel = self._opener.open(address, share, authenticate=authenticate)
                try:
                    return self._ask(channel)
                finally:
                    channel.close()
            except (ChannelError, WrongModeError) as error:
                failures.append(error)
        for kind in (WrongModeError, DeniedError):  # what a person must mend, before what may pass
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure
        raise failures[-1]

    @abstractmethod
    def _ask(self, channel: Channel) -> Routes:
        """Raises a ChannelError where the server does not know."""


class SentinelFinder(AskingFinder):
    """The master that Sentinels name."""

    def __init__(self, seeds: Sequence[Address], service: str, opener: Opener, clock: Clock) -> None:
        super().__init__(seeds, opener, clock)
        self._service = service

    def find(self, known: Sequence[Address], deadline: float) -> Routes:
        del known  # a master does not know whether it still is the one
        return self._ask_each(self._seeds, deadline, authenticate=False)

    def _ask(self, channel: Channel) -> Routes:
        reply = self._master(channel)
        if isinstance(reply, ErrorReply) and meaning(reply) is Meaning.DENIED:
            self._opener.authenticate(channel)  # Sentinels have passwords of their own, or none; mostly none
            reply = self._master(channel)
        if isinstance(reply, ErrorReply) and reply.text.lower().startswith("err unknown command"):
            raise WrongModeError(
                f"{channel.address} is no Sentinel: redis.url must name the Sentinels where redis.mode = 'sentinel'"
            )
        if isinstance(reply, ErrorReply):
            raise LostError(f"Sentinel {channel.address} answered {reply.code}; {hint(reply) or 'see its log'}")
        if reply is None:
            raise LostError(
                f"Sentinel {channel.address} watches no master of the name redis.service = {self._service!r}"
            )
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit() and host:
                return Routes((Address(host.decode("utf-8", "replace"), int(port)),), None)
        raise LostError(f"Sentinel {channel.address} named no address")

    def _master(self, channel: Channel) -> Reply:
        channel.send([encode("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)], 1)
        return channel.read_reply()


class ClusterFinder(AskingFinder):
    """The slots of a cluster, as any of its nodes tells them."""

    def find(self, known: Sequence[Address], deadline: float) -> Routes:
        return self._ask_each([*dict.fromkeys([*known, *self._seeds])], deadline, authenticate=True)

    def _ask(self, channel: Channel) -> Routes:
        channel.send([encode("CLUSTER", "SLOTS")], 1)
        reply = channel.read_reply()
        if isinstance(reply, ErrorReply) and "cluster support disabled" in reply.text:
            raise WrongModeError(
                f"{channel.address} is no node of a cluster: set redis.mode to 'standalone' or 'sentinel'"
            )
        if isinstance(reply, ErrorReply):
            raise LostError(
                f"{channel.address} answered {reply.code} to CLUSTER SLOTS; {hint(reply) or f'kvtier needs {COMMANDS}'}"
            )
        routes = _parse_slots(reply, channel.address)
        if not routes.masters:
            raise LostError(f"{channel.address} knows no slots: its cluster is not formed yet")
        return routes


def _parse_slots(reply: Reply, asked: Address) -> Routes:
    masters: dict[Address, int] = {}
    by_slot = [NO_MASTER] * NUM_SLOTS
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < NUM_SLOTS:
                # A node that does not know its own name is the one that was asked.
                name = host.decode("utf-8", "replace") if isinstance(host, bytes) and host not in (b"", b"?") else ""
                number = masters.setdefault(Address(name or asked.host, port), len(masters))
                by_slot[first : last + 1] = [number] * (last + 1 - first)
            case _:
                raise LostError(f"{asked} told slots that cannot be read")
    return Routes(tuple(masters), tuple(by_slot))


class Router:
    """The routes as last heard. Any thread; the lock is never held while a server is asked.

    Mutable state: `_routes`, `_is_doubtful` and `_num_redirects`, guarded by `_lock`. Several threads may ask at once;
    the last answer stays.
    """

    def __init__(
        self, settings: RedisSettings, opener: Opener, clock: Clock, on_found: Callable[[Routes], None]
    ) -> None:
        """on_found: called with routes that were asked for, without the lock."""
        self._mode = settings.mode
        self._finder = _finder(settings, opener, clock)
        self._on_found = on_found
        self._lock = threading.Lock()
        self._routes: Routes | None = None
        self._is_doubtful = False
        self._num_redirects = 0

    @property
    def current(self) -> Routes | None:
        """From memory."""
        return self._routes

    @property
    def is_clustered(self) -> bool:
        """Whether one server's word is good for where another has a key."""
        return self._mode == "cluster"

    @property
    def num_redirects(self) -> int:
        return self._num_redirects

    def routes(self, deadline: float) -> Routes:
        """As known, or asked for where they are not, or in doubt. Raises what `Finder.find` does."""
        routes = self._routes
        return self.find(deadline) if routes is None or self._is_doubtful else routes

    def find(self, deadline: float) -> Routes:
        """Ask now."""
        known = self._routes
        routes = self._finder.find(known.masters if known is not None else (), deadline)
        with self._lock:
            self._routes = routes
            self._is_doubtful = False
        self._on_found(routes)
        return routes

    def doubt(self) -> None:
        """A master did not do as one: ask before the next call."""
        with self._lock:
            self._is_doubtful = True

    def follow(self, redirect: Redirect) -> None:
        """A node has said where a key is."""
        with self._lock:
            self._num_redirects += 1
            if redirect.asking or self._routes is None:
                return
            if redirect.address not in self._routes.masters:
                self._is_doubtful = True  # a node that is new; there may be more to know
            self._routes = self._routes.moved(redirect.slot, redirect.address)


def _finder(settings: RedisSettings, opener: Opener, clock: Clock) -> Finder:
    default_port = SENTINEL_PORT if settings.mode == "sentinel" else DEFAULT_PORT
    addresses = [parse_address(url, default_port) for url in settings.url]
    if settings.mode == "sentinel":
        return SentinelFinder(addresses, settings.service, opener, clock)
    if settings.mode == "cluster":
        return ClusterFinder(addresses, opener, clock)
    return StandaloneFinder(addresses[0])
