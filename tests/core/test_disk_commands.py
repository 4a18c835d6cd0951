"""`kvtier ls` and `kvtier verify`: what they show, what they find, and that they change nothing."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.keys import Key, make_key
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier

BLOCK_BYTES = 20 << 10
NUM_BLOCKS = 12


def key_of(number: int) -> Key:
    return make_key(b"n" * 16, hashlib.sha256(str(number).encode()).digest())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Twelve blocks in a few segments, the tier closed."""
    tier = DiskTier([tmp_path / "cache"], 4 << 20, segment_bytes=128 << 10)
    with mmap.mmap(-1, mmap.PAGESIZE * -(-BLOCK_BYTES // mmap.PAGESIZE)) as memory:
        for number in range(NUM_BLOCKS):
            memory[:BLOCK_BYTES] = bytes([number]) * BLOCK_BYTES
            parent = key_of(number - 1) if number else None
            with memoryview(memory)[:BLOCK_BYTES] as block:
                assert tier.write([WriteRequest(key_of(number), parent, block)]) == [WriteOutcome.STORED]
    tier.close()
    return tmp_path / "cache"


def run(args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args, commands=[])
    output = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, output.out, output.err


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".kvt"}


def flip(directory: Path, needle: bytes, skip: int = 100) -> str:
    """Flip a bit `skip` bytes behind where `needle` first stands; the file's name."""
    for path in sorted(directory.glob("*.kvt")):
        at = path.read_bytes().find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + skip)
                byte = file.read(1)[0]
                file.seek(at + skip)
                file.write(bytes([byte ^ 1]))
            return path.name
    raise AssertionError("no file holds it")


def test_every_block_is_listed_with_its_key_parent_and_place(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(directory)
    code, out, _ = run(["ls", "--disk", str(directory), "--json"], capsys)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["key"] for row in rows] == [key_of(number).hex() for number in range(NUM_BLOCKS)]
    assert [row["parent"] for row in rows] == [None, *(key_of(number).hex() for number in range(NUM_BLOCKS - 1))]
    assert [row["depth"] for row in rows] == list(range(NUM_BLOCKS))
    assert {(row["raw_bytes"], row["stored_bytes"], row["codec"]) for row in rows} == {(BLOCK_BYTES, BLOCK_BYTES, 0)}
    assert contents(directory) == before


def test_the_table_adds_up(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(["ls", "--disk", str(directory), "--json"], capsys)[1].splitlines()
    num_segments = len({json.loads(row)["file"] for row in rows})
    assert num_segments > 1
    code, out, _ = run(["ls", "--disk", str(directory)], capsys)
    assert code == 0
    assert f"{NUM_BLOCKS} blocks in {num_segments} segments" in out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_directory_that_holds_no_cache_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "passwd").write_text("")
    code, out, err = run([command, "--disk", str(tmp_path)], capsys)
    assert (code, out) == (2, "")
    assert "holds no cache of kvtier's" in err
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


def test_a_whole_directory_verifies(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(directory)
    code, out, _ = run(["verify", "--disk", str(directory), "--json"], capsys)
    report = json.loads(out)
    assert code == 0
    assert (report["frames"], report["damaged"], report["unreadable"]) == (NUM_BLOCKS, [], [])
    assert report["checked_bytes"] >= NUM_BLOCKS * BLOCK_BYTES
    assert contents(directory) == before


@pytest.mark.parametrize("where", ["payload", "header"])
def test_damage_is_found_named_and_left_as_it_is(
    directory: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    needle = bytes([5]) * BLOCK_BYTES if where == "payload" else key_of(5) + key_of(4)
    name = flip(directory, needle, 100 if where == "payload" else 3)
    before = contents(directory)
    code, out, _ = run(["verify", "--disk", str(directory)], capsys)
    assert code == 1
    assert f"damaged: {name}, page " in out
    assert "1 damaged" in out
    assert contents(directory) == before


def test_a_foreign_file_is_named_and_no_fault(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "notes.txt").write_text("mine")
    code, out, _ = run(["verify", "--disk", str(directory)], capsys)
    assert code == 0
    assert "not kvtier's: notes.txt" in out


def test_half_a_segment_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = max(directory.glob("*.kvt"))
    with half.open("r+b") as file:
        file.truncate(half.stat().st_size // 2)
    code, out, _ = run(["verify", "--disk", str(directory)], capsys)
    assert code == 1
    assert f"unreadable: {half.name}: " in out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_directory_in_use_or_missing_is_refused_in_one_line(
    directory: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    tier = DiskTier([directory], 4 << 20, segment_bytes=128 << 10)
    try:
        code, out, err = run([command, "--disk", str(directory)], capsys)
    finally:
        tier.close()
    assert (code, out) == (2, "")
    assert str(directory) in err
    assert len(err.splitlines()) == 1
    missing = directory / "missing"
    code, out, err = run([command, "--disk", str(missing)], capsys)
    assert (code, out) == (2, "")
    assert str(missing) in err
    assert not missing.exists()
