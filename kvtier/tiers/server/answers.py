"""Whether an answer fits its question: nothing that a server says is used before this. That it fits itself was looked
at as it was decoded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.protocol.messages import Committed, Reserved, ReserveOutcome, Staged, StageOutcome
from kvtier.tiers.server.connection import Connection

__all__ = ["Slot", "check_committed", "check_reserved", "check_staged"]


class Slot(NamedTuple):
    """place: of its block among those that were asked for. offset: of its first byte in the mapping, if there is one.
    checksum: of what should lie there, if it is known."""

    place: int
    handle: int
    offset: int
    checksum: int | None = None


def check_reserved(connection: Connection, answer: Reserved, num_blocks: int, block_bytes: int) -> list[Slot]:
    """The slots that were reserved, which are held from here on. Raises GarbledError."""
    _check_number(connection, answer.outcomes, num_blocks)
    places = [i for i, outcome in enumerate(answer.outcomes) if outcome == ReserveOutcome.RESERVED]
    _hold(connection, answer.reservations, answer.offsets, block_bytes)
    return [Slot(*each) for each in zip(places, answer.reservations, answer.offsets, strict=True)]


def check_committed(connection: Connection, answer: Committed, num_blocks: int) -> None:
    """Raises GarbledError."""
    _check_number(connection, answer.outcomes, num_blocks)


def check_staged(connection: Connection, answer: Staged, num_blocks: int, block_bytes: int) -> list[Slot]:
    """The slots that are leased, which are held from here on; of blocks that come as payload handles and offsets are 0.
    Raises GarbledError."""
    _check_number(connection, answer.outcomes, num_blocks)
    places = [i for i, outcome in enumerate(answer.outcomes) if outcome == StageOutcome.OK]
    leases: Sequence[int] = answer.leases
    offsets: Sequence[int] = answer.offsets
    if len(leases) != (0 if connection.mapping is None else len(places)):
        mapping = "no mapping" if connection.mapping is None else "a mapping"
        raise connection.garbled(f"{len(leases)} leases for {len(places)} blocks, and {mapping}")
    if connection.mapping is None:
        leases = offsets = [0] * len(places)
    else:
        _hold(connection, leases, offsets, block_bytes)
    checksums = answer.checksums if connection.welcome.checksums else [None] * len(places)
    return [Slot(*each) for each in zip(places, leases, offsets, checksums, strict=True)]


def _check_number(connection: Connection, outcomes: bytes, num_blocks: int) -> None:
    if len(outcomes) != num_blocks:
        raise connection.garbled(f"{len(outcomes)} outcomes for {num_blocks} blocks")


def _hold(connection: Connection, handles: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
    """Each slot within the mapping, none with a byte or a handle of another that is held."""
    extents = {handle: (start, start + block_bytes) for handle, start in zip(handles, offsets, strict=True)}
    if len(extents) != len(handles) or not connection.held.keys().isdisjoint(extents):
        raise connection.garbled("the same handle for two slots")
    if connection.mapping is not None and extents:
        ordered = sorted([*extents.values(), *connection.held.values()])
        if ordered[0][0] < 0 or ordered[-1][1] > connection.mapping.nbytes:
            raise connection.garbled(
                f"slots of {block_bytes} bytes from {ordered[0][0]} to {ordered[-1][1]}, in "
                f"{connection.mapping.nbytes} bytes"
            )
        if any(before[1] > after[0] for before, after in pairwise(ordered)):
            raise connection.garbled(f"two slots of {block_bytes} bytes that overlap")
    connection.held.update(extents)
