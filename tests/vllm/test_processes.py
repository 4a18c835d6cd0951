"""Three workers that each hold a part of every block, and another process that begins with what the first one left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import is_anothers
from tests.server.daemon_rig import ServerProcess, short_directory

NUM_FULL = 9  # blocks of 32 in 300 tokens

ENGINE = """
import json, os, sys

def ask(llm, tokens):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    (answer,) = output.outputs
    logprobs = [steps[token].logprob for token, steps in zip(answer.token_ids, answer.logprobs)]
    return [output.num_cached_tokens, list(answer.token_ids), logprobs]

def main(model, settings, *numbers):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier_connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"settings": json.loads(settings)},
    )
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=14,
        max_model_len=384,
        max_num_seqs=2,
        tensor_parallel_size=3,
        kv_transfer_config=transfer,
        seed=0,
    )
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    side = connector.scheduler_side
    prompts = [[100 + (7 * index + 977 * number) % 30_000 for index in range(300)] for number in range(3)]
    answers = [ask(llm, prompts[int(number)]) for number in numbers]
    found = {
        "answers": answers,
        "hits": dict(side.store.stats().hits),
        "dropped": {str(reason): count for reason, count in side.kv.stats().ledger.dropped.items()},
        "errors": sorted(map(list, connector._errors)),
    }
    side.kv.check_integrity()
    llm.llm_engine.engine_core.shutdown()
    print("FOUND", json.dumps(found), flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run_engine(directory: Path, model: Path, settings: dict[str, object], numbers: str) -> dict[str, Any]:
    """An engine with three workers in processes of their own, which is asked the prompts of these numbers in turn."""
    script = directory / "engine.py"  # the workers' processes import the main module
    script.write_text(ENGINE)
    command = [sys.executable, "-W", "ignore", str(script), str(model), json.dumps(settings), *numbers]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    before = shared_memory()
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    for path in shared_memory() - before:  # vLLM ends its workers by a signal, and leaves these
        if path.name.startswith(("vllm_dist_", "sem.mp-", "psm_")) and not is_anothers(f"shared memory {path}"):
            path.unlink(missing_ok=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert told, f"rc {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads(told[0].removeprefix("FOUND "))
    assert isinstance(found, dict)
    return found


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())  # noqa: S108


@pytest.mark.timeout(600)
def test_a_restore_of_three_workers_is_a_prefix_hit_bit_for_bit_in_another_process_too(
    model_dir: Path, tmp_path: Path
) -> None:
    disk = {"disk.path": [str(tmp_path / "disk")], "disk.size": "1GiB", "disk.min_free": 1}
    settings = {"host.size": "256MiB"} | disk
    first = run_engine(tmp_path, model_dir, settings, "00120")
    cold, hit, _, _, restored = first["answers"]
    assert (cold[0], hit[0]) == (0, NUM_FULL * 32)
    assert restored == hit, "from host memory"
    assert (first["hits"], first["dropped"], first["errors"]) == ({"host": NUM_FULL}, {}, [])
    second = run_engine(tmp_path, model_dir, settings, "0")
    assert second["answers"] == [hit], "from disk"
    assert (second["hits"], second["dropped"], second["errors"]) == ({"disk": NUM_FULL}, {}, [])


@pytest.mark.timeout(600)
def test_three_workers_copy_to_and_from_a_servers_memory(model_dir: Path, tmp_path: Path) -> None:
    sizes = {"host.size": "1GiB", "host.slab": "64MiB"}
    with short_directory() as directory, ServerProcess(directory, sizes) as server:
        url = f"kvtier+unix://{server.socket}"
        settings = {"host.pool": "server", "host.size": "512MiB", "server.url": url, "server.timeout_s": 5.0}
        first = run_engine(tmp_path, model_dir, settings, "0012")
        cold, hit, _, _ = first["answers"]
        assert (cold[0], hit[0]) == (0, NUM_FULL * 32)
        assert (first["dropped"], first["errors"]) == ({}, [])
        second = run_engine(tmp_path, model_dir, settings, "0")
        assert second["answers"] == [hit]
        assert (second["hits"], second["dropped"], second["errors"]) == ({"server": NUM_FULL}, {}, [])
