"""KV of the default model over real text, as `kvtier bench codecs` asks for it by the entry point `kvtier.samples`."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

__all__ = ["sample_blocks"]

logger = logging.getLogger("kvtier.engine")

NUM_TEXTS = 4
TEXT_TOKENS = 1024
SPARE_BLOCKS = 4


def sample_blocks(
    model_dir: Path | str | None = None, num_texts: int = NUM_TEXTS, text_tokens: int = TEXT_TOKENS
) -> list[bytes]:
    """Every full block of bf16 KV that the model, by default SmolLM2-135M, computes for the opening turns of
    `num_texts` conversations of about `text_tokens` tokens each. Nothing of kvtier's store is involved.

    Takes half a minute; the first time half a minute more, to convert the model. Raises ConfigError where a package of
    the engine extra, or the model's, is missing.
    """
    from kvtier_connectors.fingerprint import model_fingerprint
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.demo.sessions import make_sessions
    from kvtier_engine.hf_runner import HFRunner
    from kvtier_engine.llm import LLM
    from kvtier_engine.sampling import SamplingParams
    from kvtier_engine.tokenizer import Tokenizer
    from kvtier_engine.weights import ensure_default_model

    directory = ensure_default_model(logger.info) if model_dir is None else Path(model_dir)
    tokenizer = Tokenizer.load(directory)
    prompts: list[list[int]] = []
    for session in make_sessions(num_texts, tokenizer, text_tokens):
        session.ask(0)
        prompts.append(tokenizer.encode_chat(session.messages))
    runner = HFRunner.load(directory, num_blocks=1)
    block_tokens = runner.layout.block_tokens
    num_blocks = sum(-(-len(prompt) // block_tokens) for prompt in prompts) + SPARE_BLOCKS * num_texts
    runner = runner.with_pool(num_blocks)
    config = EngineConfig(max_model_len=max(map(len, prompts)) + 1)
    with LLM.from_parts(runner, tokenizer, model_fingerprint(directory), config) as llm:
        for prompt in prompts:
            llm.generate([prompt], SamplingParams(max_tokens=1))
    return _full_blocks(runner, block_tokens)


def _full_blocks(runner: object, block_tokens: int) -> list[bytes]:
    """The blocks of the pool in which no token's place is still as it was made: all zeros."""
    import torch

    from kvtier_engine.hf_runner import HFRunner

    assert isinstance(runner, HFRunner)
    planes = [plane.contiguous().view(torch.uint8).numpy() for plane in runner.planes()]
    blocks = []
    for block_id in range(runner.num_blocks):
        block = np.stack([plane[block_id] for plane in planes])
        written = block.reshape(len(planes), block_tokens, -1).any(axis=(0, 2))
        if written.all():
            blocks.append(block.tobytes())
    return blocks
