"""What the scheduler asks of a model: run one flattened batch over the block pool and sample where told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.layout import KVLayout

if TYPE_CHECKING:
    from kvtier_engine.sampling import Sampler

__all__ = ["BatchItem", "ModelRunner"]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request's part of a step: the tokens whose KV this step computes.

    token_ids: the tokens, at positions `start .. start + len(token_ids)`.
    block_table: the request's block ids; covers every position up to the last of `token_ids`.
    sampler: draws the next token from the last token's logits; None when the prompt goes on in a later step.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampler: Sampler | None


class ModelRunner(ABC):
    """A model and the block pool (GPU pool) its attention reads and writes.

    Owned by the engine's thread, which is the only caller of `execute`. The pool's memory never moves while the
    runner lives, so that transfers can read and write it from their own thread.
    """

    layout: KVLayout
    num_blocks: int
    max_positions: int
    """Longest sequence the model's position encoding allows."""
    vocab_size: int

    @abstractmethod
    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        """Run one forward over the flattened batch; never called with an empty one.

        Writes the KV of every token of `batch` into the pool, at `block_table[position // block_tokens]`, and returns
        for each item the sampled token, or None where `sampler` is None. When it returns, the writes are visible to
        any thread (the
        runner synchronises its device). Raises whatever the model raises; then the content of the blocks that the
        batch wrote is undefined and the caller must not publish them.
        """

    @abstractmethod
    def planes(self) -> list[Any]:
        """The pool as `layout.num_planes` arrays or tensors, each `[num_blocks, ...]` with the block's bytes
        contiguous.

        Order as in `KVLayout`: layer 0 keys, layer 0 values, layer 1 keys, ...
        """
