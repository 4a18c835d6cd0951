"""The traces of real prompts in benchmarks/data, as prompts of numbered blocks of 512 tokens in order of time.

Where they come from, and what the files hold, is in benchmarks/data/README.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["START_GAP_S", "TRACES", "Trace"]

DATA = Path(__file__).parent / "data"
BLOCK_TOKENS = 512
START_GAP_S = 240.0
"""Between the starts of the agents' conversations, which the trace does not tell: about 40 are under way at once."""


class Trace:
    """Prompts in order; blocks are numbered by first appearance, and a number stands for the whole prefix.

    ids: the blocks of all prompts, one after the other. ends: where each prompt ends in `ids`.
    """

    def __init__(self, name: str, prompts: Iterator[list[int]]) -> None:
        self.name = name
        names: dict[int, int] = {}
        ids: list[int] = []
        ends: list[int] = []
        for prompt in prompts:
            ids += [names.setdefault(block, len(names)) for block in prompt]
            ends.append(len(ids))
        self.ids: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.ends = ends
        self.num_unique = len(names)

    def prompts(self) -> Iterator[list[int]]:
        begin = 0
        for end in self.ends:
            yield self.ids[begin:end].tolist()
            begin = end

    @property
    def reuse(self) -> float:
        """The part of all blocks that came before: what a cache of endless size has."""
        return 1 - self.num_unique / len(self.ids)


def mooncake(name: str) -> Iterator[list[int]]:
    """Only full blocks: those are what kvtier stores."""
    with gzip.open(DATA / f"mooncake_{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            request = json.loads(line)
            yield request["hash_ids"][: request["input_length"] // BLOCK_TOKENS]


def agentic() -> Iterator[list[int]]:
    """Conversations in the file's order begin START_GAP_S after each other; prompts are in order of time.

    A conversation's ids are its own: no block is shared between two.
    """
    prompts: list[tuple[float, list[int]]] = []
    with gzip.open(DATA / "weka_agentic.jsonl.gz", "rt") as lines:
        for number, line in enumerate(lines):
            prompt: list[int] = []
            for t, keep, pairs in json.loads(line)["requests"]:
                prompt = prompt[:keep]
                for first, count in zip(pairs[::2], pairs[1::2], strict=True):
                    prompt.extend((number << 32) + block for block in range(first, first + count))
                prompts.append((number * START_GAP_S + t, prompt))
    prompts.sort(key=lambda item: item[0])
    return (prompt for _, prompt in prompts)


TRACES = {
    "conversation": lambda: Trace("conversation", mooncake("conversation")),
    "synthetic": lambda: Trace("synthetic", mooncake("synthetic")),
    "agentic": lambda: Trace("agentic", agentic()),
}
