"""What listeners believe one tier to hold, and what they must be told to believe what is true."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from kvtier.keys import NAMESPACE_BYTES, BlockDigest, Key

__all__ = ["Changes", "Held", "Listing", "TierEvents", "chains"]

MAX_WAITING = 1 << 17
"""Blocks of which something was heard and not yet told: about 30 MiB."""
MAX_TOLD = 1 << 20
"""Blocks that listeners know of a tier: about 250 MiB where it holds so many."""
STRETCH = 1024  # blocks that the tier is asked for at once: it may hold a lock meanwhile

Held = Callable[[bytes, Sequence[BlockDigest]], list[bool]]
"""Which blocks of a namespace digest the tier holds now."""
Listing = Callable[[bytes], Sequence[tuple[Key, Key | None]]]
"""Every block of a namespace digest that the tier holds, with parents where known."""

_UNKNOWN = BlockDigest(b"")  # in place of a parent: it was not said


class HasDigest(Protocol):
    """Whose blocks are followed: a space."""

    @property
    def digest(self) -> bytes: ...


class Changes(NamedTuple):
    """What listeners must be told, in this order."""

    gone: list[BlockDigest]
    stored: list[tuple[BlockDigest, BlockDigest | None]]
    """With parents, prefix before tail."""


class TierEvents:
    """Follows one namespace's blocks in one tier. Whoever applies all changes in order ends with what the tier holds.

    What was heard only says where to look: callbacks of several threads may come in another order than what they tell.
    So a block that was heard of is looked up when changes are drained, and told if listeners believe otherwise; one
    that came and went in between is told of in no way. The callbacks must follow what they tell.

    When more than MAX_WAITING blocks wait to be told, which are heard of is forgotten, and everything that listeners
    know, or that the tier lists, is looked up instead. It is not told as cleared: such an event names no medium, so
    that listeners would forget other tiers' blocks and those on the GPU. Of a tier that cannot list, what was stored in
    that time stays untold. Of more than MAX_TOLD blocks those that were told first are told as gone.

    Mutable state: `_touched` and `_must_look_at_all`, guarded by `_lock`, for any thread; the rest is the draining
    thread's.
    """

    def __init__(
        self,
        space: HasDigest,
        held: Held,
        listing: Listing | None = None,
        *,
        on_change: Callable[[], None] = lambda: None,
        max_waiting: int = MAX_WAITING,
        max_told: int = MAX_TOLD,
    ) -> None:
        """held, listing: ask the tier. What it lists is told with the first changes. on_change: called when there is
        something to drain, on any thread; quick, and does not raise."""
        self._space = space
        self._held = held
        self._listing = listing
        self._on_change = on_change
        self._max_waiting = max_waiting
        self._max_told = max_told
        self._epoch = space.digest
        self._lock = threading.Lock()
        self._touched: dict[BlockDigest, BlockDigest | None] = {}
        self._must_look_at_all = listing is not None
        self._told: dict[BlockDigest, BlockDigest | None] = {}
        self._leaving: deque[BlockDigest] = deque()
        """Of an epoch that is over; told as gone before anything else is told."""
        self._backlog: deque[tuple[BlockDigest, BlockDigest | None]] = deque()
        """To be looked up though nothing was heard of it."""
        self._retold: deque[BlockDigest] = deque()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def note_stored(self, blocks: Sequence[tuple[Key, Key | None]]) -> None:
        """These are in the tier by now; with their parents. Quick, and never raises."""
        epoch = self._space.digest
        own = [
            (key[NAMESPACE_BYTES:], None if parent is None else parent[NAMESPACE_BYTES:])
            for key, parent in blocks
            if key.startswith(epoch)
        ]
        if own:
            with self._lock:
                for digest, parent in own:
                    self._touched.pop(BlockDigest(digest), None)  # to the end: prefixes are stored before their tails
                    self._touched[BlockDigest(digest)] = None if parent is None else BlockDigest(parent)
                self._bound()
            self._on_change()

    def note_gone(self, keys: Sequence[Key]) -> None:
        """These are in the tier no more. Quick, and never raises."""
        epoch = self._space.digest
        own = [BlockDigest(key[NAMESPACE_BYTES:]) for key in keys if key.startswith(epoch)]
        if own:
            with self._lock:
                for digest in own:
                    self._touched.setdefault(digest, _UNKNOWN)
                self._bound()
            self._on_change()

    def _bound(self) -> None:
        if len(self._touched) > self._max_waiting:
            self._touched.clear()
            self._must_look_at_all = True

    # ---- the draining thread -------------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to look up or to tell, a reset included."""
        return bool(
            self._touched
            or self._must_look_at_all
            or self._leaving
            or self._backlog
            or self._retold
            or self._epoch != self._space.digest
        )

    def retell(self) -> None:
        """Tell everything again with the next changes, for listeners that lost what they knew. Others hear of blocks
        that they know."""
        self._retold = deque(self._told)

    def end(self) -> None:
        """The tier is no more: it holds nothing, and all of it will be told as gone. End its callbacks before."""
        self._held = lambda _, digests: [False] * len(digests)
        self._listing = None
        self._leaving += self._told
        self._told.clear()

    def drain(self, limit: int | None = None) -> Changes:
        """What has changed, at most `limit` blocks looked at; `has_changes` says whether there is more. Asks the tier,
        and may raise what that raises: then nothing is told, and everything is looked up the next time."""
        self._note_reset()
        gone = list(islice(self._leaving, limit))
        stored: dict[BlockDigest, BlockDigest | None] = {}
        if len(gone) == len(self._leaving):
            stored = self._look(None if limit is None else limit - len(gone), gone)
        for _ in range(min(len(gone), len(self._leaving))):
            self._leaving.popleft()
        return Changes(gone, _prefix_first(stored))

    def _look(self, room: int | None, gone: list[BlockDigest]) -> dict[BlockDigest, BlockDigest | None]:
        """Look up the next blocks: extends `gone`, and returns what is to be told as stored."""
        candidates = self._take_touched(room)
        if self._space.digest != self._epoch:  # they may be of the next one
            self._put_back(candidates)
            return {}
        try:
            self._add_backlog(candidates, room)
            held = self._which_held(list(candidates))
        except BaseException:
            self._put_back(candidates)
            self._must_look_at_all = True
            raise
        stored: dict[BlockDigest, BlockDigest | None] = {}
        for digest, parent in candidates.items():
            if digest not in held:
                if digest in self._told:
                    del self._told[digest]
                    gone.append(digest)
            elif digest not in self._told and parent != _UNKNOWN:  # else its own callback is yet to come
                self._told[digest] = stored[digest] = parent
        if len(self._told) > self._max_told:
            gone += self._forget_oldest(stored)
        room = len(self._retold) if room is None else max(0, room - len(candidates))
        for digest in [self._retold.popleft() for _ in range(min(room, len(self._retold)))]:
            if digest in self._told:
                stored.setdefault(digest, self._told[digest])
        return stored

    def _note_reset(self) -> None:
        epoch = self._space.digest
        if epoch != self._epoch:
            self._epoch = epoch
            self._leaving += self._told
            self._told.clear()
            self._backlog.clear()
            self._retold.clear()

    def _take_touched(self, room: int | None) -> dict[BlockDigest, BlockDigest | None]:
        with self._lock:
            if room is not None and room < len(self._touched):
                return {digest: self._touched.pop(digest) for digest in list(islice(self._touched, room))}
            taken, self._touched = self._touched, {}
            return taken

    def _put_back(self, taken: Mapping[BlockDigest, BlockDigest | None]) -> None:
        with self._lock:
            for digest, parent in taken.items():
                if self._touched.get(digest, _UNKNOWN) == _UNKNOWN:
                    self._touched[digest] = parent
            self._bound()

    def _add_backlog(self, candidates: dict[BlockDigest, BlockDigest | None], room: int | None) -> None:
        with self._lock:
            must_look_at_all, self._must_look_at_all = self._must_look_at_all, False
        if must_look_at_all:
            self._backlog = deque((digest, _UNKNOWN) for digest in self._told)
            self._backlog.extend(self._listed())
        room = len(self._backlog) if room is None else room - len(candidates)
        for _ in range(min(room, len(self._backlog))):
            digest, parent = self._backlog.popleft()
            if candidates.get(digest, _UNKNOWN) == _UNKNOWN:
                candidates[digest] = parent

    def _listed(self) -> list[tuple[BlockDigest, BlockDigest | None]]:
        if self._listing is None:
            return []
        listed = self._listing(self._epoch)
        parents = {
            BlockDigest(key[NAMESPACE_BYTES:]): None if parent is None else BlockDigest(parent[NAMESPACE_BYTES:])
            for key, parent in listed
        }
        return _prefix_first(parents)

    def _which_held(self, digests: Sequence[BlockDigest]) -> set[BlockDigest]:
        held: set[BlockDigest] = set()
        for start in range(0, len(digests), STRETCH):
            part = digests[start : start + STRETCH]
            answers = self._held(self._epoch, part)
            held.update(digest for digest, is_held in zip(part, answers, strict=True) if is_held)
        return held

    def _forget_oldest(self, stored: dict[BlockDigest, BlockDigest | None]) -> list[BlockDigest]:
        """What was told first, in lots: to find the oldest passes by all that went before. What would only be told with
        these changes is taken from `stored` instead."""
        excess = len(self._told) - self._max_told + self._max_told // 16
        oldest = list(islice(self._told, excess))
        for digest in oldest:
            del self._told[digest]
        return [digest for digest in oldest if stored.pop(digest, _UNKNOWN) == _UNKNOWN]


def chains(
    stored: Sequence[tuple[BlockDigest, BlockDigest | None]],
) -> Iterator[tuple[BlockDigest | None, list[BlockDigest]]]:
    """Runs of blocks each of which continues the one before: the first one's parent, and the run."""
    run: list[BlockDigest] = []
    above: BlockDigest | None = None
    for digest, parent in stored:
        if run and parent == run[-1]:
            run.append(digest)
            continue
        if run:
            yield above, run
        above, run = parent, [digest]
    if run:
        yield above, run


def _prefix_first(parents: Mapping[BlockDigest, BlockDigest | None]) -> list[tuple[BlockDigest, BlockDigest | None]]:
    """In their order, but for blocks whose parent stands behind them."""
    ordered: list[tuple[BlockDigest, BlockDigest | None]] = []
    placed: set[BlockDigest] = set()
    for digest in parents:
        chain: list[BlockDigest] = []
        at: BlockDigest | None = digest
        while at is not None and at in parents and at not in placed:
            placed.add(at)
            chain.append(at)
            at = parents[at]
        ordered += [(each, parents[each]) for each in reversed(chain)]
    return ordered
