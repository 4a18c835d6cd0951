"""What every tier below the GPU promises: batches of host bytes, an outcome per block, a usage in real bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.decisions import Decision
from kvtier.keys import Key
from kvtier.leases import Lease, Owner

__all__ = ["Adoption", "ReadOutcome", "ReadRequest", "Tier", "TierUsage", "WriteOutcome", "WriteRequest"]


class ReadOutcome(StrEnum):
    """How the read of one block ended."""

    OK = "ok"
    """The buffer holds exactly the block that was written under the key."""
    MISS = "miss"
    """The tier does not hold it, or holds it with another length; the buffer is undefined."""
    DAMAGED = "damaged"
    """What the tier holds under the key is not what was written: torn, flipped or foreign. It is forgotten by now; the
    buffer is undefined."""
    ERROR = "error"
    """The tier failed; it may or may not hold the block. The buffer is undefined."""
    REFUSED = "refused"
    """The tier was not asked: it is sick, and its breaker is open."""


class WriteOutcome(StrEnum):
    """How the write of one block ended."""

    STORED = "stored"
    """A read of the key now finds these bytes."""
    ALREADY_STORED = "already_stored"
    """The tier held the key before; nothing was written."""
    FULL = "full"
    """No room could be made; nothing changed for this block."""
    ERROR = "error"
    """The tier failed; the key is not readable with other bytes than these."""
    WITHDRAWN = "withdrawn"
    """It was removed, or the tier was reset, while it was being written: it is not readable."""
    REFUSED = "refused"
    """The tier was not asked: it is sick, and its breaker is open."""


@dataclass(slots=True)
class Adoption:
    """In place of a buffer, for a tier that `adopts`: the slot of the host pool in which it has the block.

    owner: of the lease that it sets where the block is OK; the slot is not resident yet. checksum: XXH3-64 of what was
    stored there, for the tier's own use, or None.
    """

    nbytes: int
    owner: Owner
    lease: Lease | None = None
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Where a block's bytes should go. `buffer` is as long as the block, writable and contiguous; empty with an
    `adoption`."""

    key: Key
    buffer: memoryview
    adoption: Adoption | None = None

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return len(self.buffer) if self.adoption is None else self.adoption.nbytes


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A block to keep. `parent` is the block before it in its chain, None for a first block."""

    key: Key
    parent: Key | None
    buffer: memoryview
    ttl_s: float | None = None
    """Seconds from now for which it is worth keeping; None: as the tier is set. A tier without lifetimes ignores it."""
    checksum: int | None = None
    """XXH3-64 of what was stored under the key; None: whatever the buffer holds is. Where it does not match what the
    buffer holds by now, a tier that checks what it reads gives DAMAGED for the block, or does not take it."""
    slot: int | None = None
    """Of the host pool, in which the buffer lies: a tier that `adopts` takes it as it is."""

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return len(self.buffer)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Real bytes: whole slots, pages or values, headers included."""

    num_blocks: int
    used_bytes: int
    capacity_bytes: int


class Tier(ABC):
    """A place for blocks.

    Every call may block and runs on that tier's own executor threads, several at a time; the engine's thread never
    makes one. A tier sees host bytes only. It answers per block, in the order asked; one bad block spoils no other.
    It may raise only for a caller's mistake or after `close`; a wrapper turns anything else it raises into ERROR.
    After `write` gave STORED, `read` gives these bytes or MISS, never others.
    """

    name: str
    is_remote = False
    """Whether every answer comes from another machine: `contains` too is then for a thread of the tier."""

    adopts = False
    """Whether the slots of the host pool are its own: then blocks are written and read in place, without a copy."""

    job_scale = 1
    """How many times as much as others' one call of `write` may be given, where much waits: a fast tier's is as soon
    over. Not of reads, see `read_bytes`: what is read may lie below a fast tier, in a slow one."""

    keeps_history = False
    """Whether it wants to be told of decisions, for people who ask it why a request was not served."""

    def job_bytes(self, least: int, share: int) -> int:
        """What one job may write. least: if it is any other tier's; share: of what waits, a job's part."""
        return min(max(least, share), self.job_scale * least)

    def read_bytes(self, least: int, share: int) -> int:
        """What one job that begins now may read; as `job_bytes`. Pure, takes no lock: asked under another."""
        del share
        return least

    def tell(self, decisions: Sequence[Decision]) -> None:
        """What was decided of requests. Allowed to do nothing."""
        del decisions

    def probe(self) -> None:
        """Ask whether it is well by now; returns when it is, and raises what ails it when it is not.

        Only a remote tier is asked so: no request has to wait for a sick one.
        """
        raise NotImplementedError(f"the {self.name} tier is not remote: its next read or write tells")

    @property
    def epoch(self) -> int:
        """The epoch that this tier remembers, across restarts too; 0 before the first reset."""
        return 0

    def start_epoch(self, epoch: int) -> None:
        """Forget every block, and remember `epoch` for later opens, before returning.

        Raises whatever kept it from that: a reset that a tier cannot perform must not look like one.
        """
        raise NotImplementedError(f"the {self.name} tier cannot be reset")

    def touch(self, keys: Sequence[Key]) -> None:
        """These blocks were used, though another tier served them. Cheap, and allowed to do nothing."""
        del keys

    @abstractmethod
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Which blocks a `read` would now find. Changes nothing: no recency, no statistics.

        From memory, unless the tier is remote.
        """

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        """Copy blocks into the buffers; counts as a use of those found."""

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        """Keep copies of the buffers, prefix before tail. The buffers are the caller's again when it returns."""

    @abstractmethod
    def remove(self, keys: Sequence[Key]) -> int:
        """Forget blocks; the number that were there. Readers under way finish with the old bytes."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Cheap, and never more than the configured capacity."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError when counts, bytes and index disagree. May take time in proportion to the blocks."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
