"""KV without a model: what a pool must hold at a position is a function of the prompt up to there and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

__all__ = ["VOCAB_SIZE", "KVPool", "Trace", "Words", "expected_output"]

Words = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
"""bf16 elements as their 16 bits: equal means equal in every bit."""

VOCAB_SIZE = 32000

_MASK = (1 << 64) - 1
_FINITE = 0x3FFF  # without the sign and one bit of the exponent: neither NaN nor infinite as bf16


def _mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _after(state: int, token: int) -> int:
    return _mix(state ^ _mix(token + 1))


def _root(salt: str | None) -> int:
    return _mix(int.from_bytes((salt or "").encode(), "big") & _MASK) if salt else 0


def expected_output(prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> list[int]:
    """What a request must put out whose every token was computed on the right KV."""
    trace = Trace(salt)
    trace.extend(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(trace.next_token())
        trace.extend(output[-1:])
    return output


class Trace:
    """The states that a prompt goes through, one a token. Prompts of different salts have no state in common."""

    def __init__(self, salt: str | None = None) -> None:
        self.states: list[int] = []
        self._root = _root(salt)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.states.append(_after(self.states[-1] if self.states else self._root, token))

    def next_token(self, end: int | None = None) -> int:
        """The token that follows the first `end` tokens, or all of them."""
        return self.states[-1 if end is None else end - 1] % VOCAB_SIZE


class KVPool:
    """An engine's KV tensors: one a layer, [blocks, KV heads, tokens of a block, elements of K and V], bf16."""

    def __init__(self, layers: Sequence[str], num_blocks: int, heads: int, block_size: int, width: int) -> None:
        self.block_size = block_size
        self.tensors = {
            layer: torch.zeros(num_blocks, heads, block_size, width, dtype=torch.bfloat16) for layer in layers
        }
        self._words: list[Words] = [tensor.view(torch.int16).numpy() for tensor in self.tensors.values()]
        lanes = range(len(layers) * heads * width // 4)
        self._lanes = np.array([_mix(~lane & _MASK) for lane in lanes], np.uint64).reshape(len(layers), heads, -1)

    def content(self, layer: int, states: Sequence[int]) -> Words:
        """What a layer must hold at the positions of these states: [positions, heads, elements]."""
        mixed = np.array(states, np.uint64)[:, None, None] ^ self._lanes[layer]
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        words: Words = mixed.view(np.int16) & np.int16(_FINITE)
        return words

    def write(self, layer: int, table: Sequence[int], start: int, states: Sequence[int], is_wrong: bool) -> None:
        """Put the positions from `start` on into the blocks of a table; `is_wrong` as if computed on wrong KV."""
        blocks, offsets = self._slots(table, start, len(states))
        self._words[layer][blocks, :, offsets] = self.content(layer, states) ^ np.int16(is_wrong)

    def first_wrong(self, layer: int, table: Sequence[int], states: Sequence[int]) -> int | None:
        """The first position of a request at which the pool holds anything else than it must."""
        blocks, offsets = self._slots(table, 0, len(states))
        wrong = (self._words[layer][blocks, :, offsets] != self.content(layer, states)).any(axis=(1, 2))
        return int(wrong.argmax()) if wrong.any() else None

    def wrong_blocks(self, expected: Mapping[int, Sequence[int]]) -> list[int]:
        """Those of the blocks which do not hold, in every layer, what the states given for them make."""
        states = [state for block_states in expected.values() for state in block_states]
        blocks = np.fromiter(expected, np.intp, len(expected)).repeat(self.block_size)
        offsets = np.tile(np.arange(self.block_size), len(expected))
        wrong = np.zeros(len(states), np.bool_)
        for layer, words in enumerate(self._words):
            wrong |= (words[blocks, :, offsets] != self.content(layer, states)).any(axis=(1, 2))
        return sorted({int(block) for block in blocks[wrong]})

    def _slots(self, table: Sequence[int], start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, start + count)
        return np.array(table, np.intp)[positions // self.block_size], positions % self.block_size
