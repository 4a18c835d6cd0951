"""Blocks on their way to the server: reserved, filled, committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.protocol.messages import Commit, CommitOutcome, Committed, FailureCode, Reserve, Reserved, ReserveOutcome
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.server.answers import Slot, check_committed, check_reserved
from kvtier.tiers.server.batches import Batch, digests_of, parents_of
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.copies import as_bytes, checksum, copy_in
from kvtier.tiers.server.failures import RefusedError

__all__ = ["Storing"]

_RESERVE_OUTCOMES = {
    ReserveOutcome.ALREADY_STORED: WriteOutcome.ALREADY_STORED,
    ReserveOutcome.BEING_STORED: WriteOutcome.FULL,
    ReserveOutcome.FULL: WriteOutcome.FULL,
}
_COMMIT_OUTCOMES = {CommitOutcome.STORED: WriteOutcome.STORED, CommitOutcome.VOID: WriteOutcome.WITHDRAWN}


SENT_BYTES = 8 << 20
"""Of blocks that one Commit sends, unless one block is longer."""


class _Filled(NamedTuple):
    """A commit that was not answered yet."""

    number: int
    positions: list[int]


class Storing:
    """One call's blocks, on one connection. `outcomes` is right for each block whatever `store` raises: those that it
    did not come to are ERROR."""

    def __init__(self, connection: Connection, requests: Sequence[WriteRequest]) -> None:
        self._connection = connection
        self._requests = requests
        self.outcomes = [WriteOutcome.ERROR] * len(requests)
        self._sums: dict[int, int] = {}  # by position, of blocks that were not copied yet
        self.being_stored: list[int] = []
        """Positions of blocks that others were storing when the server was last asked."""

    def store(self, batches: Sequence[Batch]) -> None:
        """Raises a ServerError. Then the connection is of no more use: what was reserved on it is given back as it
        closes, as nothing here writes to a slot any more."""
        self.being_stored = []
        if not batches:
            return
        ahead = self._connection.can_ask_ahead
        reserving = self._reserve(batches[0])
        self._sum_up(batches[0])
        filled: _Filled | None = None
        for i, batch in enumerate(batches):
            slots = self._reserved(batch, reserving)
            following = batches[i + 1] if i + 1 < len(batches) else None
            if following is not None and ahead:
                reserving = self._reserve(following)
            # Where a Reserve is said soon it takes the Commit along.
            later = ahead and i + 2 < len(batches) and self._connection.mapping is not None
            for part in self._parts(batch, slots):
                payload, checksums = self._fill(batch, part)
                before, filled = filled, self._commit(batch, part, payload, checksums, later=later)
                # Only now, so that the server has this part by then and need not wait for it.
                if before is not None:
                    self._settle(before)
                if not ahead:
                    self._settle(filled)
                    filled = None
            if following is not None and not ahead:
                reserving = self._reserve(following)
        if filled is not None:
            self._settle(filled)

    def _parts(self, batch: Batch, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        """What one Commit names. Bytes that are sent were summed up just before: while they are in the cache, and what
        was sent before them is still on its way."""
        at_once = SENT_BYTES // batch.block_bytes if self._connection.mapping is None else len(slots)
        at_once = max(1, at_once)
        for start in range(0, len(slots), at_once):
            yield slots[start : start + at_once]

    def _sum_up(self, batch: Batch) -> None:
        """Until the answer comes: the server may have slept, and the caches are full of blocks."""
        for position in batch.positions:
            if self._known(position) is None:
                if self._connection.is_readable:
                    return
                self._sums[position] = checksum(self._requests[position].buffer)

    def _reserve(self, batch: Batch) -> int:
        requests = [self._requests[i] for i in batch.positions]
        digests = digests_of(request.key for request in requests)
        parents = parents_of(requests)
        return self._connection.ask(
            lambda number: Reserve(number, batch.namespace, batch.block_bytes, digests, parents, batch.ttl_ms), Reserved
        )

    def _reserved(self, batch: Batch, number: int) -> list[Slot]:
        """The slots that are ours to fill; what becomes of the other blocks is noted."""
        try:
            answer = self._connection.answer(number, Reserved)
        except RefusedError as error:
            if error.is_final:
                raise
            # No block of this length can be had there; of anything else it is the server that fails.
            refused = WriteOutcome.FULL if error.code == FailureCode.INVALID else WriteOutcome.ERROR
            for position in batch.positions:
                self.outcomes[position] = refused
            return []
        slots = check_reserved(self._connection, answer, len(batch.positions), batch.block_bytes)
        for position, outcome in zip(batch.positions, answer.outcomes, strict=True):
            if outcome != ReserveOutcome.RESERVED:
                self.outcomes[position] = _RESERVE_OUTCOMES[outcome]
            if outcome == ReserveOutcome.BEING_STORED:
                self.being_stored.append(position)
        return slots

    def _fill(self, batch: Batch, slots: Sequence[Slot]) -> tuple[list[memoryview], list[int]]:
        """Copy to the slots; without a mapping, what is to follow the commit. And the checksums."""
        mapping = self._connection.mapping
        payload, checksums = [], []
        for slot in slots:
            request = self._requests[batch.positions[slot.place]]
            known = self._known(batch.positions[slot.place])
            if mapping is None:
                payload.append(request.buffer.cast("B"))
                checksums.append(checksum(request.buffer) if known is None else known)
            else:
                target = mapping.slot(slot.offset, batch.block_bytes)
                found = copy_in(target, as_bytes(request.buffer), hashed=known is None)
                checksums.append(found if known is None else known)
        return payload, checksums

    def _known(self, position: int) -> int | None:
        """A block's checksum, as far as it need not be computed."""
        if not self._connection.welcome.checksums:
            return 0
        known = self._requests[position].checksum
        return self._sums.get(position) if known is None else known

    def _commit(
        self,
        batch: Batch,
        slots: Sequence[Slot],
        payload: Sequence[memoryview],
        checksums: list[int],
        *,
        later: bool,
    ) -> _Filled:
        handles = [slot.handle for slot in slots]
        nbytes = sum(map(len, payload))
        number = self._connection.ask_with(
            lambda number: Commit(number, handles, checksums), Committed, payload, nbytes, later=later
        )
        for handle in handles:
            del self._connection.held[handle]
        return _Filled(number, [batch.positions[slot.place] for slot in slots])

    def _settle(self, filled: _Filled) -> None:
        try:
            answer = self._connection.answer(filled.number, Committed)
        except RefusedError as error:
            if error.is_final:
                raise
            return  # as they are: ERROR
        check_committed(self._connection, answer, len(filled.positions))
        for position, outcome in zip(filled.positions, answer.outcomes, strict=True):
            self.outcomes[position] = _COMMIT_OUTCOMES[outcome]
