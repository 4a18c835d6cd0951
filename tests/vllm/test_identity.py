"""Two engines share KV only where it is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier_connectors.vllm.identity import namespace_of
from kvtier_connectors.vllm.pages import Pages
from tests.vllm.plugin import OpenRig


@pytest.fixture
def namespace(open_rig: OpenRig) -> Callable[..., bytes]:
    """Of an engine whose config was changed by a function; the digest, under which its blocks are kept."""
    rig = open_rig(num_blocks=24)

    def digest(change: Callable[[Any], object] = lambda _: None, model: str | None = "weights") -> bytes:
        config = copy.deepcopy(rig.vllm_config)
        change(config)
        return namespace_of(config, Pages(rig.kv_cache_config, 1), model).digest(0)

    return digest


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.model_config.hf_config.update({"rope_theta": 500.0}),
        lambda config: config.model_config.hf_config.update({"rms_norm_eps": 0.1}),
        lambda config: config.model_config.hf_config.update({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        lambda config: setattr(config.model_config, "quantization", "fp8"),
        lambda config: setattr(config.model_config, "dtype", torch.float32),
        lambda config: setattr(config.cache_config, "cache_dtype", "fp8"),
        lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda config: setattr(config.load_config, "load_format", "dummy"),
    ],
    ids=["rope", "norm", "scaling", "quantization", "dtype", "cache dtype", "hash", "dummy weights"],
)
@pytest.mark.parametrize("model", [None, "weights"])
def test_what_makes_other_kv_has_other_keys(
    model: str | None, change: Callable[[Any], object], namespace: Callable[..., bytes]
) -> None:
    assert namespace(change, model) != namespace(model=model)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.model_config.hf_config, "_name_or_path", "/elsewhere"),
        lambda config: config.model_config.hf_config.update({"transformers_version": "9"}),
        lambda config: setattr(config.model_config, "max_model_len", 64),
        lambda config: setattr(config.load_config, "load_format", "safetensors"),
        lambda config: setattr(config.scheduler_config, "max_num_seqs", 1),
    ],
    ids=["path", "version", "length", "format", "batch"],
)
def test_what_makes_the_same_kv_has_the_same(change: Callable[[Any], object], namespace: Callable[..., bytes]) -> None:
    assert namespace(change) == namespace()


def test_a_rope_that_depends_on_the_longest_request_is_told_apart_by_it(namespace: Callable[..., bytes]) -> None:
    def with_length(length: int) -> Callable[[Any], None]:
        def change(config: Any) -> None:
            config.model_config.hf_config.update({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}})
            config.model_config.max_model_len = length

        return change

    assert namespace(with_length(64)) == namespace(with_length(64))
    assert namespace(with_length(64)) != namespace(with_length(128))
