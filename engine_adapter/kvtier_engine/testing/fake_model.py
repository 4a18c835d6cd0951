"""A model without weights: it writes a signature per token into the pool and reads them back through the block table.

The next token is a hash of every signature it finds, so a wrong, stale or half-written block changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.layout import KVLayout
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.sampling import SamplingParams

__all__ = ["FakeRunner", "FakeSampler", "expected_tokens"]

VOCAB = 50_000
EMPTY = -1  # what a block holds before anything was written


def _next_token(signatures: npt.NDArray[np.int64]) -> int:
    return int.from_bytes(hashlib.sha256(signatures.tobytes()).digest()[:4], "little") % VOCAB


def _signatures(tokens: Sequence[int], start: int) -> npt.NDArray[np.int64]:
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    return np.stack([np.asarray(tokens, np.int64), positions])


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model puts out for a prompt when every block is right: the oracle."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_next_token(_signatures(tokens, 0)))
    return tokens[len(prompt) :]


class FakeSampler:
    """Stands in for a Sampler: the fake model draws for itself."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params


class FakeRunner(ModelRunner):
    """One layer whose keys are token ids and whose values are positions, both int64.

    fail: called with each batch before anything is written to it; what it raises, `execute` raises after writing half
    of
    the batch, as a failing device would.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, max_positions: int = 1 << 20) -> None:
        # Two float32 stand for one int64: 8 bytes a token in each plane.
        self.layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_tokens=block_tokens)
        self.num_blocks = num_blocks
        self.max_positions = max_positions
        self.vocab_size = VOCAB
        self.pool = np.full((2, num_blocks, block_tokens), EMPTY, np.int64)
        self.batches: list[list[BatchItem]] = []
        self.fail: Callable[[Sequence[BatchItem]], None] = lambda _batch: None

    def planes(self) -> list[Any]:
        return [self.pool[0], self.pool[1]]

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        assert batch, "execute was called with an empty batch"
        self.batches.append(list(batch))
        try:
            self.fail(batch)
        except Exception:
            for item in batch[: (len(batch) + 1) // 2]:
                self._write(item)
            raise
        for item in batch:
            self._write(item)
        return [None if item.sampler is None else self._read_next(item) for item in batch]

    def _write(self, item: BatchItem) -> None:
        blocks, places = self._where(item, item.start, item.start + len(item.token_ids))
        self.pool[:, blocks, places] = _signatures(item.token_ids, item.start)

    def _read_next(self, item: BatchItem) -> int:
        blocks, places = self._where(item, 0, item.start + len(item.token_ids))
        return _next_token(np.ascontiguousarray(self.pool[:, blocks, places]))

    def _where(self, item: BatchItem, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(start, end)
        size = self.layout.block_tokens
        table = np.asarray(item.block_table, np.int64)
        assert end <= len(table) * size, f"the block table of {item.request_id} does not cover position {end - 1}"
        return table[positions // size], positions % size
