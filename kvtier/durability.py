"""Whether blocks are safe in a lower tier: told once none of them is on its way there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.keys import Key
from kvtier.reasons import DropReason
from kvtier.tickets import Ticket

__all__ = ["Durability", "DurabilityWatches"]


@dataclass(frozen=True, slots=True)
class Durability:
    """The answer: of so many blocks all are in the tier but `lost`; for each of these why not, None where nothing ever
    brought it on its way (it was not stored in host memory, or is not due)."""

    num_blocks: int
    lost: Mapping[Key, DropReason | None]

    @property
    def is_durable(self) -> bool:
        """Whether all of them are there."""
        return not self.lost


class _Watch(Ticket[Durability]):
    __slots__ = ("is_open", "lost", "num_blocks", "pending")

    def __init__(self, num_blocks: int, pending: set[Key]) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.pending = pending
        self.lost: dict[Key, DropReason | None] = {}
        self.is_open = True  # nobody has looked for the others yet


class DurabilityWatches:
    """Which blocks are on their way to a tier, and who waits for them.

    Mutable state: everything, guarded by `_lock`, a leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[Key] = Counter()
        self._watches: dict[Key, list[_Watch]] = {}
        self._is_closed = False

    def begin(self, keys: Iterable[Key]) -> None:
        """These are on their way."""
        with self._lock:
            self._under_way.update(keys)

    def end(self, key: Key, reason: DropReason | None) -> None:
        """It is there, or was dropped for that reason: `begin` was told of it."""
        with self._lock:
            self._under_way[key] -= 1
            if self._under_way[key]:
                return
            del self._under_way[key]
            for watch in self._watches.pop(key, ()):
                watch.pending.discard(key)
                if reason is not None:
                    watch.lost[key] = reason
                self._resolve(watch)

    def watch(
        self, keys: Sequence[Key], why_lost: Callable[[Sequence[Key]], Mapping[Key, DropReason | None]]
    ) -> Ticket[Durability]:
        """A ticket for these blocks. why_lost: of those that are not on their way, the ones that are not there; it is
        called after that was found, without the lock, so that one that arrives just now is seen by one of the two."""
        with self._lock:
            under_way = {key for key in keys if key in self._under_way}
            pending = set() if self._is_closed else under_way
            watch = _Watch(len(keys), set(pending))
            watch.lost.update(dict.fromkeys(under_way - pending, DropReason.CLOSED))
            for key in pending:
                self._watches.setdefault(key, []).append(watch)
        lost = why_lost([key for key in keys if key not in under_way])
        with self._lock:
            watch.lost.update(lost)
            watch.is_open = False
            self._resolve(watch)
        return watch

    def give_up(self, ticket: Ticket[Durability]) -> set[Key]:
        """Answer a ticket of `watch` now, and remember it no longer; the blocks that are still on their way, which are
        not among the lost."""
        assert isinstance(ticket, _Watch), "a ticket of another's"
        with self._lock:
            pending, ticket.pending = ticket.pending, set()
            for key in pending:
                waiting = [watch for watch in self._watches.pop(key, ()) if watch is not ticket]
                if waiting:
                    self._watches[key] = waiting
            self._resolve(ticket)
        return pending

    def close(self) -> None:
        """Nothing arrives any more: whatever is on its way is lost."""
        with self._lock:
            self._is_closed = True
            watches, self._watches = self._watches, {}
            for key, waiting in watches.items():
                for watch in waiting:
                    watch.pending.discard(key)
                    watch.lost[key] = DropReason.CLOSED
                    self._resolve(watch)

    @staticmethod
    def _resolve(watch: _Watch) -> None:
        if not (watch.pending or watch.is_open):
            watch.resolve(Durability(watch.num_blocks, watch.lost))
