"""The proof: blocks as they were when they were computed, against what stands in a pool after a restore."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.keys import BlockDigest
    from kvtier_engine.llm import LLM, Completion

__all__ = ["KVCheck", "block_kv", "restored_blocks"]


@dataclass(slots=True)
class KVCheck:
    """Blocks as the process that computed them had them, before any was evicted, and how restored ones compare.

    The counts are of blocks, by the kind of restore: "host", and the name of the tier below it.
    """

    before: dict[BlockDigest, tuple[int, bytes]] = field(default_factory=dict)
    restored: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    different: int = 0
    moved: int = 0

    def remember(self, llm: LLM, tokens: list[int]) -> None:
        """Digest a prompt's blocks while the GPU pool holds them. Those that are known already were restored since."""
        for digest, block_id in llm.engine.cached_blocks(tokens):
            if digest not in self.before:
                self.before[digest] = (block_id, block_kv(llm, block_id))

    def compare(self, kind: str, num_restored: int, kv: Mapping[BlockDigest, bytes]) -> None:
        """One turn restored `num_restored` blocks, which now hold this. A block never seen counts as different."""
        self.restored[kind] += num_restored
        self.compared[kind] += len(kv)
        for digest, now in kv.items():
            self.different += digest not in self.before or self.before[digest][1] != now

    def note_places(self, blocks: Mapping[BlockDigest, int]) -> None:
        """Where restored blocks stand now, in the pool that they were evicted from."""
        self.moved += sum(digest in self.before and self.before[digest][0] != at for digest, at in blocks.items())

    def holds_for(self, *kinds: str) -> bool:
        """True when every block restored in each of these ways was compared, none differed, and those that came back to
        their pool stand in other places than before."""
        complete = all(self.compared[kind] == self.restored[kind] > 0 for kind in kinds)
        return complete and self.different == 0 and self.moved > 0


def restored_blocks(
    llm: LLM, messages: list[dict[str, str]], answer: Completion
) -> list[tuple[BlockDigest, int, bytes]]:
    """Of a turn just answered, the blocks that were restored for it: digest, place in the pool, SHA-256 of the KV."""
    assert llm.engine.connector is not None
    size = llm.engine.connector.space.namespace.layout.block_tokens
    first = answer.gpu_hit_tokens // size
    cached = llm.engine.cached_blocks(llm.tokenizer.encode_chat(messages))
    blocks = cached[first : first + answer.restored_tokens // size]
    return [(digest, block_id, block_kv(llm, block_id)) for digest, block_id in blocks]


def block_kv(llm: LLM, block_id: int) -> bytes:
    """SHA-256 of what a block of the pool holds."""
    digest = hashlib.sha256()
    for plane in llm.engine.block_bytes(block_id):
        digest.update(plane)
    return digest.digest()
