"""Whether a store's blocks still are what was stored, while it is in use; a slice at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtier.errors import IntegrityError, KVTierError
from kvtier.frame import payload_checksum
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.lower import LowerTier
from kvtier.protocol.admin import Damage, Integrity, Progress, Verified
from kvtier.server.inventory import HOST, SLICE_BLOCKS
from kvtier.store import Store
from kvtier.tiers.base import ReadOutcome, ReadRequest
from kvtier.tiers.disk import DiskTier

__all__ = ["Report", "check_integrity", "verify_host", "verify_lower"]

SLICE_BYTES = 8 << 20
"""Whose checksums are computed, or that are read, in one slice, unless one block is longer."""
INTEGRITY_TRIES = 3
INTEGRITY_PAUSE_S = 0.05
"""Between them: what passes from one lock to another under load agrees a moment later."""
MAX_TEXT = 1024

Report = Damage | Verified | Progress | None
"""None: a slice is done."""
T = TypeVar("T")


def verify_host(number: int, tenant: str, store: Store) -> Iterator[Report]:
    """Compare every block of host memory with the checksum that it came with; what differs is forgotten there.

    number, tenant: for the reports. Some blocks are leased meanwhile, and evicted a little later than they would be.
    """
    blocks = nbytes = damaged = unsummed = 0
    for namespace in store.host.namespaces():
        digests = store.host.digests(namespace)
        for start in range(0, len(digests), SLICE_BLOCKS):
            part = [(namespace, BlockDigest(digest)) for digest in digests[start : start + SLICE_BLOCKS]]
            wrong: list[Key] = []
            with store.pool.owner("an operator verifies") as owner:
                leased = zip(part, store.host.lease_blocks(part, owner), strict=True)
                found = [(make_key(*block), held) for block, held in leased if held is not None]
                for some in _slices(found, lambda pair: pair[1].nbytes):
                    for key, held in some:
                        unsummed += held.checksum is None
                        if held.checksum not in (None, payload_checksum(held.lease.view[: held.nbytes])):
                            wrong.append(key)
                    yield None
                store.host.remove(wrong)  # while it is leased no other block can have come to the slot
            blocks += len(found)
            nbytes += sum(held.nbytes for _, held in found)
            damaged += len(wrong)
            for key in wrong:
                yield Damage(number, tenant, HOST, key, "its bytes in host memory are not those of its checksum")
            yield Progress(number, blocks)
    if unsummed:
        yield Verified(number, tenant, HOST, 0, 0, 0, "daemon.checksums = false: there is nothing to compare with")
    else:
        yield Verified(number, tenant, HOST, blocks, nbytes, damaged, "")


def verify_lower(number: int, tenant: str, lower: LowerTier) -> Iterator[Report]:
    """Read every block of the disk tier and compare it with its checksums; what differs is forgotten there. Blocks are
    not used by it: their order of eviction stays. Waits for the device, on the caller's thread."""
    device = lower.device
    if not isinstance(device, DiskTier):
        skipped = "its blocks cannot be listed; each is verified when it is read"
    elif not lower.is_available:
        skipped = "it is sick, and left alone for now"
    else:
        yield from _verify_disk(number, tenant, device)
        return
    yield Verified(number, tenant, lower.name, 0, 0, 0, skipped)


def _verify_disk(number: int, tenant: str, tier: DiskTier) -> Iterator[Report]:
    blocks = nbytes = damaged = 0
    scratch = bytearray()
    for rows in tier.rows():
        for some in _slices(rows, lambda row: row.raw_bytes):
            size = sum(row.raw_bytes for row in some)
            if len(scratch) < size:
                scratch = bytearray(size)
            whole, start = memoryview(scratch), 0
            requests = []
            for row in some:
                requests.append(ReadRequest(row.key, whole[start : start + row.raw_bytes]))
                start += row.raw_bytes
            for row, outcome in zip(some, tier.inspect(requests), strict=True):
                if outcome is not ReadOutcome.MISS:  # evicted or replaced since it was listed
                    blocks += 1
                    nbytes += row.raw_bytes
                if outcome in (ReadOutcome.DAMAGED, ReadOutcome.ERROR):
                    damaged += 1
                    problem = "it cannot be read" if outcome is ReadOutcome.ERROR else "its frame is damaged"
                    yield Damage(number, tenant, tier.name, row.key, problem)
            yield Progress(number, blocks)
    yield Verified(number, tenant, tier.name, blocks, nbytes, damaged, "")


def check_integrity(number: int, tenant: str, check: Callable[[], None]) -> Integrity:
    """Whether counts agree, by a check that raises IntegrityError where they do not: then once more, and then again. It
    holds locks for time in proportion to the blocks."""
    problem = ""
    for _ in range(INTEGRITY_TRIES):
        try:
            check()
            return Integrity(number, tenant, "")
        except IntegrityError as error:
            problem = str(error)
            time.sleep(INTEGRITY_PAUSE_S)
        except (KVTierError, TimeoutError) as error:
            return Integrity(number, tenant, f"it could not be checked: {str(error) or 'the loop is busy'}"[:MAX_TEXT])
    return Integrity(number, tenant, problem[:MAX_TEXT])


def _slices(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Of SLICE_BYTES at most each, or one item."""
    some: list[T] = []
    nbytes = 0
    for item in items:
        size = size_of(item)
        if some and nbytes + size > SLICE_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(item)
        nbytes += size
    if some:
        yield some
