"""Paged attention for transformers models: K/V go into the block pool by slot, attention reads them by block table.

Everything a forward needs to know about its step travels through the model's keyword arguments as one `PagedStep`,
so there is no state between steps, and several models can run in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtier.errors import LayoutError
from kvtier_engine.runner import BatchItem

__all__ = ["ATTENTION_NAME", "STEP_ARGUMENT", "PagedStep", "Span", "paged_attention", "prepare_step", "register"]

ATTENTION_NAME = "kvtier_paged"
STEP_ARGUMENT = "kvtier_step"

_UNSUPPORTED = {
    "attention_mask": "an attention mask of its own",
    "sliding_window": "a sliding window",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
"""Arguments that models pass to change the attention, and what each means; one that is not None is refused."""


@dataclass(frozen=True, slots=True)
class Span:
    """One item's part of the flattened batch: tokens `start .. stop`, which see `num_kv` positions of the pool.

    block_ids: the blocks that hold those positions, `[ceil(num_kv / block_tokens)]`, on the pool's device.
    mask: added to the scores, `[stop - start, num_kv]`, 0 or -inf, for a chunk with a past; else None.
    """

    start: int
    stop: int
    num_kv: int
    block_ids: Tensor
    mask: Tensor | None

    @property
    def has_past(self) -> bool:
        return self.num_kv > self.stop - self.start


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward's metadata, built once and read by every layer.

    pool: `[layers, 2, num_blocks, block_tokens, kv_heads, head_dim]`, written and read in place.
    slots: `[tokens]`, where each token's K/V go: `block_id * block_tokens + offset`, all distinct.
    layers: the layers that have called, in order; the one field a forward changes.
    """

    pool: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    layers: list[int] = field(default_factory=list)


def prepare_step(pool: Tensor, batch: Sequence[BatchItem]) -> PagedStep:
    """Build the metadata of one forward over `batch`. LayoutError for a block table too short or out of range."""
    num_blocks, block_tokens = pool.shape[2], pool.shape[3]
    slots: list[Tensor] = []
    spans: list[Span] = []
    begin = 0
    for item in batch:
        num_tokens = len(item.token_ids)
        num_kv = item.start + num_tokens
        table = torch.tensor(item.block_table[: -(-num_kv // block_tokens)], dtype=torch.int64)
        if num_tokens == 0 or table.numel() * block_tokens < num_kv:
            raise LayoutError(
                f"request {item.request_id}: {len(item.block_table)} blocks of {block_tokens} tokens "
                f"for {num_tokens} tokens from position {item.start}"
            )
        if int(table.min()) < 0 or int(table.max()) >= num_blocks:
            raise LayoutError(f"request {item.request_id}: a block id outside 0..{num_blocks - 1} in its table")
        positions = torch.arange(item.start, num_kv)
        slots.append(table[positions // block_tokens] * block_tokens + positions % block_tokens)
        mask = _chunk_mask(positions, num_kv, pool) if item.start > 0 and num_tokens > 1 else None
        spans.append(Span(begin, begin + num_tokens, num_kv, table.to(pool.device), mask))
        begin += num_tokens
    return PagedStep(pool, torch.cat(slots).to(pool.device), tuple(spans))


def _chunk_mask(positions: Tensor, num_kv: int, pool: Tensor) -> Tensor:
    """A chunk with a past sees positions up to its own. Additive: SDPA would convert a boolean mask in every layer."""
    hidden = torch.arange(num_kv, device=pool.device) > positions.to(pool.device).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=pool.dtype, device=pool.device).masked_fill_(hidden, float("-inf"))


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention over the flattened batch `[1, heads, tokens, head_dim]`; the result has tokens before
    heads.

    Writes this step's K/V to the layer's planes, then attends each item over its own blocks. The step comes as
    `kvtier_step`, the layer as `module.layer_idx`. Raises LayoutError for K/V that do not fit the pool, and for any
    feature that would make the output differ from what the model means.
    """
    step: PagedStep | None = kwargs.get(STEP_ARGUMENT)
    if step is None:
        raise LayoutError(f"{type(module).__name__} does not hand its keyword arguments on to the attention")
    layer = _check_call(module, key, value, step, {**kwargs, "attention_mask": attention_mask}, dropout)
    step.layers.append(layer)
    keys, values = step.pool[layer, 0], step.pool[layer, 1]
    keys.flatten(0, 1).index_copy_(0, step.slots, key[0].transpose(0, 1))
    values.flatten(0, 1).index_copy_(0, step.slots, value[0].transpose(0, 1))
    outputs = [_attend(query[:, :, span.start : span.stop], keys, values, span, scaling) for span in step.spans]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


def _check_call(
    module: torch.nn.Module, key: Tensor, value: Tensor, step: PagedStep, options: dict[str, Any], dropout: float
) -> int:
    """The layer's index, or LayoutError."""
    for name, meaning in _UNSUPPORTED.items():
        if options.get(name) is not None:
            raise LayoutError(f"{type(module).__name__} uses {meaning} ({name}), which paged attention does not do")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False or dropout:
        raise LayoutError(
            f"{type(module).__name__} attends without causality or with dropout; only causal inference is paged"
        )
    layer = getattr(module, "layer_idx", None)
    num_layers, _, _, _, kv_heads, head_dim = step.pool.shape
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise LayoutError(f"{type(module).__name__}.layer_idx is {layer!r}; the pool has layers 0..{num_layers - 1}")
    expected = (1, kv_heads, step.slots.numel(), head_dim)
    if key.shape != expected or value.shape != expected:
        raise LayoutError(
            f"layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)}, "
            f"the pool holds {expected} (batch, KV heads, tokens, head dim)"
        )
    return layer


def _attend(query: Tensor, keys: Tensor, values: Tensor, span: Span, scaling: float | None) -> Tensor:
    """One item's queries `[1, heads, n, head_dim]` over its blocks of `keys` and `values` `[num_blocks, ...]`."""
    key, value = _gather(keys, span), _gather(values, span)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and span.mask is not None and query.is_cuda:
        # CUDA's fused kernels take a mask or grouped heads, not both; the fallback would hold all scores in memory.
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    return scaled_dot_product_attention(
        query, key, value, span.mask, is_causal=not span.has_past, scale=scaling, enable_gqa=groups > 1
    )


def _gather(plane: Tensor, span: Span) -> Tensor:
    """`[1, kv_heads, num_kv, head_dim]`: the item's positions in order, copied out of their blocks."""
    return plane.index_select(0, span.block_ids).flatten(0, 1)[: span.num_kv].transpose(0, 1).unsqueeze(0)


def register() -> None:
    """Make `paged_attention` known to transformers as "kvtier_paged"; doing it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
