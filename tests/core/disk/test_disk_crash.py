"""kill -9 in the middle of stores: what was reported stored is there, and nothing else is served."""

from __future__ import annotations

import random
import select
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvtier.tiers.base import ReadOutcome
from kvtier.tiers.disk import verify_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.core.disk.conftest import DiskRig

KILL_POINTS = 50
DEADLINE_S = 20.0
SEGMENT = 256 << 10

# Writes blocks without end, uses and removes some, and says after each batch which it may no longer lose.
WRITER = """
import hashlib, random, sys
from pathlib import Path
from kvtier.keys import make_key
from kvtier.tiers.base import ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
path, capacity, first, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
rng = random.Random(seed)
space = hashlib.sha256(b"one").digest()[:16]
def key(name):
    return make_key(space, hashlib.sha256(str(name).encode()).digest())
def block(name):
    return memoryview(random.Random(str(name)).randbytes(9000))
tier = DiskTier([path], capacity, segment_bytes=256 << 10)
name = first
while True:
    batch = range(name, name + rng.randrange(1, 6))
    name = batch.stop
    outcomes = tier.write([WriteRequest(key(each), None, block(each)) for each in batch])
    assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.ALREADY_STORED}, outcomes
    tier.read([ReadRequest(key(rng.randrange(first, name)), memoryview(bytearray(9000)))])
    print(name, flush=True)
"""


def run_until_killed(rig: DiskRig, capacity: int, first: int, reports: int, seed: int) -> int:
    """A writer that is killed after so many reports, at any moment of what it does next; the names it reported."""
    arguments = [sys.executable, "-c", WRITER, *map(str, (rig.path, capacity, first, seed))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, bufsize=0) as writer:
        assert writer.stdout is not None
        said = b""
        deadline = time.monotonic() + DEADLINE_S
        try:
            while said.count(b"\n") < reports:
                ready, _, _ = select.select([writer.stdout], [], [], deadline - time.monotonic())
                assert ready, f"seed {seed}: no report within {DEADLINE_S} s"
                piece = writer.stdout.read(4096)
                assert piece, f"seed {seed}: the writer died by itself"
                said += piece
        finally:
            writer.kill()
        said += writer.stdout.read()
    return int(said.split(b"\n")[-2])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.bug("CR13", "AC10")
def test_a_kill_at_any_moment_loses_nothing_that_was_stored(rig: DiskRig, seeds: Iterator[int]) -> None:
    """One directory through all of a seed's kills, so that each open finds what several deaths left."""
    for seed in seeds:
        kill_at_any_moment(rig, seed)
        shutil.rmtree(rig.path)


def kill_at_any_moment(rig: DiskRig, seed: int) -> None:
    rng = random.Random(seed)
    roomy = 64 << 20
    last = 0
    for point in range(KILL_POINTS):
        first, last = last, run_until_killed(rig, roomy, last, rng.randrange(1, 40), seed + point)
        tier = rig.open(capacity=roomy, segment_bytes=SEGMENT)
        tier.check_integrity()
        where = f"seed {seed}, kill {point}"
        assert rig.held(tier, range(last)) == list(range(last)), where
        assert rig.get(tier, *range(first, last), nbytes=9000) == [ReadOutcome.OK] * (last - first), where
        while rig.held(tier, [last]):  # stored, and killed before it could say so
            last += 1
        assert tier.snapshot().damaged == 0, where
        tier.close()
        assert verify_directory(rig.path).is_whole, where
    tier = rig.open(capacity=roomy, segment_bytes=SEGMENT)
    assert ReadOutcome.DAMAGED not in rig.get(tier, *range(last), nbytes=9000), f"seed {seed}"
    tier.close()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.bug("AC06")
def test_a_kill_amid_evictions_breaks_neither_cap_nor_blocks(rig: DiskRig, seeds: Iterator[int]) -> None:
    small = 5 * (SEGMENT + 4096) + (32 << 10)
    last = 0
    for seed in seeds:
        rng = random.Random(seed)
        for point in range(KILL_POINTS // 5):
            last = run_until_killed(rig, small, last, rng.randrange(20, 60), seed + point)
            where = f"seed {seed}, kill {point}"
            assert rig.real_bytes() <= small, where
            tier = rig.open(capacity=small, segment_bytes=SEGMENT)
            tier.check_integrity()
            held = rig.held(tier, range(last + 5))
            assert set(range(last - 20, last)) <= set(held), where
            assert rig.get(tier, *held, nbytes=9000) == [ReadOutcome.OK] * len(held), where
            rig.crash(tier)
