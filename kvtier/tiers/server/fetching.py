"""Blocks on their way from the server: staged, copied, released."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.keys import Key
from kvtier.protocol.messages import MAX_WAIT_MS, FailureCode, Release, Stage, Staged, StageOutcome
from kvtier.tiers.base import ReadOutcome, ReadRequest
from kvtier.tiers.server.answers import Slot, check_staged
from kvtier.tiers.server.batches import Batch, digests_of
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.copies import as_bytes, checksum, copy_checked
from kvtier.tiers.server.failures import RefusedError

__all__ = ["READ_OUTCOMES", "Fetching", "wait_ms"]

ANSWER_SHARE = 0.8
"""Of the time that is left the server may take so much: the rest is for its answer, and the copies."""

READ_OUTCOMES = {
    StageOutcome.MISS: ReadOutcome.MISS,
    StageOutcome.DAMAGED: ReadOutcome.DAMAGED,
    StageOutcome.ERROR: ReadOutcome.ERROR,
    # It is there, and cannot be had now: no reason to think ill of the server, nor to forget the block.
    StageOutcome.REFUSED: ReadOutcome.REFUSED,
    StageOutcome.TIMEOUT: ReadOutcome.REFUSED,
    StageOutcome.FULL: ReadOutcome.REFUSED,
}


def wait_ms(left_s: float) -> int:
    """How long the server may wait for its lower tiers, of the seconds that a call has left."""
    return max(0, min(MAX_WAIT_MS, int(left_s * 1000 * ANSWER_SHARE)))


class Fetching:
    """One call's blocks, on one connection, each key once. `outcomes` is right for each block whatever `fetch` raises:
    those that it did not come to are ERROR."""

    def __init__(self, connection: Connection, requests: Sequence[ReadRequest], clock: Clock, deadline: float) -> None:
        self._connection = connection
        self._requests = requests
        self._clock = clock
        self._deadline = deadline
        self._slots: dict[int, list[Slot]] = {}  # by the number of the question
        self._sums: dict[int, int] = {}  # of blocks that came as payload, by position
        self.outcomes = [ReadOutcome.ERROR] * len(requests)
        self.no_room: list[int] = []
        """Positions of blocks for which there was no slot when the server was last asked."""
        self.scribbled: list[Key] = []
        """Blocks whose bytes were not those of their checksum."""

    def fetch(self, batches: Sequence[Batch]) -> None:
        """Raises a ServerError. Then the connection is of no more use: what was leased on it is given back as it
        closes, as nothing here reads from a slot any more."""
        self.no_room = []
        if not batches:
            return
        ahead = self._connection.can_ask_ahead
        staging = self._stage(batches[0])
        for i, batch in enumerate(batches):
            slots = self._staged(batch, staging)
            following = batches[i + 1] if i + 1 < len(batches) else None
            if following is not None and ahead:
                staging = self._stage(following)
            self._take(batch, slots, later=ahead and i + 2 < len(batches))
            if following is not None and not ahead:
                staging = self._stage(following)

    def _stage(self, batch: Batch) -> int:
        digests = digests_of(self._requests[i].key for i in batch.positions)
        max_wait_ms = wait_ms(self._deadline - self._clock.now())
        inline = self._connection.mapping is None
        is_summed = inline and self._connection.welcome.checksums
        positions: list[int] = []
        summed: list[int] = []

        def place(answer: Staged, nbytes: int) -> list[memoryview]:
            """Straight to where the blocks belong."""
            slots = check_staged(self._connection, answer, len(batch.positions), batch.block_bytes)
            if nbytes != (len(slots) * batch.block_bytes if inline else 0):
                raise self._connection.garbled(f"{nbytes} bytes with {len(slots)} blocks of {batch.block_bytes}")
            self._slots[answer.id] = slots
            if not inline:
                return []
            positions.extend(batch.positions[slot.place] for slot in slots)
            return [self._requests[position].buffer for position in positions]

        def sum_up(nbytes: int) -> None:
            """While they are in the cache, and the next ones on their way."""
            for i in range(len(summed), nbytes // batch.block_bytes):
                summed.append(positions[i])
                self._sums[positions[i]] = checksum(self._requests[positions[i]].buffer)

        return self._connection.ask(
            lambda number: Stage(number, batch.namespace, batch.block_bytes, digests, b"", max_wait_ms, inline),
            Staged,
            place,
            sum_up if is_summed else None,
        )

    def _staged(self, batch: Batch, number: int) -> list[Slot]:
        """The blocks that can be had; what becomes of the others is noted."""
        try:
            answer = self._connection.answer(number, Staged)
        except RefusedError as error:
            if error.is_final:
                raise
            refused = ReadOutcome.MISS if error.code == FailureCode.INVALID else ReadOutcome.ERROR
            for position in batch.positions:
                self.outcomes[position] = refused
            return []
        for position, outcome in zip(batch.positions, answer.outcomes, strict=True):
            if outcome != StageOutcome.OK:
                self.outcomes[position] = READ_OUTCOMES[outcome]
            if outcome == StageOutcome.FULL:
                self.no_room.append(position)
        return self._slots.pop(number)

    def _take(self, batch: Batch, slots: Sequence[Slot], *, later: bool) -> None:
        """Copy, and let go. later: a Stage is said soon that takes this along."""
        mapping = self._connection.mapping
        for slot in slots:
            request = self._requests[batch.positions[slot.place]]
            if mapping is None:
                found = self._sums.pop(batch.positions[slot.place], None)
                is_well = slot.checksum is None or (
                    slot.checksum == (checksum(request.buffer) if found is None else found)
                )
            else:
                source = mapping.slot(slot.offset, batch.block_bytes)
                is_well = copy_checked(as_bytes(request.buffer), source, slot.checksum)
            self.outcomes[batch.positions[slot.place]] = ReadOutcome.OK if is_well else ReadOutcome.DAMAGED
            if not is_well:
                self.scribbled.append(request.key)
        if mapping is not None and slots:
            leases = [slot.handle for slot in slots]
            self._connection.say(Release(0, leases), later=later)
            for lease in leases:
                del self._connection.held[lease]
