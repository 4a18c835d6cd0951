"""The plug-in in a whole vLLM with the real model: what is restored is what the prefix cache would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig

from kvtier.testing.redis_servers import RedisServer
from tests.redis_servers.needed import needs_redis_server
from tests.server.daemon_rig import ServerProcess, short_directory

PROMPT = [100 + 7 * index % 30_000 for index in range(1000)]
OTHERS = [[100 + (11 * index + 977 * number) % 30_000 for index in range(1000)] for number in range(3)]
NUM_FULL = 992  # tokens of its full blocks


def with_kvtier(**settings: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier_connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"settings": {"host.size": "256MiB"} | settings},
    )


def ask(llm: Any, tokens: list[int]) -> tuple[int, tuple[int, ...], list[float]]:
    """How many tokens were cached, those put out, and their log probabilities."""
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    (completion,) = output.outputs
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return output.num_cached_tokens, tuple(completion.token_ids), [steps[token].logprob for token, steps in chosen]


def test_restored_from_host_memory_and_from_disk_is_a_prefix_hit_bit_for_bit(
    make_llm: Callable[..., Any], tmp_path: Path
) -> None:
    disk = {"disk.path": [str(tmp_path)], "disk.size": "1GiB", "disk.min_free": 1}
    llm = make_llm(num_gpu_blocks_override=48, max_model_len=1408, kv_transfer_config=with_kvtier(**disk))
    assert ask(llm, PROMPT)[0] == 0
    hit = ask(llm, PROMPT)
    assert hit[0] == NUM_FULL
    for other in OTHERS:
        assert ask(llm, other)[0] == 0
    assert ask(llm, PROMPT) == hit, "from host memory"
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    assert connector.scheduler_side.store.stats().hits == {"host": NUM_FULL // 32}
    assert connector.scheduler_side.kv.stats().ledger.dropped == {}
    for other in OTHERS:
        ask(llm, other)
    llm = make_llm(num_gpu_blocks_override=48, max_model_len=1408, kv_transfer_config=with_kvtier(**disk))
    assert ask(llm, PROMPT) == hit, "from disk, in another engine"
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    assert connector.scheduler_side.store.stats().hits == {"disk": NUM_FULL // 32}
    assert not connector._errors


@needs_redis_server
def test_restored_from_redis_on_another_machine_is_a_prefix_hit_bit_for_bit(make_llm: Any) -> None:
    with RedisServer() as server:
        sizes = {"num_gpu_blocks_override": 48, "max_model_len": 1408}
        llm = make_llm(kv_transfer_config=with_kvtier(**{"redis.url": server.url}), **sizes)
        assert ask(llm, PROMPT)[0] == 0
        hit = ask(llm, PROMPT)
        assert hit[0] == NUM_FULL
        for other in OTHERS:
            ask(llm, other)
        llm = make_llm(kv_transfer_config=with_kvtier(**{"redis.url": server.url}), **sizes)
        assert ask(llm, PROMPT) == hit
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        stats = connector.scheduler_side.store.stats()
        assert stats.hits == {"redis": NUM_FULL // 32}
        assert stats.redis.errors == {}
        assert not connector._errors
        make_llm.close()


def test_restored_from_a_kvtier_server_by_another_engine_is_a_prefix_hit_bit_for_bit(make_llm: Any) -> None:
    with short_directory() as directory, ServerProcess(directory, {"host.size": "256MiB"}) as server:
        sizes = {"num_gpu_blocks_override": 48, "max_model_len": 1408}
        settings = {"server.url": f"kvtier+unix://{server.socket}", "server.timeout_s": 5.0}
        llm = make_llm(kv_transfer_config=with_kvtier(**settings), **sizes)
        assert ask(llm, PROMPT)[0] == 0
        hit = ask(llm, PROMPT)
        assert hit[0] == NUM_FULL
        for other in OTHERS:
            ask(llm, other)
        llm = make_llm(kv_transfer_config=with_kvtier(**settings), **sizes)
        assert ask(llm, PROMPT) == hit
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        stats = connector.scheduler_side.store.stats()
        assert stats.hits == {"server": NUM_FULL // 32}
        assert stats.server.mapped_bytes == 256 << 20
        assert (stats.server.errors, stats.server.refusals, stats.server.damaged_blocks) == ({}, {}, 0)
        assert not connector._errors
        make_llm.close()
