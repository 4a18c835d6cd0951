"""A cluster's slot of a key, as its specification says: CRC-16 (XMODEM) of the name, modulo 16384.

A CRC is linear: what a byte of the key adds to it depends on that byte and its place alone. So the sums of thousands
of names of one form are look-ups in a table, and not one more pass over every name.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kvtier.keys import KEY_BYTES, Key
from kvtier.tiers.redis.resp import key_argument
from kvtier.tiers.redis.topology import NUM_SLOTS

__all__ = ["slot_of", "slots_of"]

FEW = 32
_MASK = NUM_SLOTS - 1
_ZEROS = Key(bytes(KEY_BYTES))


def slot_of(name: str) -> int:
    """Of a whole name, which has no braces: none of ours has."""
    return crc_hqx(name.encode("ascii"), 0) & _MASK


def slots_of(prefix: str, keys: Sequence[Key]) -> list[int]:
    """Of the names of blocks, which begin alike. One by one where they are few: tables pay for many."""
    if len(keys) <= FEW:
        begun = crc_hqx(prefix.encode("ascii"), 0)
        return [crc_hqx(key_argument(key).encode("ascii"), begun) & _MASK for key in keys]
    of_zeros = crc_hqx(f"{prefix}{key_argument(_ZEROS)}".encode("ascii"), 0)
    places = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES) + _first_places()
    sums = np.bitwise_xor.reduce(_additions().take(places), axis=1)
    return [*((sums ^ of_zeros) & _MASK).tolist()]


@cache
def _first_places() -> npt.NDArray[np.intp]:
    """Where in `_additions` each byte's 256 entries begin."""
    return np.arange(KEY_BYTES, dtype=np.intp) * 256


@cache
def _additions() -> npt.NDArray[np.uint16]:
    """By place and value of a byte of the key, what it changes in the sum of a key of zeros."""

    def summed(key: bytes) -> int:
        return crc_hqx(key_argument(Key(key)).encode("ascii"), 0)

    return np.array(
        [
            summed(bytes([*_ZEROS[:place], value, *_ZEROS[place + 1 :]])) ^ summed(_ZEROS)
            for place in range(KEY_BYTES)
            for value in range(256)
        ],
        np.uint16,
    )
