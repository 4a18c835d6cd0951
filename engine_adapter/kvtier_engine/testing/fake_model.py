"""A model without weights: it writes a signature per token into the pool and reads them back through the block table.

The next token is a hash of every signature it finds, so a wrong, stale or half-written block changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.layout import KVLayout
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.sampling import SamplingParams
from kvtier_engine.testing.pages import PageWriteLog

__all__ = ["FakeRunner", "FakeSampler", "block_contents", "expected_tokens", "linear_cost"]

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


def block_contents(tokens: Sequence[int], block_tokens: int) -> list[npt.NDArray[np.int64]]:
    """What the fake model leaves in each full block of a prompt, `[2, block_tokens]`: for tiers that are said to hold
    it."""
    full = len(tokens) // block_tokens
    return [
        _signatures(tokens[start : start + block_tokens], start)
        for start in range(0, full * block_tokens, block_tokens)
    ]


Cost = Callable[[Sequence[BatchItem]], float]


def linear_cost(per_step: float = 0.0, per_token: float = 0.0, per_pair: float = 0.0) -> Cost:
    """Seconds of a forward: so much for each, each token of it, and each pair of a token and one that it attends to."""

    def seconds(batch: Sequence[BatchItem]) -> float:
        sizes = [(len(item.token_ids), item.start) for item in batch]
        pairs = sum(size * (start + size / 2) for size, start in sizes)
        return per_step + per_token * sum(size for size, _ in sizes) + per_pair * pairs

    return seconds


class MovableClock(Protocol):
    """A clock that the model moves, as `kvtier.testing.FakeClock`."""

    def advance(self, seconds: float) -> None: ...


class FakeSampler:
    """Stands in for a Sampler: the fake model draws for itself."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params


class FakeRunner(ModelRunner):
    """One layer whose keys are token ids and whose values are positions, both int64.

    fail: called with each batch before anything is written to it; what it raises, `execute` raises after writing half
    of the batch, as a failing device would.
    writes: a log of which block each write goes to, if one is wanted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        max_positions: int = 1 << 20,
        clock: MovableClock | None = None,
        seconds: Cost | None = None,
    ) -> None:
        """clock, seconds: `execute` moves the clock on by what `seconds` says of the batch, e.g. a `linear_cost`."""
        if (clock is None) != (seconds is None):
            raise ValueError("clock and seconds go together: the one is moved by what the other says")
        # Two float32 stand for one int64: 8 bytes a token in each plane.
        self.layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_tokens=block_tokens)
        self.num_blocks = num_blocks
        self.max_positions = max_positions
        self.vocab_size = VOCAB
        self.pool = np.full((2, num_blocks, block_tokens), EMPTY, np.int64)
        self.batches: list[list[BatchItem]] = []
        self.fail: Callable[[Sequence[BatchItem]], None] = lambda _batch: None
        self.writes: PageWriteLog | None = None
        self._clock = clock
        self._seconds = seconds

    def planes(self) -> list[Any]:
        return [self.pool[0], self.pool[1]]

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        assert batch, "execute was called with an empty batch"
        self.batches.append(list(batch))
        if self.writes is not None:
            self.writes.begin_step()
        if self._clock is not None and self._seconds is not None:
            self._clock.advance(self._seconds(batch))
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
        end = item.start + len(item.token_ids)
        blocks, places = self._where(item, item.start, end)
        if self.writes is not None:
            self._log(item, self.writes)
        self.pool[:, blocks, places] = _signatures(item.token_ids, item.start)

    def _log(self, item: BatchItem, writes: PageWriteLog) -> None:
        size, end = self.layout.block_tokens, item.start + len(item.token_ids)
        for index in range(item.start // size, -(-end // size)):
            start = max(item.start, index * size)
            writes.note(item.request_id, item.block_table[index], start, min(end, (index + 1) * size))

    def _read_next(self, item: BatchItem) -> int:
        blocks, places = self._where(item, 0, item.start + len(item.token_ids))
        return _next_token(np.ascontiguousarray(self.pool[:, blocks, places]))

    def _where(self, item: BatchItem, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(start, end)
        size = self.layout.block_tokens
        table = np.asarray(item.block_table, np.int64)
        assert end <= len(table) * size, f"the block table of {item.request_id} does not cover position {end - 1}"
        return table[positions // size], positions % size
