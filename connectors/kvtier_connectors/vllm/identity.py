"""What a vLLM engine's KV is KV of: two engines share it only where it is the same, byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

import vllm

from kvtier.keys import Namespace, Shard
from kvtier_connectors.fingerprint import model_fingerprint
from kvtier_connectors.vllm.pages import Pages

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["namespace_of"]

NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")
"""Of a model's config: where it lies, and what wrote it."""
LENGTH_FREE_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that are the same whatever the longest request may be; others may not be."""


def namespace_of(vllm_config: VllmConfig, pages: Pages, model: str | None) -> Namespace:
    """model: what identifies the weights; None: their bytes, which are read for that."""
    config, cache = vllm_config.model_config, vllm_config.cache_config
    parts = [
        str(config.dtype),
        cache.cache_dtype,
        f"quantization {config.quantization}",
        f"config {_config_digest(config)}",
        f"vllm {vllm.__version__}",
        cache.prefix_caching_hash_algo,
    ]
    if vllm_config.load_config.load_format == "dummy":
        parts.append(f"dummy weights {config.seed}")
    weights = model or model_fingerprint(config.model)
    return Namespace(weights, " ".join(map(str, parts)), pages.layout, pages.name, Shard(0, 1))


def _config_digest(config: ModelConfig) -> str:
    """Of the model's config as it is in effect, `--hf-overrides` included: the same weights with another rotary base
    make other KV."""
    effective = {name: value for name, value in config.hf_config.to_dict().items() if name not in NOT_THE_MODEL}
    text = json.dumps(effective, sort_keys=True, default=_word)
    if set(re.findall(r'"(?:rope_type|type)": "(\w+)"', text)) - LENGTH_FREE_ROPES:
        text += f" {config.max_model_len}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _word(value: object) -> str:
    """Of what JSON does not have; the same in every process."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
