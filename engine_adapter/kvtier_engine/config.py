"""The engine's own settings, and the start-up checks between model, pool and lengths."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvtier.errors import ConfigError

__all__ = ["EngineConfig", "resolve_max_model_len"]

logger = logging.getLogger("kvtier.engine")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine runs at once.

    max_num_seqs: requests running or restoring at once.
    max_batch_tokens: tokens computed in one step; a longer prompt is computed in chunks.
    max_model_len: longest prompt plus output, in tokens; None takes what the model and the pool allow.
    """

    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"EngineConfig.{name} must be an integer of at least 1, not {value!r}")
        if self.max_model_len is not None and (type(self.max_model_len) is not int or self.max_model_len < 2):
            raise ConfigError(f"EngineConfig.max_model_len must be None or at least 2, not {self.max_model_len!r}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"EngineConfig.max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request computes a token a step"
            )


def resolve_max_model_len(
    asked: int | None, max_positions: int, num_blocks: int, block_tokens: int, block_bytes: int
) -> int:
    """The longest sequence that this engine serves; any request that passes it can run alone in the pool.

    A length that was asked for and does not fit is a ConfigError; one that was derived is cut to the pool, and said.
    """
    pool_tokens = num_blocks * block_tokens
    wanted = max_positions if asked is None else asked
    if wanted > max_positions:
        raise ConfigError(f"max_model_len {wanted} is more than the model's {max_positions} positions; lower it")
    if wanted <= pool_tokens:
        return wanted
    needed_gib = -(-wanted // block_tokens) * block_bytes / 2**30
    pool_gib = num_blocks * block_bytes / 2**30
    if asked is not None:
        raise ConfigError(
            f"one request of max_model_len {wanted} needs {needed_gib:.2f} GiB of KV, more than the block pool's "
            f"{pool_gib:.2f} GiB ({num_blocks} blocks of {block_tokens} tokens); the pool allows {pool_tokens} tokens. "
            f"Lower max_model_len or raise num_blocks"
        )
    logger.warning("max_model_len is cut from the model's %d to %d, what the block pool holds", wanted, pool_tokens)
    return pool_tokens
