"""vLLM's KV cache as pages of bytes: one a layer and block, copied whole, whatever is in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import KVKind, KVLayout
from kvtier_kernels import BlockPlanes
from kvtier_kernels.device import DevicePlanes

__all__ = ["Pages"]


class Pages:
    """What a block is in one worker. Raises ConfigError for a cache that is not supported, by name.

    Supported: one group of full attention layers, MLA included, whose pages are equally large.
    """

    def __init__(self, config: KVCacheConfig, num_ranks: int) -> None:
        """num_ranks: workers that each hold their part of every block."""
        groups = config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"kvtier keeps models with one KV cache group, this one has {len(groups)}: hybrid and sliding-window "
                f"models are not supported; run vLLM without the connector"
            )
        (group,) = groups
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec):
            raise ConfigError(f"kvtier keeps full attention, and not {type(spec).__name__}")
        if spec.page_size_bytes % spec.block_size:
            raise ConfigError(f"a page of {spec.page_size_bytes} bytes is no whole number of bytes a token")
        self.num_layers = len(group.layer_names)
        self.block_tokens = spec.block_size
        self.page_bytes = int(spec.page_size_bytes)
        self.num_blocks = config.num_blocks
        self.num_ranks = num_ranks
        token_bytes = spec.page_size_bytes // spec.block_size
        self.layout = KVLayout(self.num_layers * num_ranks, 1, token_bytes, "int8", spec.block_size, KVKind.MLA)
        kind, dtype = type(spec).__name__, str(spec.dtype).removeprefix("torch.")
        order = getattr(config, "kv_cache_layout", None)
        self.name = f"vllm {kind} {spec.num_kv_heads}x{spec.head_size} {dtype} {order}"
        """What the bytes of a page mean, for the namespace."""

    @property
    def rank_bytes(self) -> int:
        """Bytes of one worker's part of a block."""
        return self.num_layers * self.page_bytes

    def planes(self, kv_caches: Mapping[str, torch.Tensor]) -> BlockPlanes | DevicePlanes:
        """The registered caches, layer by layer; layers that share another's cache count once. Raises LayoutError where
        they are not what the config says."""
        layers = _distinct(kv_caches)
        if len(layers) != self.num_layers:
            raise LayoutError(
                f"vLLM registered {len(layers)} different KV caches, its config has {self.num_layers} layers"
            )
        pages = [_by_block(name, tensor, self.num_blocks) for name, tensor in layers.items()]
        is_on_cpu = all(page.device.type == "cpu" for page in pages)
        planes = BlockPlanes.from_arrays(pages) if is_on_cpu else DevicePlanes(pages)
        if set(planes.segment_bytes) != {self.page_bytes}:
            raise LayoutError(
                f"pages of the KV caches are {sorted(set(planes.segment_bytes))} bytes long, the config says "
                f"{self.page_bytes}"
            )
        return planes


def _distinct(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name of each cache: layers may share one."""
    names = {(tensor.device, tensor.data_ptr(), tensor.stride()): name for name, tensor in [*kv_caches.items()][::-1]}
    first = set(names.values())
    return {name: tensor for name, tensor in kv_caches.items() if name in first}


def _by_block(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The tensor as [num_blocks, page]: blocks are its first dimension, and each one's bytes lie in one piece."""
    if tensor.shape[0] != num_blocks:
        raise LayoutError(
            f"the KV cache {name} has shape {tuple(tensor.shape)}, whose first dimension is not its "
            f"{num_blocks} blocks: a layout that kvtier does not know"
        )
    page = tensor[0]
    order = sorted(range(page.dim()), key=page.stride, reverse=True)
    dense = page.permute(order)
    if not dense.is_contiguous():
        raise LayoutError(
            f"the KV cache {name} has strides {tensor.stride()}: a block's bytes are not in one piece, a layout that "
            f"kvtier does not know"
        )
    return tensor.permute(0, *(dim + 1 for dim in order))
