"""vLLM's own scheduler and any KV connector, without a model: every token's KV is checked, by whoever reads it."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.kv_content import VOCAB_SIZE, KVPool, Trace, expected_output

__all__ = ["SchedulerRig", "Step", "StuckError", "WrongKVError"]

NUM_LAYERS = 2
NUM_KV_HEADS = 2
HEAD_SIZE = 16
CPU_LAYOUT = "LBHNC"  # of each layer's tensor, from the outermost: block, head, token, elements of K and V
IDLE_S = 0.001

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4 * HEAD_SIZE,
    "intermediate_size": 8 * HEAD_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 1 << 16,
    "vocab_size": VOCAB_SIZE,
    "torch_dtype": "bfloat16",
}
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # of a safetensors file: for connectors that tell models apart by them


class WrongKVError(AssertionError):
    """KV that a request reads, or that vLLM would hand to the next one, is not what its prefix makes."""


class StuckError(AssertionError):
    """Requests were left after as many steps as a test allows."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step came to."""

    scheduled: dict[str, int]
    """Tokens computed, by request."""
    preempted: frozenset[str]
    tokens: dict[str, list[int]]
    """Tokens put out, by request."""
    finished: dict[str, str]
    """Why requests ended, as vLLM names it: "length", "error" and so on."""
    kv: Any
    """The worker's KVConnectorOutput."""
    stats: Any
    """vLLM's SchedulerStats, with the connector's in `kv_connector_stats`; None where it gave none."""

    @property
    def is_idle(self) -> bool:
        """Nothing was computed, and no copy ended."""
        kv = self.kv
        ended = kv.finished_sending or kv.finished_recving or kv.invalid_block_ids or kv.failed_recving
        return not self.scheduled and not ended


@dataclass(slots=True)
class _Live:
    """A request that was added, until it ends."""

    request: Any
    trace: Trace
    expected: list[int]
    num_hashes_known: int = 0

    def states(self, end: int) -> list[int]:
        """Those of the first `end` tokens."""
        tokens = self.request.all_token_ids
        self.trace.extend(tokens[len(self.trace.states) : end])
        return self.trace.states[:end]


@dataclass(slots=True)
class _Work:
    """One request's part of a step: positions `start` to `end`, in the blocks of its table."""

    live: _Live
    table: list[int]
    start: int
    end: int
    wrong: list[tuple[int, int]] = field(default_factory=list)
    """(position, layer) at which it read what it must not, the first of each layer."""

    @property
    def states(self) -> list[int]:
        return self.live.states(self.end)


class SchedulerRig:
    """A scheduler, both halves of a connector, and a pool whose content is known for every prefix.

    A step goes as in vLLM's engine core with its CPU model runner, in one thread; the connector's metadata reach the
    worker as a copy, as they do between processes. Instead of a model the forward pass writes what the tokens' prefixes
    make, having read all that came before them: a request that reads anything else goes on with wrong KV and wrong
    tokens, as a model would. A step fails (WrongKVError) where wrong KV was read and the connector reported none of it
    as failed, where a running request's table or a block in the prefix cache holds it afterwards, or where a token put
    out is not the one that its prompt makes.

    The blocks of `num_blocks` are one fewer than it says: vLLM keeps one for itself. A pool that is small beside
    `max_num_seqs` requests of `max_model_len` tokens preempts. `max_model_len` is what fits in the pool unless given.
    Without a `connector_name` vLLM runs without a connector. `has_events`: vLLM collects KV events, and publishes none.
    """

    def __init__(
        self,
        module_path: str | None = None,
        connector_name: str | None = None,
        extra_config: Mapping[str, object] | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 32,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        kv_load_failure_policy: str = "recompute",
        policy: str = "fcfs",
        has_events: bool = False,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self._live: dict[str, _Live] = {}
        self._states_of: dict[bytes, list[int]] = {}  # of the tokens of a block, by vLLM's hash of it and its prefix
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="scheduler-rig-"))
            (Path(directory) / "config.json").write_text(json.dumps(MODEL_CONFIG))
            (Path(directory) / "model.safetensors").write_bytes(NO_WEIGHTS)
            transfer = connector_name and KVTransferConfig(
                kv_connector=connector_name,
                kv_connector_module_path=module_path,
                kv_role="kv_both",
                kv_connector_extra_config=dict(extra_config or {}),
                kv_load_failure_policy=kv_load_failure_policy,
            )
            max_model_len = max_model_len or (num_blocks - 1) * block_size
            self.vllm_config = VllmConfig(
                model_config=ModelConfig(
                    model=directory,
                    skip_tokenizer_init=True,
                    dtype="bfloat16",
                    max_model_len=max_model_len,
                    enforce_eager=True,
                ),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
                    max_model_len=max_model_len,
                    is_encoder_decoder=False,
                    policy=policy,
                    async_scheduling=False,  # as `step` does; elsewhere than on a CPU vLLM overlaps steps unless told
                ),
                cache_config=CacheConfig(
                    block_size=block_size,
                    enable_prefix_caching=enable_prefix_caching,
                    num_gpu_blocks_override=num_blocks,
                ),
                device_config=DeviceConfig("cpu"),
                kv_transfer_config=transfer or None,
                kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if has_events else None,
            )
            layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(NUM_LAYERS)]
            self.pool = KVPool(layers, num_blocks, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE)
            self.kv_cache_config = self._make_kv_cache_config(layers)
            self.worker: Any = self._open_worker(stack) if transfer else None
            self.scheduler = Scheduler(
                vllm_config=self.vllm_config,
                kv_cache_config=self.kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=block_size,
                hash_block_size=block_size,
                log_stats=True,
            )
            stack.callback(self.scheduler.shutdown)
            hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self.hasher = get_request_block_hasher(block_size, hash_function)
            self._closing = stack.pop_all()

    def _make_kv_cache_config(self, layers: Iterable[str]) -> Any:
        """The engine core makes it of what workers tell: how it does differs from version to version of vLLM."""
        cache_config = self.vllm_config.cache_config
        spec = FullAttentionSpec(
            block_size=cache_config.block_size, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        enough = cache_config.num_gpu_blocks_override * spec.page_size_bytes * NUM_LAYERS
        workers = SimpleNamespace(
            get_kv_cache_specs=lambda: [dict.fromkeys(layers, spec)],
            get_supported_kv_cache_layouts=lambda: [[CPU_LAYOUT]],
            set_kv_cache_layout=lambda *_: None,
            determine_available_memory=lambda: [enough],
            initialize_from_config=lambda _: None,
            compile_or_warm_up_model=lambda: None,
        )
        core = SimpleNamespace(model_executor=workers)
        kv_cache_config = EngineCore._initialize_kv_caches(core, self.vllm_config)
        assert kv_cache_config.num_blocks == cache_config.num_gpu_blocks_override
        return kv_cache_config

    def _open_worker(self, stack: ExitStack) -> Any:
        worker = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config)
        stack.callback(worker.shutdown)
        worker.register_kv_caches(dict(self.pool.tensors))
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut both halves of the connector down, whatever is under way."""
        self._closing.close()

    @property
    def connector(self) -> Any:
        """The scheduler's half."""
        return self.scheduler.connector

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def status(self, request_id: str) -> str:
        """The name of a live request's RequestStatus."""
        return str(self.scheduler.requests[request_id].status.name)

    def add_request(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> None:
        """adapter: the name of a LoRA adapter, whose KV is another."""
        extra = {"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params is not None else None
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            pooling_params=None,
            cache_salt=cache_salt,
            priority=priority,
            lora_request=adapter and LoRARequest(adapter, 1, "/nowhere"),
            block_hasher=self.hasher,
        )
        self.outputs[request_id] = []
        content = "/".join(filter(None, (cache_salt, adapter))) or None
        self._live[request_id] = _Live(request, Trace(content), expected_output(tokens, max_tokens, content))
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """As when a client goes away; nothing, if the request has ended."""
        if self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED):
            self.finished[request_id] = "abort"
            self._learn_hashes()

    def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget what the pool holds; with `running`, preempt first; with `connector`, reset that too."""
        return bool(self.scheduler.reset_prefix_cache(running, connector))

    def run(self, max_steps: int = 1000, idle: Callable[[], None] | None = None) -> list[Step]:
        """Step until nothing is left to do. `idle` is called after every step that came to nothing: to let copies end,
        a moment unless given. Raises StuckError after `max_steps`."""
        steps: list[Step] = []
        while self.scheduler.has_requests():
            if len(steps) == max_steps:
                left = {name: request.status.name for name, request in self.scheduler.requests.items()}
                raise StuckError(f"after {max_steps} steps: requests {left}, {self.num_free_blocks} blocks free")
            steps.append(self.step())
            if steps[-1].is_idle:
                idle() if idle else time.sleep(IDLE_S)
        return steps

    def check_nothing_is_held(self) -> None:
        """Without requests every block is free."""
        assert self.scheduler.requests == {}
        assert self.num_free_blocks == self.kv_cache_config.num_blocks - 1

    def step(self) -> Step:
        output = self.scheduler.schedule()
        works = {name: self._work(name, count) for name, count in output.num_scheduled_tokens.items()}
        kv = self._execute(output, works)
        for name, work in works.items():
            self._check_reads(name, work, kv.invalid_block_ids)
        sampled = [self._sample(work) for work in works.values()]
        runner_output = ModelRunnerOutput(
            req_ids=list(works),
            req_id_to_index={name: index for index, name in enumerate(works)},
            sampled_token_ids=sampled,
            kv_connector_output=kv if self.worker is not None else None,
        )
        results = self.scheduler.update_from_output(output, runner_output).get(0)
        self.num_steps += 1
        self.num_preemptions += len(output.preempted_req_ids or ())
        outputs = results.outputs if results else []
        step = Step(
            scheduled=dict(output.num_scheduled_tokens),
            preempted=frozenset(output.preempted_req_ids or ()),
            tokens={result.request_id: list(result.new_token_ids) for result in outputs},
            finished={
                result.request_id: str(result.finish_reason) for result in outputs if result.finish_reason is not None
            },
            kv=kv,
            stats=results.scheduler_stats if results else None,
        )
        self._check_tokens(step)
        self._learn_hashes()
        self._check_pool(kv.invalid_block_ids)
        return step

    def _work(self, name: str, count: int) -> _Work:
        live = self._live[name]
        end = live.request.num_computed_tokens  # the scheduler has counted this step's already
        return _Work(live, self._table(name), end - count, end)

    def _table(self, name: str) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(table)

    def _execute(self, output: Any, works: Mapping[str, _Work]) -> Any:
        """The worker's step, in the order of vLLM's model runner for CPUs."""
        kv = KVConnectorOutput()
        if self.worker is None:
            self._forward(works)
            return kv
        worker, metadata = self.worker, copy.deepcopy(output.kv_connector_metadata)
        worker.handle_preemptions(metadata)
        attention = self._attention_metadata(works) if works else None
        with set_forward_context(attention, self.vllm_config):
            worker.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(get_forward_context())
            self._forward(works, attention)
            if not output.has_sync_kv_loads:
                worker.start_load_kv(get_forward_context())
            worker.wait_for_save()
        transfers = worker.get_transfer_results(output.finished_req_ids)
        kv.finished_sending = transfers.finished_sending
        kv.finished_recving = transfers.finished_recving
        kv.failed_recving = transfers.failed_recving
        kv.invalid_block_ids = worker.get_block_ids_with_load_errors()
        kv.kv_connector_stats = worker.get_kv_connector_stats()
        kv.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        kv.kv_connector_worker_meta = copy.deepcopy(worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        return kv

    def _attention_metadata(self, works: Mapping[str, _Work]) -> dict[str, Any]:
        size = self.pool.block_size
        slots = [
            work.table[position // size] * size + position % size
            for work in works.values()
            for position in range(work.start, work.end)
        ]
        metadata = SimpleNamespace(slot_mapping=torch.tensor(slots), num_actual_tokens=len(slots))
        return dict.fromkeys(self.pool.tensors, metadata)

    def _forward(self, works: Mapping[str, _Work], attention: Mapping[str, Any] | None = None) -> None:
        """Layer by layer, write all tokens of the step, then read all that they attend to.

        What was read wrong shows in all that is computed from it: the layers above, and the token put out.
        """
        for index, (layer, tensor) in enumerate(self.pool.tensors.items()):
            if self.worker is not None and attention is not None:
                self.worker.wait_for_layer_load(layer)
            for work in works.values():
                self.pool.write(index, work.table, work.start, work.states[work.start :], bool(work.wrong))
            for work in works.values():
                wrong = self.pool.first_wrong(index, work.table, work.states)
                if wrong is not None:
                    work.wrong.append((wrong, index))
            if self.worker is not None and attention is not None:
                self.worker.save_kv_layer(layer, tensor, attention[layer])

    def _check_reads(self, name: str, work: _Work, invalid: set[int]) -> None:
        """Wrong KV was read only from a block that the connector reports, so that vLLM drops what came of it."""
        if not work.wrong:
            return
        position, layer = min(work.wrong)
        block = work.table[position // self.pool.block_size]
        if block not in invalid:
            raise WrongKVError(
                f"step {self.num_steps}: {name} read wrong KV at position {position} of the {work.start} before its "
                f"step, in block {block}, layer {layer}"
            )

    def _sample(self, work: _Work) -> list[int]:
        if work.end < work.live.request.num_tokens:
            return []  # more of the prompt is to come
        work.live.states(work.end)
        token = work.live.trace.next_token(work.end)
        return [(token + 1) % VOCAB_SIZE if work.wrong else token]

    def _check_tokens(self, step: Step) -> None:
        for name, tokens in step.tokens.items():
            self.outputs[name] += tokens
            expected = self._live[name].expected[: len(self.outputs[name])]
            if self.outputs[name] != expected:
                raise WrongKVError(f"step {self.num_steps}: {name} put out {self.outputs[name]}, must be {expected}")
        self.finished |= step.finished

    def _learn_hashes(self) -> None:
        """Of every full block of the requests; those that ended are forgotten."""
        size = self.pool.block_size
        for name, live in list(self._live.items()):
            hashes = live.request.block_hashes
            if live.num_hashes_known < len(hashes):
                states = live.states(len(hashes) * size)
                for index in range(live.num_hashes_known, len(hashes)):
                    self._states_of[bytes(hashes[index])] = states[index * size : (index + 1) * size]
                live.num_hashes_known = len(hashes)
            if name in self.finished:
                del self._live[name]

    def _check_pool(self, invalid: set[int]) -> None:
        """After a step, all that counts as computed is what its prefix makes: in tables, and in the prefix cache.

        Where a load before the forward pass failed, vLLM leaves the blocks in the prefix cache, and in the tables of
        requests that share them, for a running request to compute them next: such are checked when they are read.
        """
        to_come: set[int] = set()
        for request in self.scheduler.running:
            table = self._table(request.request_id)
            to_come |= set(table[request.num_computed_tokens // self.pool.block_size :])
            if invalid.isdisjoint(table):
                states = self._live[request.request_id].states(request.num_computed_tokens)
                for layer in range(NUM_LAYERS):
                    wrong = self.pool.first_wrong(layer, table, states)
                    if wrong is not None:
                        block = table[wrong // self.pool.block_size]
                        raise WrongKVError(
                            f"step {self.num_steps}: wrong KV of the running request {request.request_id} at position "
                            f"{wrong}, in block {block}, layer {layer}"
                        )
        cached = {
            block.block_id: self._states_of[bytes(get_block_hash(block.block_hash))]
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None and not block.is_null and block.block_id not in to_come
        }
        if blocks := self.pool.wrong_blocks(cached):
            raise WrongKVError(f"step {self.num_steps}: blocks {blocks} in the prefix cache hold wrong KV")
