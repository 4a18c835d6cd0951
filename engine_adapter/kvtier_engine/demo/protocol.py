"""What the demo and the process of the third turns say to each other: one JSON object a line.

The demo sends `Start`, then one `Ask` a turn; the process answers with `Ready`, then one `Turn` each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from kvtier.keys import BlockDigest

__all__ = ["Ask", "Ready", "Start", "Turn"]


@dataclass(frozen=True, slots=True)
class _Message:
    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises ValueError or TypeError for a line that is no such message."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Start(_Message):
    """The engine to open. overrides: of kvtier's settings, beside environment and file, which the process inherits.

    warm_up_tokens: length of the unrelated prompt that is computed before the first turn.
    """

    model_dir: str
    num_blocks: int
    config: dict[str, int | None]
    overrides: dict[str, Any]
    warm_up_tokens: int


@dataclass(frozen=True, slots=True)
class Ready(_Message):
    """The engine is open and warm. recovered_blocks: what its disk tier found; 0 without one."""

    recovered_blocks: int


@dataclass(frozen=True, slots=True)
class Ask(_Message):
    """A conversation to answer."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn(_Message):
    """One answer. The counts are of blocks and of this turn alone.

    hits: blocks by the tier that had them. misses: blocks by reason. blocks: SHA-256 of the KV of each restored block
    as it stands in the pool, by the block's digest; both in hex.
    """

    token_ids: tuple[int, ...]
    ttft_s: float | None
    gpu_hit_tokens: int
    restored_tokens: int
    hits: dict[str, int]
    misses: dict[str, int]
    damaged_blocks: int
    blocks: dict[str, str]
    error: str | None

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "token_ids": tuple(fields["token_ids"])})

    @property
    def kv(self) -> Mapping[BlockDigest, bytes]:
        """`blocks` as bytes."""
        return {BlockDigest(bytes.fromhex(key)): bytes.fromhex(value) for key, value in self.blocks.items()}
