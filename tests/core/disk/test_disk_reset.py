"""A reset holds whatever becomes of the meta file, of the room on the device and of what was in use."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import TierError
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome, WriteOutcome

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

HIT, MISS, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.ERROR
STORED = WriteOutcome.STORED


def test_a_reset_deletes_what_was_stored(rig: DiskRig) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(40))
    before = rig.segments()
    tier.start_epoch(1)
    assert not set(before) & set(rig.segments())
    tier.check_integrity()
    assert tier.usage().used_bytes == rig.real_bytes()
    assert rig.put(tier, *range(40)) == [STORED] * 40


@pytest.mark.parametrize("crash", [False, True])
def test_a_reset_needs_no_meta_file(rig: DiskRig, crash: bool) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(40))
    old = (rig.path / "kvtier.meta").read_bytes()
    tier.start_epoch(1)
    rig.crash(tier) if crash else tier.close()
    (rig.path / "kvtier.meta").write_bytes(old)
    assert rig.held(rig.open(capacity=1 << 20), range(40)) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_full_file_system_does_not_keep_a_reset_from_holding(rig: DiskRig, again: bool) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(40))
    rig.files.inject(Fault.FULL_ON_WRITE, where="kvtier.meta")
    tier.start_epoch(3)
    assert (tier.epoch, rig.held(tier, range(40))) == (3, [])
    rig.files.heal()
    if again:
        assert rig.put(tier, "new") == [STORED]
    rig.crash(tier)
    last = rig.open(capacity=1 << 20)
    assert rig.held(last, [*range(40), "new"]) == ["new"] * again
    assert last.epoch == 3 * again


@pytest.mark.parametrize("fault", [None, Fault.STUCK, Fault.FULL_ON_WRITE])
def test_segments_in_use_are_void_too(rig: DiskRig, fault: Fault | None) -> None:
    """A reader keeps one; or none of them can be deleted. With both ways barred, the reset fails."""
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(6))
    rig.files.hold("read")
    outcomes: list[ReadOutcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(rig.get(tier, *range(6))))
    reader.start()
    rig.files.wait_stalled()
    rig.files.inject(Fault.FULL_ON_WRITE, where="kvtier.meta")
    if fault is not None:
        rig.files.inject(fault, where="segment-")
    if fault is Fault.FULL_ON_WRITE:
        with pytest.raises(TierError, match="could not write down epoch 1"):
            tier.start_epoch(1)
        rig.files.heal()
    else:
        tier.start_epoch(1)
        rig.files.release("read")
    reader.join()
    assert outcomes == [HIT] * 6
    if fault is Fault.FULL_ON_WRITE:
        tier.start_epoch(1)
    tier.check_integrity()
    rig.crash(tier)
    rig.files.heal()
    last = rig.open(capacity=1 << 20)
    assert rig.held(last, range(6)) == []
    assert last.epoch in (0, 1)


def test_what_was_in_use_is_deleted_once_it_is_not(rig: DiskRig) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(6))
    (old, *_) = rig.segments()
    rig.files.hold("read")
    reader = threading.Thread(target=rig.get, args=(tier, *range(6)))
    reader.start()
    rig.files.wait_stalled()
    tier.start_epoch(1)
    assert old in rig.segments()
    rig.files.release("read")
    reader.join()
    assert rig.put(tier, "new") == [STORED]
    assert old not in rig.segments()
    tier.check_integrity()


def test_a_segment_that_could_not_be_read_at_open_is_void_after_a_reset(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    tier.close()
    old = (rig.path / "kvtier.meta").read_bytes()
    rig.files.inject(Fault.READ_ERROR, where="segment-")
    again = rig.open()
    assert rig.held(again, ["a"]) == []
    again.start_epoch(1)
    again.close()
    rig.files.heal()
    (rig.path / "kvtier.meta").write_bytes(old)
    assert rig.held(rig.open(), ["a"]) == []


def test_a_read_without_a_descriptor_costs_no_block(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(4))
    for volume in tier._volumes:
        volume._handles.drop(rig.segments()[0].name)
    rig.files.inject(Fault.NO_DESCRIPTOR)
    assert rig.get(tier, *range(4)) == [FAILED] * 4
    rig.files.heal()
    assert rig.get(tier, *range(4)) == [HIT] * 4
    assert tier.snapshot().read_errors == 4


def test_a_missing_meta_file_in_one_of_two_directories_voids_both(rig: DiskRig, tmp_path: Path) -> None:
    paths = [rig.path, tmp_path / "other"]
    tier = rig.open(*paths, capacity=2 << 20)
    rig.put(tier, *range(4))
    rig.put(tier, *range(4, 8))
    tier.close()
    (paths[1] / "kvtier.meta").unlink()
    again = rig.open(*paths, capacity=2 << 20)
    assert (again.epoch, rig.held(again, range(8))) == (1, [])


def test_large_batches_share_the_lock(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    taken = 0
    real = tier._catalog.lock

    class Counting:
        def __enter__(self) -> None:
            nonlocal taken
            taken += 1
            real.acquire()

        def __exit__(self, *_: object) -> None:
            real.release()

    monkeypatch.setattr(tier._catalog, "lock", Counting())
    keys = [rig.key("a")] * 5000
    for call in (tier.contains, tier.touch):
        taken = 0
        call(keys)
        assert taken >= 9
    taken = 0
    assert rig.get(tier, *["a"] * 600) == [HIT] * 600
    assert taken >= 4
