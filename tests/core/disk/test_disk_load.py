"""A store under load on a real disk that fails in every way there is: what is served is right, and nothing is left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.config import MemorySnapshot, Settings, load_settings
from kvtier.keys import BlockDigest, Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason, MissReason
from kvtier.stage import Stage
from kvtier.store import Space, Store
from kvtier.testing import FakeClock
from kvtier.testing.files import Fault, FaultyFiles

# As the demo's small model has them, and as Llama-3.1-8B: 360 KiB and 2 MiB.
SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
LLAMA8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)

NUM_FAULTS = 5_000  # for each of the two
NUM_CHAINS, CHAIN_BLOCKS = 16, 6
HOST_BLOCKS, DISK_BLOCKS = 24, 64
NO_EXTRAS = Extras(adapter=None, salt=None, media=())
WAIT_S = 30.0

RATES = {
    Fault.READ_ERROR: 0.15,
    Fault.SHORT_READ: 0.1,
    Fault.FLIP_ON_READ: 0.1,
    Fault.WRITE_ERROR: 0.1,
    Fault.FULL_ON_WRITE: 0.1,
    Fault.FULL_ON_ALLOCATE: 0.1,
    Fault.SHORT_WRITE: 0.1,
    Fault.TORN_WRITE: 0.1,
    Fault.LOST_WRITE: 0.05,
    Fault.FLIP_ON_WRITE: 0.05,
}


def settings_for(layout: KVLayout, directory: Path) -> Settings:
    return load_settings(
        env={},
        overrides={
            "host.size": HOST_BLOCKS * layout.block_bytes,
            "host.slab": 1 << (layout.block_bytes - 1).bit_length(),
            "disk.path": [str(directory)],
            "disk.size": DISK_BLOCKS * (layout.block_bytes + (64 << 10)),
            "disk.min_free": 1,
        },
    )


class Load:
    """Prompts that come and return, in random order, over one store. A block's bytes follow from its digest."""

    def __init__(self, directory: Path, layout: KVLayout, seed: int) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed)
        self.clock = FakeClock()
        self.layout = layout
        settings = settings_for(layout, directory)
        memory = MemorySnapshot(1 << 40, 1 << 40)
        self.store = Store(settings, memory=memory, touch=False, clock=self.clock, disk_files=self.files)
        self.space: Space = self.store.open_space(Namespace("load", "", layout, "all", Shard(0, 1)))
        self.ended = threading.Event()
        self.store.stager.subscribe(self.ended.set)
        tokens = CHAIN_BLOCKS * layout.block_tokens
        self.chains = [digest_tokens([chain] * tokens, layout.block_tokens, NO_EXTRAS) for chain in range(NUM_CHAINS)]
        self.contents: dict[BlockDigest, npt.NDArray[np.uint8]] = {}
        self.num_served = 0
        self.num_wrong = 0

    def content(self, digest: BlockDigest) -> npt.NDArray[np.uint8]:
        if digest not in self.contents:
            repeats = self.layout.block_bytes // len(digest)
            self.contents[digest] = np.tile(np.frombuffer(digest, np.uint8), repeats)
        return self.contents[digest]

    def store_chain(self, digests: list[BlockDigest]) -> None:
        """As an engine that computed the prompt: what host memory lacks is copied there."""
        with self.space.owner("computing") as owner:
            for index, digest in enumerate(digests):
                if self.space.holds(digest):
                    continue
                reserved = self.space.reserve(digest, digests[index - 1] if index else None, owner)
                if isinstance(reserved, DropReason):
                    return
                np.frombuffer(reserved.lease.view, np.uint8)[: self.layout.block_bytes] = self.content(digest)
                self.space.commit([reserved])

    def restore_chain(self, digests: list[BlockDigest]) -> None:
        """As an engine that meets the prompt again: waits for what the disk has, and reads what came."""
        stage = self.space.stage("prompt", digests, None, max_wait_s=1.0)
        if stage is not None:
            self.wait(stage)
        with self.space.owner("landing") as owner:
            leases = self.space.lease(digests, owner)
            for lease, digest in zip(leases, digests, strict=False):
                self.num_served += 1
                held = np.frombuffer(lease.view, np.uint8)[: self.layout.block_bytes]
                self.num_wrong += not np.array_equal(held, self.content(digest))
        looked_up = self.space.lookup(digests[len(leases) :]).poll()
        assert looked_up is not None
        reason = (stage.miss if stage is not None else None) or looked_up.miss
        if looked_up.num_blocks:  # came a moment after the leases, from a read that had lost its deadline
            reason = reason or MissReason.BEING_STORED
        assert len(leases) == len(digests) or reason is not None, "a miss without a reason"
        self.space.count_lookup(len(digests), len(leases), reason, stage.arrived if stage is not None else None)
        if stage is not None:
            stage.close()

    def wait(self, stage: Stage) -> None:
        """Until the stage ended by itself, or now and then until its time is over."""
        if self.random.random() < 0.05:
            self.clock.advance(1.0)
        while not stage.poll():
            self.ended.clear()
            assert stage.poll() or self.ended.wait(WAIT_S), f"a stage did not end: {self.files}"

    def run(self, num_faults: int) -> None:
        for fault, rate in RATES.items():
            self.files.inject(fault, probability=rate)
        for _ in range(100 * num_faults):
            if sum(self.files.counts.values()) >= num_faults:
                return
            digests = self.random.choice(self.chains)[: self.random.randint(1, CHAIN_BLOCKS)]
            self.restore_chain(digests)
            self.store_chain(digests)
            self.clock.advance(self.random.choice([0.0, 0.1, 1.0, 10.0]))
            if self.random.random() < 0.02:
                self.store.flush(1.0)
                self.store.check_integrity()
        raise AssertionError(f"the disk is no longer used: {self.files}, {self.store.stats()}")

    def verify(self) -> None:
        """Everything still held is right, and every block that was asked for is accounted for."""
        self.files.heal()
        self.clock.advance(120.0)
        for digests in self.chains:
            self.restore_chain(digests)
        self.store.flush(1.0)
        deadline = time.monotonic() + WAIT_S
        while self.store.stats().staging_bytes and time.monotonic() < deadline:
            self.ended.wait(0.01)  # reads that lost their deadline
        self.store.check_integrity()
        stats = self.store.stats()
        assert self.num_wrong == 0, f"{self.num_wrong} of {self.num_served} served blocks were wrong: {self.files}"
        assert stats.asked_blocks == stats.hit_blocks + sum(stats.misses.values())
        assert stats.leases == 0
        assert stats.staging_bytes == 0
        assert stats.disk is not None
        assert stats.disk.used_bytes <= stats.disk.capacity_bytes


@pytest.fixture(params=["smollm2", "llama8b"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return SMOLLM2 if request.param == "smollm2" else LLAMA8B


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_faults_under_load_serve_no_wrong_byte(
    tmp_path: Path, layout: KVLayout, seeds: Iterator[int]
) -> None:
    for seed in seeds:
        directory = tmp_path / str(seed)
        load = Load(directory, layout, seed)
        try:
            load.run(NUM_FAULTS)
            load.verify()
            assert load.num_served > 100
            assert len(load.files.counts) == len(RATES), f"not every fault struck: {load.files}"
        finally:
            load.files.heal()
            load.store.close()
        again = Load(directory, layout, seed)
        try:
            again.verify()
        finally:
            again.store.close()
        assert {path.suffix for path in directory.iterdir()} <= {".kvt", ".lock", ".meta"}
