"""Where the KV cache is: layouts that are understood and that are not, the proof at start, and the way for devices.

There is no GPU here: what a GPU's way does is run with tensors in CPU memory, its events and its driver by stand-ins.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

from kvtier.errors import ConfigError, LayoutError
from kvtier.reasons import DropReason
from kvtier_connectors.vllm import device, pages
from kvtier_connectors.vllm.device import Device
from kvtier_connectors.vllm.pages import Pages
from kvtier_kernels import BlockPlanes
from kvtier_kernels.device import DevicePlanes
from tests.vllm.plugin import OpenRig, fill, half, prompt, stats, verify_quiet, worker
from tests.vllm.scheduler_rig import SchedulerRig

HEADS, TOKENS, WIDTH = 2, 32, 32


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV caches are taken for those of a device."""

    def from_arrays(arrays: Sequence[torch.Tensor]) -> DevicePlanes:
        return DevicePlanes(arrays)

    monkeypatch.setattr(pages, "BlockPlanes", SimpleNamespace(from_arrays=from_arrays))


def caches(layout: str, num_blocks: int = 24) -> dict[str, torch.Tensor]:
    """Two layers as vLLM lays them out: [blocks, heads, tokens, elements], whatever the order in memory."""
    names = ["a", "b"]
    match layout:
        case "LBHNC":
            return {name: torch.zeros(num_blocks, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16) for name in names}
        case "LBNHC":
            return {
                name: torch.zeros(num_blocks, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2)
                for name in names
            }
        case "LHBNC":
            return {
                name: torch.zeros(HEADS, num_blocks, TOKENS, WIDTH, dtype=torch.bfloat16).transpose(0, 1)
                for name in names
            }
        case "BLHNC":
            pool = torch.zeros(num_blocks, len(names), HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
            return {name: pool[:, layer] for layer, name in enumerate(names)}
        case "BLNHC":
            pool = torch.zeros(num_blocks, len(names), TOKENS, HEADS, WIDTH, dtype=torch.bfloat16)
            return {name: pool[:, layer].transpose(1, 2) for layer, name in enumerate(names)}
        case "BHLNC":
            pool = torch.zeros(num_blocks, HEADS, len(names), TOKENS, WIDTH, dtype=torch.bfloat16)
            return {name: pool[:, :, layer] for layer, name in enumerate(names)}
    raise AssertionError(layout)


def pages_of(open_rig: OpenRig) -> Pages:
    return Pages(open_rig(num_blocks=24).kv_cache_config, 1)


@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_block_is_its_bytes_in_every_layout_that_has_them_in_one_piece(
    layout: str, is_device: bool, open_rig: OpenRig, request: pytest.FixtureRequest
) -> None:
    """Block 3 of every layer goes to block 5 of another cache, and nothing else changes."""
    known = pages_of(open_rig)
    if is_device:
        request.getfixturevalue("on_a_device")
    source, target = caches(layout), caches(layout)
    for tensor in source.values():
        tensor.copy_(torch.randn(tensor.shape))
    host = np.zeros(known.rank_bytes, np.uint8)
    first, second = Device(known.planes(source)), Device(known.planes(target))
    first.prove()
    first.backend.gather(first.planes, [3], host, [0])
    second.backend.scatter(second.planes, [5], host, [0])
    for name, tensor in target.items():
        assert torch.equal(tensor[5], source[name][3])
        tensor[5] = 0
        assert not tensor.any()


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_layout_that_cuts_blocks_into_pieces_is_refused_by_name(layout: str, open_rig: OpenRig) -> None:
    with pytest.raises(LayoutError, match=r"KV cache a has strides .* not in one piece"):
        pages_of(open_rig).planes(caches(layout))


def test_a_device_whose_order_of_copies_is_not_known_is_refused_by_name() -> None:
    planes = DevicePlanes([torch.zeros(4, 64, dtype=torch.uint8, device="meta")])
    with pytest.raises(LayoutError, match="ordered on meta"):
        Device(planes)


def test_layers_that_share_a_cache_count_once(open_rig: OpenRig) -> None:
    known, tensors = pages_of(open_rig), caches("LBHNC")
    planes = known.planes(tensors | {"shares a": tensors["a"], "shares b": tensors["b"]})
    assert isinstance(planes, BlockPlanes)
    assert planes.block_bytes == known.rank_bytes
    with pytest.raises(LayoutError, match="registered 1 different KV caches, its config has 2"):
        known.planes({"a": tensors["a"], "shares a": tensors["a"]})


def test_a_latent_is_a_page_as_well(open_rig: OpenRig) -> None:
    """MLA: one vector a token in place of keys and values."""
    config = copy.deepcopy(open_rig(num_blocks=24).kv_cache_config)
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config.kv_cache_groups[0].kv_cache_spec = spec
    known = Pages(config, 1)
    assert known.page_bytes == TOKENS * 576 * 2
    assert "MLA" in known.name
    tensors = {name: torch.zeros(24, 1, TOKENS, 576, dtype=torch.bfloat16) for name in ("a", "b")}
    found = Device(known.planes(tensors))
    found.prove()
    assert found.planes.block_bytes == known.rank_bytes == 2 * known.page_bytes


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=64),
            "SlidingWindowSpec",
        ),
        (None, "one KV cache group, this one has 2"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(spec: Any, words: str, open_rig: OpenRig) -> None:
    config = copy.deepcopy(open_rig(num_blocks=24).kv_cache_config)
    if spec is None:
        config.kv_cache_groups *= 2
    else:
        config.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(ConfigError, match=words):
        Pages(config, 1)


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_copies_that_do_not_keep_bytes_are_found_at_start(
    op: str, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(num_blocks=24)
    before = {name: tensor.clone() for name, tensor in rig.pool.tensors.items()}
    found = Device(worker(rig)._pages.planes(rig.pool.tensors))
    call = getattr(found.backend, op)

    def shifted(planes: Any, ids: Sequence[int], host: Any, offsets: Sequence[int]) -> None:
        call(planes, [block_id - 1 for block_id in ids] if host.any() else ids, host, offsets)

    def skipping(*_: Any) -> None:
        pass

    monkeypatch.setattr(found.backend, op, skipping if op == "scatter" else shifted)
    if op == "scatter":
        with pytest.raises(LayoutError, match="do not keep its bytes"):
            found.prove()
    else:
        found.prove()  # it reads nothing but zeros back until something was written
    assert all(torch.equal(tensor, before[name]) for name, tensor in rig.pool.tensors.items())


@pytest.mark.parametrize("seed", range(3))
def test_any_traffic_through_the_way_for_devices(seed: int, on_a_device: None, open_rig: OpenRig) -> None:
    chance = random.Random(seed)
    rig = open_rig({"host.size": chance.choice(["2MiB", "16MiB"])}, num_blocks=24, max_num_seqs=4)
    assert isinstance(worker(rig)._known_device.planes, DevicePlanes)
    for number in range(40):
        tokens = prompt(10_000 * chance.randrange(4), chance.randrange(1, 10), chance.randrange(1, 32))
        rig.add_request(f"r{number}", tokens, chance.choice([1, 3, 40]))
        for _ in range(chance.randrange(12)):
            if rig.scheduler.has_requests():
                rig.step()
    rig.run(100_000)
    assert stats(rig).hits["host"] > 0
    verify_quiet(rig)


def is_pinned(rig: SchedulerRig) -> bool:
    """Whether the worker's thread got to an end with it, soon."""
    taking = worker(rig)._known_memory._taking
    return taking is not None and taking.is_ready.wait(10)


class Driver:
    """A GPU's event and driver, told when to go on."""

    def __init__(self) -> None:
        self.may_pin = threading.Event()
        self.is_pinned = True
        self.recorded = 0
        self.num_queries = 0

    def pin(self, *_: object) -> bool:
        assert self.may_pin.wait(10)
        return self.is_pinned

    def unpin(self, *_: object) -> None:
        assert self.is_pinned
        self.is_pinned = False

    def record(self, stream: object) -> None:
        assert stream == "the runner's"
        self.recorded += 1

    def query(self) -> bool:
        self.num_queries += 1
        return self.num_queries % 3 == 0


@pytest.fixture
def driver(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setattr(device, "pin", found.pin)
    monkeypatch.setattr(device, "unpin", found.unpin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the runner's")
    yield found
    found.may_pin.set()


def test_nothing_is_stored_while_host_memory_is_not_pinned_and_no_step_waits(driver: Driver, open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=24)
    fill(rig)
    ledger = half(rig).stats().ledger
    assert (ledger.stored, DropReason.BACKLOG in ledger.dropped) == (0, True)
    driver.may_pin.set()
    assert is_pinned(rig)
    fill(rig, "later ")
    assert half(rig).stats().ledger.stored > 0
    assert driver.recorded > 0, "copies begin behind an event"
    assert driver.num_queries > driver.recorded
    verify_quiet(rig)


def test_memory_that_cannot_be_pinned_is_told_and_used(
    driver: Driver, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    driver.is_pinned = False
    driver.may_pin.set()
    rig = open_rig(num_blocks=24)
    fill(rig)
    assert is_pinned(rig)
    fill(rig, "later ")
    assert half(rig).stats().ledger.stored > 0
    assert "did not pin the 16 MiB" in caplog.text
    verify_quiet(rig)


def test_an_event_that_does_not_fire_is_not_waited_for_without_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "query", lambda: False)
    assert not device._Recorded(torch.device("cuda")).wait(0.01)
