"""A directory looked at from outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.disk import DamagedFrame, list_directory, verify_directory

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

PAGE = 4096
MANY = 1 << 20


def state_of(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}


@pytest.mark.parametrize("crash", [False, True])
def test_every_frame_is_listed_with_its_place(rig: DiskRig, crash: bool) -> None:
    tier = rig.open(capacity=MANY, codec="lz4")
    rig.put(tier, *range(8), nbytes=5000)
    tier.remove([rig.key(5)])
    rig.crash(tier) if crash else tier.close()
    before = state_of(rig.path)
    found = {info.header.key: info for info in list_directory(rig.path)}
    report = verify_directory(rig.path)
    assert state_of(rig.path) == before
    names = [name for name in range(8) if name != 5]
    assert found.keys() == {rig.key(name) for name in names}
    for name in names:
        file, at = rig.find(name)
        info = found[rig.key(name)]
        assert (info.file, info.page * PAGE) == (file.name, at)
        assert (info.header.raw_bytes, info.header.depth) == (5000, name)
        assert info.sequence >= 1
    assert (report.frames, report.checked_bytes) == (7, 7 * 3 * PAGE)
    assert report.is_whole
    assert not report.foreign
    rig.open(capacity=MANY)


def test_damage_is_named_with_place_and_reason(rig: DiskRig) -> None:
    tier = rig.open(capacity=MANY)
    rig.put(tier, *range(12))
    tier.close()
    places = [rig.find(name) for name in range(3)]
    for (file, at), offset in zip(places, (100, PAGE, PAGE + 4000), strict=True):
        rig.flip(file, at + offset)
    last = rig.segments()[-1]
    rig.flip(last, 20)
    (rig.path / "notes").write_text("mine")
    report = verify_directory(rig.path)
    assert not report.is_whole
    assert [(each.file, each.page * PAGE) for each in report.damaged] == [(file.name, at) for file, at in places]
    assert "damaged frame header" in report.damaged[0].problem
    assert report.damaged[1] == DamagedFrame(
        places[1][0].name, places[1][1] // PAGE, "the payload's checksum does not match"
    )
    assert [each.file for each in report.unreadable] == [last.name]
    assert report.foreign == ("notes",)
    assert len(list(list_directory(rig.path))) == report.frames - 1


@pytest.mark.parametrize("look", [list_directory, verify_directory])
def test_a_directory_that_is_none_is_refused(rig: DiskRig, tmp_path: Path, look: object) -> None:
    assert callable(look)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"disk\.path"):
            look(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no cache"):
        look(empty)
    assert list(empty.iterdir()) == []


def test_a_listing_that_is_given_up_gives_the_lock_back(rig: DiskRig) -> None:
    tier = rig.open(capacity=MANY)
    rig.put(tier, *range(4))
    tier.close()
    frames = list_directory(rig.path)
    next(frames)
    with pytest.raises(ConfigError, match="in use"):
        rig.open(capacity=MANY)
    del frames
    rig.open(capacity=MANY)
