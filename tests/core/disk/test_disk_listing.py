"""What a disk tier holds and what it lets go of by itself are told, so that others can follow it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvtier.keys import Key
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome
from kvtier.tiers.disk import DiskTier

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig


def listed(rig: DiskRig, tier: DiskTier) -> dict[Key, Key | None]:
    blocks = tier.keys(rig.key(0)[:16])
    assert len(dict(blocks)) == len(blocks)
    return dict(blocks)


def follow(rig: DiskRig, tier: DiskTier) -> list[Key]:
    """Keys that were told as gone; checks that the tier's locks are free when it is told."""
    gone: list[Key] = []

    def note(keys: object) -> None:
        assert isinstance(keys, list)
        assert not tier._catalog.lock.locked()
        assert not any(volume._rotation.locked() or volume._append.locked() for volume in tier._volumes)
        gone.extend(keys)

    tier.subscribe_gone(note)
    return gone


def test_it_lists_its_blocks_with_their_parents_also_after_a_restart(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, 1, 2, 3)
    rig.put(tier, 9)
    expected = {rig.key(1): None, rig.key(2): rig.key(1), rig.key(3): rig.key(2), rig.key(9): None}
    assert listed(rig, tier) == expected
    assert tier.keys(b"x" * 16) == []
    tier.remove([rig.key(2)])
    del expected[rig.key(2)]
    assert listed(rig, tier) == expected
    tier.close()
    again = rig.open()
    assert listed(rig, again) == expected
    again.start_epoch(1)
    assert listed(rig, again) == {}
    again.close()
    assert listed(rig, again) == {}


def test_who_follows_it_knows_what_evictions_leave(rig: DiskRig) -> None:
    tier = rig.open(capacity=1280 << 10, segment_bytes=256 << 10)
    gone = follow(rig, tier)
    stored: set[Key] = set()
    for start in range(0, 600, 6):
        rig.put(tier, *range(start, start + 6))
        stored |= {rig.key(n) for n in range(start, start + 6)}
        rig.get(tier, start)  # used: some are kept when their segment goes
    assert tier.snapshot().evicted_blocks == len(gone) > 0
    assert tier.snapshot().readmitted_blocks > 0
    assert stored - set(gone) == set(listed(rig, tier))
    tier.check_integrity()


def test_a_damaged_block_is_told_when_it_is_found_out(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, 1, 2)
    gone = follow(rig, tier)
    file, offset = rig.find(1)
    rig.flip(file, offset + 4096 + 7)
    assert rig.get(tier, 1, 2) == [ReadOutcome.DAMAGED, ReadOutcome.OK]
    assert gone == [rig.key(1)]


def test_an_error_of_the_device_makes_a_block_gone_too(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, 1)
    gone = follow(rig, tier)
    rig.files.inject(Fault.READ_ERROR, times=1)
    assert rig.get(tier, 1) == [ReadOutcome.ERROR]
    assert gone == [rig.key(1)]
    assert listed(rig, tier) == {}


def test_who_has_ended_hears_no_more(rig: DiskRig) -> None:
    tier = rig.open()
    heard: list[object] = []
    end = tier.subscribe_gone(heard.append)
    other = follow(rig, tier)
    end()
    rig.put(tier, *range(200))
    assert other
    assert not heard


@pytest.mark.parametrize("num_threads", [3])
def test_it_can_be_listed_while_others_write(rig: DiskRig, num_threads: int) -> None:
    tier = rig.open()
    gone = follow_quietly(tier)
    threads = [
        threading.Thread(target=lambda first=first: rig.put(tier, *range(first, first + 150)))
        for first in range(0, 1000 * num_threads, 1000)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tier.keys(rig.key(0)[:16])
    for thread in threads:
        thread.join()
    held = set(listed(rig, tier))
    assert held == {key for key in map(rig.key, range(1000 * num_threads)) if tier.contains([key])[0]}
    assert held.isdisjoint(gone)


def follow_quietly(tier: DiskTier) -> list[Key]:
    gone: list[Key] = []
    tier.subscribe_gone(gone.extend)
    return gone
