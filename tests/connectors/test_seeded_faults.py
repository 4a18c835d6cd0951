"""Faults drawn at random, of host memory, disk and a real Redis server, under load: see `bench.seeded`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_connectors.bench.faults import quiet
from kvtier_connectors.bench.seeded import run_seeded
from tests.redis_servers.needed import needs_redis_server

NUM_FAULTS = 250

pytestmark = needs_redis_server


@pytest.mark.bug("HS14", "HS16", "CR12", "CR14", "LK05", "LK14", "SE11", "WR20", "WR23")
@pytest.mark.soak
def test_no_fault_is_served_or_left_behind(tmp_path: Path, seeds: Iterator[int]) -> None:
    for seed in seeds:
        with quiet():
            result = run_seeded(tmp_path / str(seed), NUM_FAULTS, seed)
        print(f"{result.num_faults} faults, {result.faults_a_minute:.0f} a minute: {result}")
        assert result.landed_blocks, "it compared something"
        assert sum(result.by_name.values()) == NUM_FAULTS
