"""The engine's own settings, and the start-up checks between model, pool and lengths."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from kvtier.errors import ConfigError
from kvtier_engine.compute_share import check_share

__all__ = ["EngineConfig", "resolve_max_model_len"]

logger = logging.getLogger("kvtier.engine")

GIB = 1 << 30
POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine runs at once, and who goes first. Raises ConfigError, naming the field and the value, if one
    is out of range.

    max_num_seqs: requests running or restoring at once.
    max_batch_tokens: tokens computed in one step; a longer prompt is computed in chunks, and of more decodes than that
        some wait for the next step.
    max_model_len: longest prompt plus output, in tokens; None takes what the model and the pool allow.
    prefill_share: of the compute time, for prompts, while decodes want it too: above 0 and below 1. A step is then
        either's. Higher starts new requests sooner, lower keeps the running ones fluent. None: both share every step.
    policy: "fcfs" admits in order of arrival, "priority" the most urgent first (KVOptions.priority).
    head_patience: steps in which smaller requests may pass one that finds too few blocks at the queue's head. Then
        what it needs is kept for it. 0 keeps it at once; higher fills the pool better, and lets a large request wait.
    max_capacity_waiters: restores that may wait for blocks at once, each with what it needs kept from those behind it.
    default_max_tokens: most tokens to generate for a request that does not say; None leaves it the room that there is.
    """

    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    max_model_len: int | None = None
    prefill_share: float | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    head_patience: int = 8
    max_capacity_waiters: int = 8
    default_max_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_integer("max_num_seqs", 1)
        self._check_integer("max_batch_tokens", 1)
        self._check_integer("max_model_len", 2, is_optional=True)
        check_share(self.prefill_share, "EngineConfig.prefill_share")
        if self.policy not in POLICIES:
            raise ConfigError(f"EngineConfig.policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        self._check_integer("head_patience", 0)
        self._check_integer("max_capacity_waiters", 1)
        self._check_integer("default_max_tokens", 1, is_optional=True)

    def _check_integer(self, name: str, least: int, *, is_optional: bool = False) -> None:
        value = getattr(self, name)
        if (value is None and is_optional) or (type(value) is int and value >= least):
            return
        expected = "None or an integer" if is_optional else "an integer"
        raise ConfigError(f"EngineConfig.{name} must be {expected} of at least {least}, not {value!r}")


def resolve_max_model_len(
    asked: int | None, max_positions: int, num_blocks: int, block_tokens: int, block_bytes: int
) -> int:
    """The longest sequence that this engine serves, in tokens; any request that passes it can run alone in the pool.

    A length that was asked for is kept or refused; None takes the model's, cut to the pool with a line in the log.

    Raises ConfigError for a length that the model or the pool cannot serve, and for a pool too small for any request.
    """
    if asked is None:
        return _fit_max_model_len(max_positions, num_blocks * block_tokens)
    if asked > max_positions:
        raise ConfigError(f"max_model_len {asked} is more than the model's {max_positions} positions; lower it")
    num_needed = -(-asked // block_tokens)
    if num_needed > num_blocks:
        estimate = num_blocks * block_tokens
        clause = f" The estimated maximum model length is {estimate}." if estimate > 0 else ""
        raise ConfigError(
            f"one request of max_model_len {asked} needs {num_needed * block_bytes / GIB:.2f} GiB of KV, more than the "
            f"{num_blocks * block_bytes / GIB:.2f} GiB of the block pool ({num_blocks} blocks of {block_tokens} "
            f"tokens).{clause} Lower max_model_len or raise num_blocks"
        )
    return asked


def _fit_max_model_len(derived: int, pool_tokens: int) -> int:
    if pool_tokens >= derived:
        return derived
    if pool_tokens < 2:
        raise ConfigError(
            f"cannot auto-fit max_model_len: the block pool holds {pool_tokens} tokens, and so not even a single token "
            f"of output behind a prompt; raise num_blocks"
        )
    logger.warning("max_model_len is reduced from %d to %d, which is what the block pool holds", derived, pool_tokens)
    return pool_tokens
