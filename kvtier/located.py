"""Where a prompt's blocks are: which tier holds each, as far as any does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.executor import Executor
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.pool import Owner
from kvtier.tiers.base import Tier
from kvtier.tiers.host import HostTier

__all__ = ["Located", "Source", "is_known", "lease_held", "locate"]

FIRST_LOOK = 64
"""Blocks asked for first; each next time four times as many, so that a prompt of which nothing is here costs little."""


class Source(Protocol):
    """A lower tier as staging needs it: the tier, its threads, what it holds, and whether it can be asked now."""

    @property
    def name(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    @property
    def is_remote(self) -> bool:
        """Whether it must be asked to be known, by a `Question`."""

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Which blocks it holds, as far as is known. Pure and quick: the engine's thread asks."""

    def look(self, keys: Sequence[Key]) -> list[bool] | None:
        """Ask a remote one, and remember the answer; None where there is none. Blocks."""

    @property
    def asking(self) -> Executor:
        """For questions."""

    @property
    def executor(self) -> Executor: ...

    @property
    def is_available(self) -> bool:
        """Pure and quick: the engine's thread asks."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the leading blocks of a prompt were when it was looked up: what a stage can begin with.

    sources: for each the lower tier to read it from, or None: it is in host memory, or somebody copies it there.
    num_host: leading blocks that were in host memory. is_cut: the next one may be held too: a stage takes no more.
    """

    digests: Sequence[BlockDigest]
    sources: Sequence[Source | None]
    num_host: int
    is_cut: bool = False

    def first(self, count: int) -> Located:
        return Located(self.digests[:count], self.sources[:count], min(self.num_host, count))


def locate(
    host: HostTier,
    lower: Sequence[Source],
    namespace: bytes,
    digests: Sequence[BlockDigest],
    max_reads: int,
    max_leased: int | None = None,
    stuck: Collection[BlockDigest] = (),
) -> Located:
    """The leading blocks that some tier holds. Ends before more than `max_reads` would have to be read, and where any
    is, behind `max_leased` blocks. stuck: blocks on their way to host memory that will hardly come."""
    num_host = host.committed_run(namespace, digests)
    found: list[Source | None] = [None] * num_host
    step, num_reads, num_gone, is_full = FIRST_LOOK, 0, 0, False
    while not (is_full or num_gone) and (asked := digests[len(found) : len(found) + step]):
        here = _locate(host, lower, namespace, asked, stuck)
        for source in here:
            num_reads += source is not None
            is_over = max_leased is not None and len(found) >= max_leased
            is_full = num_reads > max_reads or (num_reads > 0 and is_over)
            if is_full:
                break
            found.append(source)
        num_gone = len(asked) - len(here)
        step *= 4
    return Located(digests[: len(found)], found, num_host, is_full)


def is_known(
    host: HostTier,
    lower: Sequence[Source],
    namespace: bytes,
    stuck: Collection[BlockDigest],
    digests: Sequence[BlockDigest],
) -> list[bool]:
    """Which blocks are in host memory, or on their way there and not stuck, or known to be in a lower tier."""
    known = [state is not None for state in _states(host, namespace, digests, stuck)]
    keys = [make_key(namespace, digest) for digest in digests]
    for source in lower:
        if source.is_available:
            known = [is_here or is_there for is_here, is_there in zip(known, source.held(keys), strict=True)]
    return known


def _states(
    host: HostTier, namespace: bytes, digests: Sequence[BlockDigest], stuck: Collection[BlockDigest]
) -> list[BlockState | None]:
    """As host memory says; None too for what is stuck on its way there."""
    states = host.states(namespace, digests)
    if not stuck:
        return states
    return [
        None if state is BlockState.RESERVED and digest in stuck else state
        for digest, state in zip(digests, states, strict=True)
    ]


def _locate(
    host: HostTier,
    lower: Sequence[Source],
    namespace: bytes,
    digests: Sequence[BlockDigest],
    stuck: Collection[BlockDigest],
) -> list[Source | None]:
    states = _states(host, namespace, digests, stuck)
    missing = [index for index, state in enumerate(states) if state is not BlockState.COMMITTED]
    holders: dict[int, Source] = {}
    for source in lower:
        unclaimed = [index for index in missing if index not in holders]
        if not unclaimed or not source.is_available:
            continue
        held = source.held([make_key(namespace, digests[index]) for index in unclaimed])
        holders |= {index: source for index, is_held in zip(unclaimed, held, strict=True) if is_held}
    gaps = (index for index in missing if states[index] is None and index not in holders)
    return [holders.get(index) for index in range(next(gaps, len(digests)))]


def lease_held(
    host: HostTier,
    namespace: bytes,
    digests: Sequence[BlockDigest],
    sources: Sequence[Source | None],
    owner: Owner,
) -> tuple[int, int]:
    """Lease what host memory holds of blocks that were located: how many leading ones it does, and how many blocks
    there are to be had: fewer than were located where one was evicted since."""
    num_leading = next(index for index, source in enumerate(sources) if source is not None)
    num_held = len(host.lease_run(namespace, digests[:num_leading], owner))
    rest = [index for index in range(num_held, len(sources)) if sources[index] is None]
    held = host.lease_blocks([(namespace, digests[index]) for index in rest], owner)
    gone = [index for index, block in zip(rest, held, strict=True) if block is None]
    states = host.states(namespace, [digests[index] for index in gone])
    evicted = (index for index, state in zip(gone, states, strict=True) if state is None)
    return num_held, next(evicted, len(sources))
