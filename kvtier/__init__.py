"""kvtier keeps the KV cache of paged-attention LLM engines alive after it leaves the GPU."""

from kvtier.errors import ConfigError, KVTierError, LayoutError
from kvtier.layout import KVKind, KVLayout

__version__ = "0.1.0"
__all__ = ["ConfigError", "KVKind", "KVLayout", "KVTierError", "LayoutError", "__version__"]
