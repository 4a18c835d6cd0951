"""What one block's bytes are: the layout that must match for KV to be reusable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import LayoutError

__all__ = ["DTYPE_BYTES", "KVKind", "KVLayout"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}


class KVKind(StrEnum):
    """Which tensors a layer keeps for a token."""

    KV = "kv"
    """Keys and values, each `num_kv_heads * head_dim` elements a token: two planes a layer."""
    MLA = "mla"
    """One latent of `head_dim` elements a token: one plane a layer, `num_kv_heads` is 1."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and type of one block below the GPU: `[num_layers, planes_per_layer, block_tokens, num_kv_heads,
    head_dim]`.

    A *plane* is one layer's keys, one layer's values, or one layer's latent; the block holds one contiguous
    segment of each plane, in plane order (layer 0 keys, layer 0 values, layer 1 keys, ...). Sizes are in bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    kind: KVKind = KVKind.KV

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"KVLayout.{name} must be a positive integer, not {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"KVLayout.dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.kind, KVKind):
            raise LayoutError(f"KVLayout.kind must be a KVKind, not {self.kind!r}")
        if self.kind is KVKind.MLA and self.num_kv_heads != 1:
            raise LayoutError(f"KVLayout.num_kv_heads must be 1 for an MLA latent, not {self.num_kv_heads}")

    @property
    def num_planes(self) -> int:
        return self.num_layers * (2 if self.kind is KVKind.KV else 1)

    @property
    def segment_bytes(self) -> int:
        """Bytes of one block in one plane: contiguous in the engine's pool and in the slot."""
        return self.block_tokens * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_planes * self.segment_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    def canonical_bytes(self) -> bytes:
        """The layout as bytes that are equal exactly when two layouts are.

        The part of a namespace that describes it.
        """
        fields = (self.num_layers, self.num_kv_heads, self.head_dim, self.dtype, self.block_tokens, self.kind.value)
        return "|".join(str(field) for field in fields).encode()
