"""vLLM's block pool as the connector sees it: read, never changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool

__all__ = ["VllmBlocks"]


class VllmBlocks:
    """A `BlockPoolView` that pins nothing. Engine's thread only.

    vLLM has no pins: to keep a free block's bytes it would have to be taken out of the queue, which costs capacity and
    disturbs the order. Instead a store whose source was handed out meanwhile is dropped and counted (`overtaken`), and
    the destinations of a load are kept by vLLM itself until the load is reported.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_changes = 0

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def queue_version(self) -> int:
        """Changes with every step in which blocks were taken or given back; see `note_change`."""
        queue = self._pool.free_block_queue
        head, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail.prev_free_block
        ends = tuple(-1 if block is None else block.block_id for block in (head, tail))
        return hash((self._num_changes, queue.num_free_blocks, *ends))

    @property
    def current_cache(self) -> object:
        """vLLM's map from hashes to blocks: another object once it has cleared its prefix cache."""
        return self._pool.cached_block_hash_to_block

    def note_change(self) -> None:
        """Blocks were taken or given back."""
        self._num_changes += 1

    def free_queue(self) -> Iterator[int]:
        """Blocks that no request references, the next to be reused first. Walks the list, touches nothing."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block.block_id
            block = block.next_free_block

    def pin(self, block_id: int, holder: str) -> None:
        del block_id, holder

    def unpin(self, block_id: int) -> None:
        del block_id

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that vLLM's own prefix cache holds. Pure."""
        num_cached = 0
        for block_hash in hashes:
            if self._pool.get_cached_block(block_hash, [0]) is None:
                break
            num_cached += 1
        return num_cached
