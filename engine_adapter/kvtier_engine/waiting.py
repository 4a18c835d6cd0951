"""The requests that wait to be admitted, in the order in which they are considered."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import islice, pairwise

from kvtier.errors import IntegrityError
from kvtier_engine.request import Request

__all__ = ["WaitingQueue"]

FRONT = 32
"""Ready requests that one step looks at, so that a step does not grow with the queue."""

Entry = tuple[int, int, Request]
"""Priority, arrival, request. Arrivals are unique, so requests are never compared."""


class WaitingQueue:
    """Two ordered lists: requests that may be admitted now (*ready*), and those whose blocks are on their way to host
    memory (*staging*). Both keep the order of arrival, under the priority policy within a priority; a request that was
    preempted arrived before those behind it, and so stands in front of them again.

    Engine's thread only. Joining and leaving cost a search by halves and one move of memory, whatever the length.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._ready: list[Entry] = []
        self._staging: list[Entry] = []
        self.front_version = 0
        """Changes whenever one of the first FRONT ready requests comes or goes."""
        self.num_ready_tokens = 0
        """Tokens of the ready: at most what is to be computed before a request that arrives now."""

    def __len__(self) -> int:
        return len(self._ready) + len(self._staging)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in merge(self._ready, self._staging))

    def __contains__(self, request: Request) -> bool:
        return self._find(self._ready, request) is not None or self._find(self._staging, request) is not None

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_staging(self) -> int:
        return len(self._staging)

    def is_staging(self, request: Request) -> bool:
        return self._find(self._staging, request) is not None

    def key(self, request: Request) -> tuple[int, int]:
        """What requests are ordered by: smaller goes first."""
        return (request.options.priority if self._by_priority else 0, request.arrival_index)

    def add(self, request: Request, *, staging: bool) -> None:
        entry = (*self.key(request), request)
        if staging:
            insort(self._staging, entry)
            return
        index = bisect_left(self._ready, entry)
        self._ready.insert(index, entry)
        self.front_version += index < FRONT
        self.num_ready_tokens += len(request.tokens)

    def discard(self, request: Request) -> None:
        """Take it out, wherever it stands."""
        index = self._find(self._ready, request)
        if index is not None:
            del self._ready[index]
            self.front_version += index < FRONT
            self.num_ready_tokens -= len(request.tokens)
            return
        index = self._find(self._staging, request)
        if index is not None:
            del self._staging[index]

    def make_ready(self, request: Request) -> None:
        """Its blocks came, or the wait for them is over."""
        self.discard(request)
        self.add(request, staging=False)

    def first_ready(self, count: int) -> Iterator[Request]:
        return (request for _, _, request in islice(self._ready, max(0, count)))

    def front(self) -> list[Request]:
        """The ready requests that a step looks at: the first, and a bounded number of others."""
        return [request for _, _, request in self._ready[:FRONT]]

    def check_integrity(self) -> None:
        """Raises IntegrityError when an order or the count of tokens is wrong. O(length): for tests."""
        for entries in (self._ready, self._staging):
            if any(entry[:2] != self.key(entry[2]) for entry in entries):
                raise IntegrityError("waiting: a request stands under another's place")
            if any(before[:2] >= after[:2] for before, after in pairwise(entries)):
                raise IntegrityError("waiting: the queue is out of order")
        if self.num_ready_tokens != sum(len(request.tokens) for _, _, request in self._ready):
            raise IntegrityError(f"waiting: {self.num_ready_tokens} tokens are counted ready, which are not")

    def _find(self, entries: list[Entry], request: Request) -> int | None:
        key = self.key(request)
        index = bisect_left(entries, key, key=lambda entry: entry[:2])
        return index if index < len(entries) and entries[index][2] is request else None
