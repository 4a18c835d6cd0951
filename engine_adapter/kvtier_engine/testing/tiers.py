"""Where a scripted connector keeps blocks, and how their bytes reach the GPU pool: rank by rank, whole or torn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.keys import BlockDigest
from kvtier_kernels import BlockPlanes

__all__ = ["HOST", "PoolBytes", "ScriptedTiers"]

HOST = "host"
GARBAGE = 0xA5


class ScriptedTiers:
    """Dictionaries of blocks, host memory first. A lower tier exists once something was put into it."""

    def __init__(self) -> None:
        self._held: dict[str, dict[BlockDigest, bytes]] = {HOST: {}}

    @property
    def lower(self) -> list[str]:
        return [name for name in self._held if name != HOST]

    def put(self, tier: str, digest: BlockDigest, data: bytes) -> None:
        self._held.setdefault(tier, {})[digest] = data

    def drop(self, digests: Iterable[BlockDigest], tier: str | None = None) -> None:
        """Forget these blocks, in one tier or in all."""
        for digest in list(digests):
            for name, held in self._held.items():
                if tier in (None, name):
                    held.pop(digest, None)

    def clear(self) -> None:
        for held in self._held.values():
            held.clear()

    def held(self, tier: str) -> Mapping[BlockDigest, bytes]:
        return self._held.get(tier, {})

    def tier_of(self, digest: BlockDigest) -> str | None:
        """The highest tier that holds the block."""
        return next((name for name, held in self._held.items() if digest in held), None)

    def data(self, digest: BlockDigest) -> bytes | None:
        tier = self.tier_of(digest)
        return None if tier is None else self._held[tier][digest]

    def host_run(self, digests: Sequence[BlockDigest]) -> int:
        """How many of these, from the first, are in host memory."""
        held = self._held[HOST]
        return next((index for index, digest in enumerate(digests) if digest not in held), len(digests))

    def parts(self, digests: Sequence[BlockDigest]) -> list[tuple[str, int]]:
        """The tiers that hold the longest run from the first, in the order of the run, and how many blocks each."""
        parts: list[tuple[str, int]] = []
        for digest in digests:
            tier = self.tier_of(digest)
            if tier is None:
                break
            if parts and parts[-1][0] == tier:
                parts[-1] = (tier, parts[-1][1] + 1)
            else:
                parts.append((tier, 1))
        return parts


class PoolBytes:
    """The bytes of a GPU pool's blocks. Each of `num_ranks` ranks owns an equal share of every block, as the workers
    of one model split over devices do, and moves no other."""

    def __init__(self, planes: BlockPlanes, num_ranks: int) -> None:
        self._planes = planes
        self._num_ranks = num_ranks
        self.block_bytes = self._planes.block_bytes
        self._unit = 8 if self.block_bytes % 8 == 0 else 1

    def read(self, block_id: int) -> bytes:
        return self._whole(block_id).tobytes()

    def read_share(self, block_id: int, rank: int, into: bytearray) -> None:
        share = self._share(rank)
        into[share] = self._whole(block_id)[share].tobytes()

    def write_share(self, block_id: int, rank: int, data: bytes | bytearray, *, torn: bool = False) -> None:
        """torn: only the first half is right, as when a copy breaks off; the rest is garbage."""
        share = self._share(rank)
        whole = self._whole(block_id)
        whole[share] = np.frombuffer(data, np.uint8)[share]
        if torn:
            middle = share.start + (share.stop - share.start) // (2 * self._unit) * self._unit
            whole[middle : share.stop] = GARBAGE
        start = 0
        for plane in self._planes.planes:
            plane[block_id] = whole[start : start + plane.shape[1]]
            start += plane.shape[1]

    def _whole(self, block_id: int) -> npt.NDArray[np.uint8]:
        return np.concatenate([plane[block_id] for plane in self._planes.planes])

    def _share(self, rank: int) -> slice:
        num_units = self.block_bytes // self._unit
        start, stop = (num_units * r // self._num_ranks * self._unit for r in (rank, rank + 1))
        return slice(start, stop)
