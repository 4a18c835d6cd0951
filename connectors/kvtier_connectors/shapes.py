"""Block layouts of known models by name, for commands that need a layout and no model."""

from __future__ import annotations

from kvtier.errors import LayoutError
from kvtier.layout import KVLayout

__all__ = ["SHAPES", "shape_layout"]

SHAPES = {
    "llama8b": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16),
    "smollm2": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16),
}
"""llama8b: Llama-3.1-8B, blocks of 2 MiB in segments of 32 KiB. smollm2: SmolLM2-135M, 360 KiB in segments of 6 KiB."""


def shape_layout(name: str) -> KVLayout:
    """The layout of that name; raises LayoutError that lists them."""
    if name not in SHAPES:
        raise LayoutError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]
