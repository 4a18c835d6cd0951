"""Which blocks of the GPU pool hold confirmed KV, whose it is, and whether it is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest

__all__ = ["PublishedBlock", "PublishedBlocks"]


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A GPU block and what it holds. parent: the block before it in its chain, None for a first block.

    tenant, ttl_s: of the request that filled it; see `KVOptions`.
    """

    block_id: int
    digest: BlockDigest
    parent: BlockDigest | None
    tenant: str = ""
    ttl_s: float | None = None


class PublishedBlocks:
    """Owns the table of publishable blocks: what each holds and which are dirty. Engine's thread only."""

    def __init__(self) -> None:
        self._by_id: dict[int, PublishedBlock] = {}
        self._by_digest: dict[BlockDigest, int] = {}
        self._dirty: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    def get(self, block_id: int) -> PublishedBlock | None:
        return self._by_id.get(block_id)

    def find(self, digest: BlockDigest) -> PublishedBlock | None:
        block_id = self._by_digest.get(digest)
        return None if block_id is None else self._by_id[block_id]

    def is_dirty(self, block_id: int) -> bool:
        return block_id in self._dirty

    def dirty_among(self, block_ids: Iterable[int]) -> list[int]:
        """The dirty ones of these, in their order; quick, since a danger depth is walked whenever the queue changed."""
        return list(filter(self._dirty.__contains__, block_ids))

    def add(self, block: PublishedBlock, *, dirty: bool) -> None:
        """Enter a block, in place of what the same GPU block held before."""
        self.forget(block.block_id)
        self._by_id[block.block_id] = block
        self._by_digest[block.digest] = block.block_id
        if dirty:
            self._dirty.add(block.block_id)

    def forget(self, block_id: int) -> PublishedBlock | None:
        """The GPU block was reused; returns what it held."""
        block = self._by_id.pop(block_id, None)
        if block is not None:
            self._dirty.discard(block_id)
            if self._by_digest.get(block.digest) == block_id:
                del self._by_digest[block.digest]
        return block

    def ids(self) -> list[int]:
        return list(self._by_id)

    def dirty_ids(self) -> list[int]:
        return sorted(self._dirty)

    def mark_clean(self, block_id: int) -> None:
        self._dirty.discard(block_id)

    def mark_dirty(self, digest: BlockDigest) -> bool:
        """The tiers no longer hold this block; True when the GPU pool does and it is dirty again."""
        block_id = self._by_digest.get(digest)
        if block_id is None:
            return False
        self._dirty.add(block_id)
        return True

    def clear(self) -> None:
        self._by_id.clear()
        self._by_digest.clear()
        self._dirty.clear()

    def check_integrity(self) -> None:
        for digest, block_id in self._by_digest.items():
            if self._by_id[block_id].digest != digest:
                raise IntegrityError(f"published blocks: block {block_id} is named by a digest it does not hold")
        if not self._dirty <= self._by_id.keys():
            raise IntegrityError("published blocks: a dirty block is not published")
