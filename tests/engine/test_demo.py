"""`kvtier demo` on a small random model: what it reports, and that damage is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers under the real tokenizer and chat template: the demo's whole path in seconds."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtier_engine.weights import ensure_default_model

    real = ensure_default_model(lambda text: None)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (real / name).exists():
            shutil.copy(real / name, directory)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(directory)
    return directory


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvtier", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)


def test_the_json_object_is_all_of_stdout(tiny_model: Path) -> None:
    done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == {
        "model",
        "prompt_tokens",
        "ttft_s",
        "restored_tokens",
        "memcpy_share",
        "kv_bit_equal",
        "tokens_equal",
        "ledger",
    }
    assert result["kv_bit_equal"] is True
    assert result["tokens_equal"] is True
    assert set(result["ttft_s"]) == {"recompute", "gpu_hit", "host"}
    assert result["restored_tokens"]["host"] >= 5 * 1300
    assert result["memcpy_share"]["store"] > 0
    assert result["memcpy_share"]["restore"] > 0
    ledger = result["ledger"]
    assert ledger["due"] == ledger["stored"] + sum(ledger["dropped"].values()) + ledger["pending"]
    assert ledger["stored"] > 0
    assert "returns; restored" in done.stderr


def test_a_flipped_byte_is_noticed(tiny_model: Path) -> None:
    done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--corrupt")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["kv_bit_equal"] is False
    assert "FAILED" in done.stderr


def test_a_directory_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    done = run_demo("--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
