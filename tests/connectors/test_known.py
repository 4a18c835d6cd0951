"""What host memory was found to hold is believed until the store says otherwise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from kvtier.config import load_settings
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason
from kvtier.store import Space, Store
from kvtier_connectors import known
from kvtier_connectors.known import KnownRun, KnownRuns

LAYOUT = KVLayout(2, 1, 8, "float32", 16)
DIGESTS = [BlockDigest(number.to_bytes(32, "little")) for number in range(64)]


@pytest.fixture
def space() -> Iterator[Space]:
    with Store(load_settings(overrides={"host.size": "128KiB", "host.slab": "64KiB"})) as store:
        yield store.open_space(Namespace("m", "r", LAYOUT, "test", Shard(0, 1)))
        store.check_integrity()
        assert store.stats().leases == 0


@pytest.fixture
def runs(space: Space) -> Iterator[KnownRuns]:
    runs = KnownRuns(space)
    yield runs
    runs.close()


def put(space: Space, numbers: Sequence[int]) -> None:
    with space.owner("test") as owner:
        for number in numbers:
            parent = DIGESTS[number - 1] if number else None
            reserved = space.reserve(DIGESTS[number], parent, owner)
            if not isinstance(reserved, DropReason):
                space.commit([reserved])


def count_looked(space: Space, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the number of blocks that each lookup of the space is asked for."""
    asked, look_up = [], space.lookup

    def counting(digests: Sequence[BlockDigest]) -> object:
        asked.append(len(digests))
        return look_up(digests)

    monkeypatch.setattr(space, "lookup", counting)
    return asked


def test_asking_again_looks_at_nothing_that_has_not_changed(
    space: Space, runs: KnownRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(space, range(10))
    asked = count_looked(space, monkeypatch)
    run, found = runs.look_up(None, DIGESTS, 0, 10)
    for first in (0, 3, 10):
        run, again = runs.look_up(run, DIGESTS, first, 10 - first)
        assert (again.num_blocks, again.miss) == (10 - first, None)
    assert (found.num_blocks, asked) == (10, [10])
    run, beyond = runs.look_up(run, DIGESTS, 0, 12)
    assert (beyond.num_blocks, beyond.miss) == (10, "absent")
    assert asked == [10, 2], "only what is behind the run that is known"


def test_more_blocks_than_are_remembered_leave_nothing_known(
    space: Space, runs: KnownRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(space, range(10))
    run, _ = runs.look_up(None, DIGESTS, 0, 10)
    asked = count_looked(space, monkeypatch)
    monkeypatch.setattr(runs, "_num_gone", known.MAX_NOTED + 1)
    _, found = runs.look_up(run, DIGESTS, 0, 10)
    assert (found.num_blocks, asked) == (10, [10])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_goes_the_answer_is_the_stores(seed: int, space: Space, runs: KnownRuns) -> None:
    chance = random.Random(seed)
    run: KnownRun | None = None
    num_found = num_again = 0
    for _ in range(400):
        match chance.randrange(8):
            case 0:
                start = chance.randrange(len(DIGESTS))
                put(space, range(start, min(len(DIGESTS), start + 8)))
            case 1:
                put(space, range(chance.randrange(16)))
            case 2 if chance.random() < 0.1:
                assert isinstance(space._store, Store)
                space._store.reset()
        first, num_blocks = chance.randrange(20), chance.randrange(30)
        before = run
        run, found = runs.look_up(run, DIGESTS, first, num_blocks)
        assert found == space.lookup(DIGESTS[first : first + num_blocks]).poll()
        num_found += found.num_blocks > 0
        num_again += run is before
    assert num_found > 20
    assert num_again > 20
