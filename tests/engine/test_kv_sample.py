"""The KV that the codecs are measured on: full blocks of a real model, and only those."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier_connectors.bench import codecs

pytestmark = pytest.mark.model


def test_every_full_block_of_real_text_comes(real_model_dir: Path) -> None:
    from kvtier_engine.kv_sample import sample_blocks

    blocks = sample_blocks(real_model_dir, num_texts=2, text_tokens=64)
    block_bytes = 30 * 2 * 16 * 3 * 64 * 2
    # Both prompts are the manual's 64 tokens and a template's: other tokens, other KV.
    assert len(blocks) >= 8
    assert {len(block) for block in blocks} == {block_bytes}
    assert len(set(blocks)) >= len(blocks) // 2
    tokens = np.frombuffer(b"".join(blocks), np.uint16).reshape(len(blocks), 60, 16, -1)
    assert tokens.any(axis=(1, 3)).all(), "a token's KV is all zeros"
    exponents = (tokens >> 7) & 0xFF
    assert (exponents < 140).all(), "values beyond 2**13 are no KV of this model"


def test_the_codecs_run_on_it(real_model_dir: Path) -> None:
    from kvtier_engine.kv_sample import sample_blocks

    figures = list(codecs.codec_figures("smollm2", sample_blocks(real_model_dir, 1, 64), 1))
    ratios = {figure.figure: figure.value for figure in figures if figure.figure.endswith(".ratio")}
    assert ratios["codec.shuffle_lz4.ratio"] > 1.05, "the high bytes of bf16 should repeat"
