"""What the demo found, as an object and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.metrics import LedgerSnapshot

__all__ = ["BelowResult", "DemoResult", "DiskResult", "RedisResult", "ServerResult"]


@dataclass(frozen=True, slots=True)
class DiskResult:
    """The disk between the two processes. Counts are of blocks."""

    directory: str
    file_system: str
    """Its type. 'tmpfs' is memory."""
    mode: str
    """'direct', or 'buffered' where the file system refuses direct I/O: then reads may come from memory."""
    blocks_written: int
    bytes_written: int
    """Of those blocks."""
    unstored_blocks: int
    """What the flush before the first process's end could not store."""
    recovered_blocks: int
    """What the second process found."""
    damaged_blocks: int
    """Blocks that were not what had been written; they were recomputed."""


@dataclass(frozen=True, slots=True)
class RedisResult:
    """The Redis server between the two processes, which held nothing of this run before. Counts are of blocks."""

    url: str
    prefix: str
    """What this run's keys began with; removed at its end."""
    blocks_written: int
    bytes_written: int
    """Of those blocks."""
    unstored_blocks: int
    """What the flush before the first process's end could not store."""
    damaged_blocks: int
    """Blocks that were not what had been written; they were recomputed."""


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The kvtier-server between the two processes, which held nothing before. Counts are of blocks."""

    url: str
    blocks_written: int
    bytes_written: int
    """Of those blocks."""
    unstored_blocks: int
    """What the flush before the first process's end could not store."""
    damaged_blocks: int
    """Blocks that were not what had been written; they were recomputed."""


BelowResult = DiskResult | RedisResult | ServerResult
_NAMES = {DiskResult: "disk", RedisResult: "redis", ServerResult: "server"}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; times are medians over the measured turns.

    below: the tier that the new process restored from; its name, `disk`, `redis` or `server`, is its key, also
    among the times.
    """

    model: str
    prompt_tokens: int
    ttft_s: dict[str, float]
    restored_tokens: dict[str, int]
    memcpy_share: dict[str, float]
    num_blocks_compared: int
    kv_bit_equal: bool
    tokens_equal: bool
    ledger: LedgerSnapshot
    below: BelowResult

    @property
    def below_name(self) -> str:
        return _NAMES[type(self.below)]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": self.ttft_s,
            "restored_tokens": self.restored_tokens,
            "memcpy_share": self.memcpy_share,
            "kv_bit_equal": self.kv_bit_equal,
            "tokens_equal": self.tokens_equal,
            "ledger": _ledger(self.ledger),
            self.below_name: asdict(self.below),
        }


def _ledger(ledger: LedgerSnapshot) -> Mapping[str, Any]:
    return {
        "due": ledger.due,
        "stored": ledger.stored,
        "dropped": {reason.value: count for reason, count in ledger.dropped.items()},
        "pending": ledger.pending,
    }
