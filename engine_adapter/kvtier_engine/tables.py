"""Block tables over the pool: they grow, are published, and are given up."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import BlockDigest
from kvtier_connectors.contract import ConnectorScheduler
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.request import Request

__all__ = ["BlockTables"]


class BlockTables:
    """The one way between requests and the block pool. Owns nothing; engine's thread only."""

    def __init__(self, pool: BlockPool, connector: ConnectorScheduler | None, block_tokens: int) -> None:
        self._pool = pool
        self._connector = connector
        self._block_tokens = block_tokens

    def find_local(self, request: Request) -> list[int]:
        """Blocks of the pool that hold the beginning of the request's tokens; one token is left to compute. Pure."""
        return self._pool.match(request.root, self.reusable(request), request.tokens_of)

    @staticmethod
    def reusable(request: Request) -> Sequence[BlockDigest]:
        return request.chain.digests[: request.max_reusable_blocks]

    def share(self, request: Request, local: Sequence[int]) -> None:
        """Begin its table with blocks that were found."""
        self._pool.acquire(local)
        request.block_table = list(local)
        request.num_computed = len(local) * self._block_tokens
        request.num_published = len(local)

    def num_fitting(self, request: Request, num_tokens: int) -> int:
        """How many of its next `num_tokens` tokens have blocks, or could have free ones. Pure."""
        blocks = len(request.block_table) + self._pool.num_free
        return max(0, min(num_tokens, blocks * self._block_tokens - request.num_computed))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` tokens; False, and nothing changed, when too few are free."""
        needed = request.blocks_for(request.num_computed + num_tokens) - len(request.block_table)
        if needed <= 0:
            return True
        blocks = self._pool.allocate(needed)
        if blocks is None:
            return False
        request.block_table += blocks
        return True

    def publish(self, request: Request) -> None:
        """Make the blocks that are full and computed matchable, and known to the connector.

        Where another block holds the same KV, share that one.
        """
        first = start = request.num_published
        full = request.num_computed // self._block_tokens
        table = request.block_table
        for index in range(first, full):
            previous = table[index - 1] if index else None
            own = table[index]
            block_id = self._pool.publish(
                own, request.chain.digests[index], request.root, previous, request.tokens_of(index)
            )
            if block_id != own:
                self._tell_published(request, start, index)
                start = index + 1
                self._pool.acquire([block_id])
                table[index] = block_id
                self._pool.release([own])
        self._tell_published(request, start, full)
        request.num_published = max(first, full)

    def _tell_published(self, request: Request, start: int, end: int) -> None:
        known = [b for b in request.block_table[start:end] if self._pool.is_published(b)]
        if self._connector is not None and known:
            self._connector.publish(request.request_id, start, known)
