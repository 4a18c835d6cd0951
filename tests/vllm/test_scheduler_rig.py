"""The rig itself: requests run as vLLM runs them, a right connector passes, and every kind of wrong KV is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from tests.vllm.kv_content import expected_output
from tests.vllm.scheduler_rig import SchedulerRig, Step, StuckError, WrongKVError

PROMPT = list(range(1000, 1200))
FULL_BLOCKS = len(PROMPT) // 32


class IdleConnector(KVConnectorBase_V1):
    """Has nothing, and keeps nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


@dataclass
class Moves(KVConnectorMetadata):
    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    """Keys and blocks, by request."""
    stores: list[tuple[bytes, int]] = field(default_factory=list)


class RememberingConnector(IdleConnector):
    """Keeps every full block in a dictionary, and loads it: as it should, or with the fault that `fault` names.

    With `is_async` requests wait for their loads, otherwise they come before the step's forward pass.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.is_async: bool = extra.get("is_async", True)
        self.fault: str | None = extra.get("fault")
        self.size: int = vllm_config.cache_config.block_size
        # Of the scheduler's half.
        self.known: set[bytes] = set()
        self.requests: dict[str, Any] = {}
        self.local: dict[str, int] = {}
        self.loading: dict[str, list[tuple[bytes, int]]] = {}
        self.asked_for: dict[int, bytes] = {}
        # Of the worker's half.
        self.tensors: dict[str, torch.Tensor] = {}
        self.kept: dict[bytes, list[torch.Tensor]] = {}
        self.received: set[str] = set()
        self.failed: set[int] = set()
        self.late: list[tuple[bytes, int]] = []
        self.loads_done = 0

    def key(self, request: Any, index: int) -> bytes:
        if self.fault == "ignores the salt":
            return repr(list(request.all_token_ids)[: (index + 1) * self.size]).encode()
        return bytes(request.block_hashes[index])

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = end = num_computed_tokens // self.size
        while (end + 1) * self.size < request.num_tokens and self.key(request, end) in self.known:
            end += 1
        self.local[request.request_id] = first
        return (end - first) * self.size, self.is_async and end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self.local[request.request_id]
        (table,) = blocks.get_block_ids()
        count = num_external_tokens // self.size
        moves = [(self.key(request, index), table[index]) for index in range(first, first + count)]
        if moves:
            self.loading[request.request_id] = moves
            self.asked_for |= {block: key for key, block in moves}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        moves = Moves(loads=self.loading)
        self.loading = {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            (table,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
            for index in range((request.num_computed_tokens + count) // self.size):
                if (key := self.key(request, index)) not in self.known:
                    moves.stores.append((key, table[index]))
                    self.known.add(key)
        return moves

    def update_connector_output(self, connector_output: Any) -> None:
        for block in connector_output.invalid_block_ids:
            self.known.discard(self.asked_for[block])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.tensors = kv_caches

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Moves)
        if self.fault == "stores too early":
            self.keep(kv_connector_metadata.stores)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, Moves)
        self.copy_in(self.late)
        self.late = []
        for name, wanted in moves.loads.items():
            if self.fault == "never reports":
                continue
            if self.is_async:
                self.received.add(name)
            if self.fault == "reports too early":
                self.late += wanted
            elif self.fault == "wrong order":
                self.copy_in([(key, block) for (key, _), (_, block) in zip(wanted, reversed(wanted), strict=True)])
            elif self.fault == "fails once" and self.loads_done == 0:
                self.failed.add(wanted[2][1])
                self.copy_in(wanted[:2])
            else:
                self.copy_in(wanted)
            self.loads_done += 1

    def copy_in(self, wanted: list[tuple[bytes, int]]) -> None:
        for key, block in wanted:
            for tensor, kept in zip(self.tensors.values(), self.kept[key], strict=True):
                tensor[block] = kept
            if self.fault == "flips a bit":
                tensor = list(self.tensors.values())[-1]
                tensor.view(torch.int16)[block, -1, -1, -1] ^= 1

    def keep(self, stores: list[tuple[bytes, int]]) -> None:
        for key, block in stores:
            self.kept.setdefault(key, [tensor[block].clone() for tensor in self.tensors.values()])

    def wait_for_save(self) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, Moves)
        self.keep(moves.stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self.received = self.received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


def open_rig(connector: type | None = None, config: dict[str, object] | None = None, **sizes: Any) -> SchedulerRig:
    return SchedulerRig(__name__, connector.__name__ if connector else None, config, **sizes)


def remember_and_return(rig: SchedulerRig, salt: str | None = None) -> list[Step]:
    """A prompt is computed, then comes again, under a salt if one is given, when the pool has forgotten it."""
    rig.add_request("first", PROMPT, 8)
    rig.run()
    assert rig.reset_prefix_cache()
    rig.add_request("again", PROMPT, 8, salt)
    return rig.run(100)


def computed(steps: list[Step], request_id: str) -> int:
    return sum(step.scheduled.get(request_id, 0) for step in steps)


@pytest.mark.parametrize("connector", [None, IdleConnector])
def test_requests_put_out_what_their_prompts_make(connector: type | None) -> None:
    with open_rig(connector) as rig:
        prompts = {"short": [5], "block": PROMPT[:32], "long": PROMPT, "salted": PROMPT}
        for name, prompt in prompts.items():
            rig.add_request(name, prompt, 40, "salt" if name == "salted" else None)
        rig.run()
        assert rig.outputs["long"] == expected_output(PROMPT, 40)
        assert rig.outputs["salted"] == expected_output(PROMPT, 40, "salt") != rig.outputs["long"]
        assert rig.finished == dict.fromkeys(prompts, "length")
        rig.check_nothing_is_held()


def test_the_prefix_cache_serves_a_prompt_that_returns_until_it_is_reset() -> None:
    with open_rig(IdleConnector) as rig:
        rig.add_request("first", PROMPT, 1)
        rig.run()
        rig.add_request("hit", PROMPT, 1)
        assert rig.step().scheduled == {"hit": len(PROMPT) - FULL_BLOCKS * 32}
        assert rig.reset_prefix_cache()
        rig.add_request("miss", PROMPT, 1)
        assert rig.step().scheduled == {"miss": len(PROMPT)}


def test_a_small_pool_preempts_and_every_request_ends() -> None:
    with open_rig(RememberingConnector, num_blocks=14, max_num_seqs=4) as rig:
        for number in range(6):
            rig.add_request(f"request {number}", range(number * 500, number * 500 + 70), 80)
        steps = rig.run()
        assert rig.num_preemptions == sum(len(step.preempted) for step in steps) > 0
        assert set(rig.finished.values()) == {"length"}
        rig.check_nothing_is_held()


def test_prompts_are_computed_in_chunks() -> None:
    with open_rig(max_num_batched_tokens=64) as rig:
        rig.add_request("long", PROMPT, 1)
        assert [step.scheduled["long"] for step in rig.run() if step.scheduled] == [64, 64, 64, 8]


def test_an_aborted_request_leaves_nothing() -> None:
    with open_rig(IdleConnector) as rig:
        rig.add_request("gone", PROMPT, 100)
        rig.step()
        rig.abort("gone")
        rig.run()
        assert rig.finished == {"gone": "abort"}
        rig.check_nothing_is_held()


def test_running_requests_are_computed_again_after_a_reset() -> None:
    with open_rig(RememberingConnector) as rig:
        rig.add_request("long", PROMPT, 40)
        for _ in range(10):
            rig.step()
        assert rig.reset_prefix_cache(running=True)
        rig.run()
        assert rig.outputs["long"] == expected_output(PROMPT, 40)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_right_connector_passes(is_async: bool) -> None:
    with open_rig(RememberingConnector, {"is_async": is_async}) as rig:
        steps = remember_and_return(rig)
        assert computed(steps, "again") == len(PROMPT) - FULL_BLOCKS * 32 + 7
        assert rig.outputs["again"] == rig.outputs["first"]
        rig.check_nothing_is_held()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_failed_to_load_is_computed(is_async: bool) -> None:
    with open_rig(RememberingConnector, {"is_async": is_async, "fault": "fails once"}) as rig:
        steps = remember_and_return(rig)
        assert [step.kv.invalid_block_ids for step in steps if step.kv.invalid_block_ids]
        assert computed(steps, "again") >= len(PROMPT) - 2 * 32 + 7
        assert rig.outputs["again"] == rig.outputs["first"]


def test_what_failed_to_load_ends_the_request_under_the_other_policy() -> None:
    with open_rig(RememberingConnector, {"fault": "fails once"}, kv_load_failure_policy="fail") as rig:
        remember_and_return(rig)
        assert rig.finished == {"first": "length", "again": "error"}
        assert rig.outputs["again"] == []
        rig.check_nothing_is_held()


@pytest.mark.parametrize("fault", ["flips a bit", "wrong order", "reports too early", "stores too early"])
@pytest.mark.parametrize("is_async", [False, True])
def test_wrong_kv_is_found(is_async: bool, fault: str) -> None:
    with (
        open_rig(RememberingConnector, {"is_async": is_async, "fault": fault}) as rig,
        pytest.raises(WrongKVError, match=r"again|prefix cache"),
    ):
        remember_and_return(rig)


def test_kv_of_another_salt_is_wrong_kv() -> None:
    with open_rig(RememberingConnector) as rig:
        remember_and_return(rig, "salt")
    with (
        open_rig(RememberingConnector, {"fault": "ignores the salt"}) as rig,
        pytest.raises(WrongKVError, match="again"),
    ):
        remember_and_return(rig, "salt")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_write_into_a_block_of_another_request_is_found(is_cached: bool) -> None:
    """As of a load that goes on after its blocks were given to others."""
    with open_rig(IdleConnector) as rig:
        rig.add_request("victim", PROMPT, 1 if is_cached else 100)
        rig.step()
        rig.step()
        assert ("victim" in rig.finished) is is_cached
        (tensor, *_) = rig.pool.tensors.values()
        block = next(block.block_id for block in rig.scheduler.kv_cache_manager.block_pool.blocks if block.block_hash)
        tensor[block, 0, 0, 0] = 1.0
        with pytest.raises(WrongKVError, match="prefix cache" if is_cached else "victim"):
            rig.step()


def test_a_load_that_is_never_reported_is_named() -> None:
    with (
        open_rig(RememberingConnector, {"fault": "never reports"}) as rig,
        pytest.raises(StuckError, match="WAITING_FOR_REMOTE_KVS"),
    ):
        remember_and_return(rig)
