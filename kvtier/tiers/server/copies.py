"""Blocks copied and hashed while they are in the cache. Other threads run meanwhile: numpy and xxhash see to that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.frame import payload_checksum

__all__ = ["as_bytes", "checksum", "copy_checked", "copy_in"]

CHUNK_BYTES = 1 << 20
"""Of a copy, hashed while it is in a shared cache. Shorter ones would be in a core's own, and cost more than that
gains: memory is copied at up to twice the speed where a copy is too long for the caches."""
WHOLE_BYTES = 2 << 20
"""Copied in one piece: a block of this length is not cut."""

Bytes = npt.NDArray[np.uint8]


def as_bytes(buffer: memoryview) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def checksum(block: memoryview) -> int:
    """XXH3-64, as the server keeps it."""
    return payload_checksum(block)


def copy_in(target: Bytes, source: Bytes, *, hashed: bool) -> int:
    """Copy a block; the XXH3-64 of what it was at its source, or 0 if it is not to be hashed."""
    nbytes = len(source)
    if not hashed or nbytes < CHUNK_BYTES:
        np.copyto(target, source)
        return xxhash.xxh3_64_intdigest(source.data) if hashed else 0
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, WHOLE_BYTES):
        part = slice(start, start + WHOLE_BYTES)
        digest.update(source[part].data)  # which fetches it: the copy has only to write
        np.copyto(target[part], source[part])
    return digest.intdigest()


def copy_checked(target: Bytes, source: Bytes, checksum: int | None) -> bool:
    """Copy a block; whether what arrived has this checksum. None: it is not looked at."""
    if checksum is None:
        np.copyto(target, source)
        return True
    # What is hashed is the caller's own by now: what others do to the source after this does not matter.
    if len(source) <= WHOLE_BYTES:
        np.copyto(target, source)
        return xxhash.xxh3_64_intdigest(target.data) == checksum
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), CHUNK_BYTES):
        part = slice(start, start + CHUNK_BYTES)
        np.copyto(target[part], source[part])
        digest.update(target[part].data)
    return digest.intdigest() == checksum
