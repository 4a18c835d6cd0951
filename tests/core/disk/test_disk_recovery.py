"""What is found again after a close, a crash, and every kind of damage."""

from __future__ import annotations

import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from kvtier.errors import ConfigError
from kvtier.frame import FrameHeader
from kvtier.keys import Extras, Key, Namespace, Shard, digest_tokens, make_key
from kvtier.layout import KVLayout
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier, list_directory, verify_directory

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

PAGE = 4096
SEGMENT = 64 << 10
HIT, MISS, DAMAGED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED
STORED = WriteOutcome.STORED


def patch(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def resealed(page: bytes) -> bytes:
    """The page with the checksum that its bytes should have."""
    return page[:-8] + xxhash.xxh3_64_intdigest(page[:-8]).to_bytes(8, "little")


# ---- no damage -------------------------------------------------------------------------------------------------------


@pytest.mark.bug("AC10", "WR01")
@pytest.mark.parametrize("crash", [False, True])
def test_blocks_are_found_again(rig: DiskRig, crash: bool) -> None:
    tier = rig.open()
    for name in range(8):
        assert rig.put(tier, name, nbytes=5000) == [STORED]
    (rig.path / "segment-00000099.kvt.tmp").write_bytes(bytes(SEGMENT))
    (rig.path / "kvtier.meta.tmp").write_bytes(b"torn")
    rig.crash(tier) if crash else tier.close()
    again = rig.open()
    assert again.snapshot().recovered_blocks == again.usage().num_blocks == 8
    assert again.snapshot().reclaimed_files == 2
    assert not list(rig.path.glob("*.tmp"))
    assert rig.get(again, *range(8), nbytes=5000) == [HIT] * 8
    assert rig.put(again, 0, nbytes=5000) == [WriteOutcome.ALREADY_STORED]
    again.check_integrity()


def test_a_reopened_tier_goes_on_in_the_segment_it_was_in(rig: DiskRig) -> None:
    """Ten short runs must not cost ten segments."""
    for name in range(10):
        tier = rig.open(capacity=1 << 20)
        assert rig.get(tier, *range(name)) == [HIT] * name
        rig.put(tier, name)
        assert tier.snapshot().num_segments <= 1 + name // 5
        tier.close() if name % 2 else rig.crash(tier)


def test_the_chain_is_found_again(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, "a", "b")
    tier.close()
    tier = rig.open()
    rig.put(tier, "a", "b", "c")
    tier.close()
    depths = {}
    for file in rig.segments():
        content = file.read_bytes()
        for offset in range(PAGE, len(content), PAGE):
            if content[offset : offset + 8] == b"KVTframe":
                header = FrameHeader.decode(content[offset : offset + PAGE])
                depths[header.depth] = (header.key, header.parent)
    assert sorted(depths) == [0, 1, 2]
    assert depths[0][1] is None
    assert (depths[1][1], depths[2][1]) == (depths[0][0], depths[1][0])


def test_of_two_frames_of_a_key_the_newest_counts(rig: DiskRig) -> None:
    """The first could not be erased."""
    tier = rig.open()
    rig.put(tier, "a", *range(8))
    key = rig.key("a")
    rig.files.inject(Fault.WRITE_ERROR, times=1)
    tier.remove([key])
    newer = bytes(PAGE)
    assert tier.write([WriteRequest(key, None, memoryview(newer))]) == [STORED]
    for end in (rig.crash, DiskTier.close, rig.crash):
        end(tier)
        tier = rig.open()
        buffer = bytearray(b"x" * PAGE)
        assert tier.read([ReadRequest(key, memoryview(buffer))]) == [HIT]
        assert buffer == newer


def test_what_was_removed_is_not_found_again(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(12))
    assert tier.remove([rig.key(name) for name in (3, 4, 99)]) == 2
    rig.crash(tier)
    again = rig.open()
    assert rig.held(again, range(12)) == [name for name in range(12) if name not in (3, 4)]
    assert again.snapshot().damaged == 0


def test_a_frame_inside_a_block_is_no_frame(rig: DiskRig) -> None:
    """A block may hold any bytes, those of a whole frame of this very segment too."""
    tier = rig.open()
    rig.put(tier, "a")
    (file,) = rig.segments()
    header = FrameHeader.decode(file.read_bytes()[PAGE : 2 * PAGE])
    forged = replace(header, key=rig.key("forged")).encode() + rig.block("a")
    assert tier.write([WriteRequest(rig.key("b"), None, memoryview(forged * 2))]) == [STORED]
    rig.crash(tier)
    assert rig.held(rig.open(), ["a", "b", "forged"]) == ["a", "b"]


def test_what_was_evicted_stays_evicted(rig: DiskRig) -> None:
    tier = rig.open()
    for name in range(60):
        rig.put(tier, name)
        held = rig.held(tier, range(60))
        if name % 7 == 0:
            rig.crash(tier)
            tier = rig.open()
            assert rig.held(tier, range(60)) == held


def test_padding_is_zeros(rig: DiskRig) -> None:
    """Memory that is used again must not leak one block's bytes into another's file."""
    tier = rig.open(capacity=4 << 20)
    for name in range(20):
        rig.put(tier, f"longer {name}", nbytes=8000)
        rig.put(tier, name, nbytes=5000)
        file, at = rig.find(name)
        frame = file.read_bytes()[at : at + 3 * PAGE]
        assert frame[PAGE : PAGE + 5000] == rig.block(name, 5000)
        assert not any(frame[PAGE + 5000 :])


@pytest.mark.bug("AC10")
def test_a_warm_open_is_quick(rig: DiskRig, tmp_path: Path) -> None:
    """4 GiB of blocks of 360 KiB, in files with holes for payloads: the time is that of the index."""
    tier = rig.open(capacity=5 << 30, segment_bytes=None)
    block = memoryview(bytearray(360 << 10))
    number = (4 << 30) // len(block)
    keys = [rig.key(name) for name in range(number)]
    files = rig.files
    real = files.pwritev
    files.pwritev = lambda fd, vectors, offset: (  # type: ignore[method-assign]
        sum(map(len, vectors)) if len(vectors) > 1 else real(fd, vectors, offset)
    )
    for start in range(0, number, 16):
        tier.write([WriteRequest(key, None, block) for key in keys[start : start + 16]])
    tier.close()
    before = time.monotonic()
    again = rig.open(capacity=5 << 30, segment_bytes=None)
    took = time.monotonic() - before
    assert again.usage().num_blocks >= number
    assert took < 2, f"{took:.2f} s"


# ---- damage ----------------------------------------------------------------------------------------------------------

FRAME = 3 * PAGE  # of a block of 8000 bytes


@pytest.mark.bug("CR14")
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "offset",
    [0, 9, 12, 20, 60, 64, 115, 117, 121, 130, 140, 150, 200, 3000, 4090, PAGE, PAGE + 4000, 2 * PAGE + 3903],
)
def test_a_flipped_bit_in_a_frame_costs_that_block(rig: DiskRig, offset: int, sealed: bool) -> None:
    tier = rig.open()
    rig.put(tier, *range(4), nbytes=8000)
    tier.close() if sealed else rig.crash(tier)
    file, at = rig.find(2)
    rig.flip(file, at + offset)
    again = rig.open()
    expected = DAMAGED if sealed else MISS
    assert rig.get(again, *range(4), nbytes=8000) == [HIT, HIT, expected, HIT]
    assert rig.get(again, 2, nbytes=8000) == [MISS]
    assert again.snapshot().damaged == sealed
    assert rig.put(again, 2, nbytes=8000) == [STORED]
    assert rig.get(again, 2, nbytes=8000) == [HIT]


@pytest.mark.bug("CR14")
def test_a_flipped_bit_is_found_while_the_tier_is_open(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(4))
    file, at = rig.find(1)
    rig.flip(file, at + PAGE + 7)
    assert rig.get(tier, *range(4)) == [HIT, DAMAGED, HIT, HIT]
    assert (tier.snapshot().damaged, tier.usage().num_blocks) == (1, 3)


@pytest.mark.parametrize("where", ["trailer", "trailer end", "footer", "tail page"])
def test_a_damaged_footer_costs_nothing(rig: DiskRig, where: str) -> None:
    tier = rig.open()
    rig.put(tier, *range(4))
    tier.close()
    (file,) = rig.segments()
    offset = {"trailer": -PAGE + 3, "trailer end": -1, "footer": -2 * PAGE + 20, "tail page": -PAGE + 42}[where]
    rig.flip(file, SEGMENT + offset)
    again = rig.open()
    assert rig.get(again, *range(4)) == [HIT] * 4
    assert again.snapshot().damaged == 0


ALONE = Shard(0, 1)


def truncate(file: Path, nbytes: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(nbytes)


@pytest.mark.bug("CR15")
@pytest.mark.parametrize(
    "harm",
    [
        lambda file: truncate(file, 0),
        lambda file: truncate(file, 100),
        lambda file: truncate(file, SEGMENT // 2),
        lambda file: truncate(file, SEGMENT - 1),
        lambda file: truncate(file, SEGMENT * 2),
        lambda file: file.write_bytes(bytes(SEGMENT)),
        lambda file: file.write_bytes(b"garbage" * 10000),
        lambda file: patch(file, 100, b"\1"),
        lambda file: patch(file, 36, struct.pack("<Q", 1 << 40)),
    ],
)
def test_a_segment_that_is_none_is_reclaimed(rig: DiskRig, harm: Callable[[Path], object]) -> None:
    tier = rig.open(capacity=1 << 20)
    for name in range(12):
        rig.put(tier, name)
    tier.close()
    first, *others = rig.segments()
    lost = [name for name in range(12) if rig.find(name)[0] == first]
    harm(first)
    report = verify_directory(rig.path)
    assert [each.file for each in report.unreadable] == [first.name]
    again = rig.open(capacity=1 << 20)
    assert rig.segments() == others
    assert again.snapshot().reclaimed_files == 1
    assert rig.held(again, range(12)) == [name for name in range(12) if name not in lost]
    for name in lost:
        assert rig.put(again, name) == [STORED]
    assert rig.get(again, *range(12)) == [HIT] * 12


@pytest.mark.bug("CR15")
def test_a_header_that_claims_gigabytes_is_no_reason_to_take_them(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(3))
    rig.crash(tier)
    file, at = rig.find(1)
    page = file.read_bytes()[at : at + PAGE]
    for huge in (1 << 32, SEGMENT, 3 * PAGE):
        patch(file, at, replace(FrameHeader.decode(page), stored_bytes=huge, raw_bytes=huge).encode())
        tracemalloc.start()
        again = rig.open()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        assert rig.held(again, range(3)) == [0, 2]
        rig.crash(again)


@pytest.mark.bug("WR12")
def test_a_frame_of_another_file_or_life_is_a_miss(rig: DiskRig, tmp_path: Path) -> None:
    """Its bytes are whole and its key is the one asked for, but it was not written into this segment."""
    other = rig.open(tmp_path / "other")
    rig.put(other, "a")
    rig.crash(other)
    foreign_file, foreign_at = rig.find("a", tmp_path / "other")
    foreign = foreign_file.read_bytes()[foreign_at : foreign_at + 2 * PAGE]
    tier = rig.open()
    rig.put(tier, "a")
    file, at = rig.find("a")
    patch(file, at, foreign)
    assert rig.get(tier, "a") == [DAMAGED]
    patch(file, at + 4 * PAGE, foreign)
    rig.crash(tier)
    assert rig.get(rig.open(), "a") == [MISS]


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 2000])
def test_without_a_meta_file_no_block_is_trusted(
    rig: DiskRig, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    """A reset may have been written to it and nowhere else."""
    tier = rig.open()
    tier.start_epoch(7)
    rig.put(tier, "a")
    tier.close()
    meta = rig.path / "kvtier.meta"
    if content is None:
        meta.unlink()
    else:
        meta.write_bytes(content)
    again = rig.open()
    assert (again.epoch, rig.get(again, "a")) == (8, [MISS])
    assert len([record for record in caplog.records if "kvtier.meta" in record.getMessage()]) == 1
    assert rig.put(again, "b") == [STORED]
    again.close()
    last = rig.open()
    assert (last.epoch, rig.get(last, "a", "b")) == (8, [MISS, HIT])


@pytest.mark.parametrize("harm", ["cut", "first page", "second page"])
def test_half_of_a_meta_file_is_enough(rig: DiskRig, harm: str) -> None:
    tier = rig.open()
    tier.start_epoch(7)
    rig.put(tier, "a")
    tier.close()
    meta = rig.path / "kvtier.meta"
    whole = meta.read_bytes()
    if harm == "cut":
        meta.write_bytes(whole[:PAGE])
    else:
        rig.flip(meta, 30 if harm == "first page" else PAGE + 30)
    again = rig.open()
    assert (again.epoch, rig.get(again, "a")) == (7, [HIT])
    assert meta.read_bytes() == whole


@pytest.mark.parametrize("fault", [Fault.NO_DESCRIPTOR, Fault.READ_ERROR])
@pytest.mark.parametrize("where", ["kvtier.meta", "segment-"])
def test_what_cannot_be_read_now_is_not_deleted(rig: DiskRig, fault: Fault, where: str) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(20))
    tier.start_epoch(1)
    rig.put(tier, *range(20, 40))
    tier.close()
    (rig.path / "segment-00000099.kvt").write_bytes(b"garbage")
    before = {each.name for each in rig.path.iterdir()}
    rig.files.inject(fault, where=where, times=None if where == "kvtier.meta" else 1)
    if (fault, where) == (Fault.READ_ERROR, "segment-"):
        some = rig.open(capacity=1 << 20)
        assert 0 < some.snapshot().num_blocks < 20
        some.check_integrity()
        assert rig.real_bytes() == some.usage().used_bytes
        some.close()
    else:
        with pytest.raises(ConfigError, match=rf"{where}.* cannot be read now.*Nothing was changed"):
            rig.open(capacity=1 << 20)
        assert {each.name for each in rig.path.iterdir()} == before
    rig.files.heal()
    again = rig.open(capacity=1 << 20)
    assert again.epoch == 1
    assert rig.held(again, range(40)) == list(range(20, 40))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("where", ["trailer", "frame"])
def test_a_newer_format_within_a_segment_is_refused(rig: DiskRig, where: str, sealed: bool) -> None:
    tier = rig.open()
    rig.put(tier, "a", "b")
    tier.close() if sealed or where == "trailer" else rig.crash(tier)
    file, at = rig.find("a")
    if where == "trailer":
        at = SEGMENT - PAGE
    page = file.read_bytes()[at : at + PAGE]
    patch(file, at, resealed(page[:8] + b"\2\0" + page[10:]))
    before = {each.name: each.read_bytes() for each in rig.path.iterdir() if each.name != "kvtier.lock"}
    with pytest.raises(ConfigError, match=rf"{file.name} is of disk format 2.*Nothing was changed"):
        rig.open()
    for look in (lambda: list(list_directory(rig.path)), lambda: verify_directory(rig.path)):
        with pytest.raises(ConfigError, match="is of disk format 2"):
            look()
    assert {each.name: each.read_bytes() for each in rig.path.iterdir() if each.name != "kvtier.lock"} == before


@pytest.mark.parametrize("name", ["kvtier.meta", "segment-00000002.kvt"])
def test_a_newer_format_is_refused_and_nothing_is_deleted(rig: DiskRig, tmp_path: Path, name: str) -> None:
    tier = rig.open(capacity=1 << 20)
    for number in range(12):
        rig.put(tier, number)
    tier.close()
    (rig.path / "segment-00000001.kvt").write_bytes(b"garbage")
    (rig.path / "segment-00000099.kvt.tmp").write_bytes(b"left over")
    file = rig.path / name
    page = file.read_bytes()[:PAGE]
    patch(file, 0, resealed(page[:8] + struct.pack("<I", 2) + page[12:]))
    before = {each.name: each.read_bytes() for each in rig.path.iterdir() if each.name != "kvtier.lock"}
    for paths in ([rig.path], [tmp_path / "other", rig.path]):
        with pytest.raises(ConfigError, match=rf"{name} is of disk format 2.*Nothing was changed"):
            rig.open(*paths, capacity=1 << 20)
    assert {each.name: each.read_bytes() for each in rig.path.iterdir() if each.name != "kvtier.lock"} == before


def test_a_copied_segment_is_harmless(rig: DiskRig) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(3))
    tier.close()
    (file,) = rig.segments()
    shutil.copy(file, rig.path / "segment-00000007.kvt")
    again = rig.open(capacity=1 << 20)
    again.check_integrity()
    assert rig.get(again, *range(3)) == [HIT] * 3
    for name in range(60):
        rig.put(again, name)
        rig.get(again, name // 2)
    again.check_integrity()


def test_a_segment_that_cannot_be_read_in_places_gives_the_rest(rig: DiskRig) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(4))
    rig.crash(tier)
    file, at = rig.find(2)
    real = rig.files.preadv

    def preadv(fd: int, vectors: list[memoryview], offset: int) -> int:
        if offset <= at + PAGE < offset + sum(map(len, vectors)) and "segment" in str(
            Path(f"/proc/self/fd/{fd}").readlink()
        ):
            raise OSError(5, "Input/output error")
        return real(fd, vectors, offset)

    rig.files.preadv = preadv  # type: ignore[method-assign,assignment]
    again = rig.open(capacity=1 << 20)
    assert file.exists()
    assert set(rig.held(again, range(4))) <= {0, 1, 3}
    again.check_integrity()


# ---- identity --------------------------------------------------------------------------------------------------------


def namespace(dtype: str = "float16", shard: Shard = ALONE) -> Namespace:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype=dtype, block_tokens=32)
    return Namespace("weights", "r1", layout, "main", shard)


def keys_in(space: Namespace) -> list[Key]:
    return [make_key(space.digest(0), digest) for digest in digest_tokens(range(96), 32, Extras(None, None, ()))]


@pytest.mark.bug("WR09")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_bytes_of_another_kv_type_are_not_served(rig: DiskRig, dtype: str) -> None:
    """Two of them even have the same length."""
    tier = rig.open()
    block = memoryview(bytes(namespace().layout.block_bytes))
    assert tier.write([WriteRequest(key, None, block) for key in keys_in(namespace())]) == [STORED] * 3
    tier.close()
    again = rig.open()
    other = namespace(dtype)
    buffer = memoryview(bytearray(other.layout.block_bytes))
    assert again.read([ReadRequest(key, buffer) for key in keys_in(other)]) == [MISS] * 3
    assert again.snapshot().damaged == 0
    buffer = memoryview(bytearray(len(block)))
    assert again.read([ReadRequest(key, buffer) for key in keys_in(namespace())]) == [HIT] * 3


@pytest.mark.bug("WR11")
def test_each_rank_reads_its_own(rig: DiskRig) -> None:
    tier = rig.open()
    for rank in range(2):
        block = memoryview(bytes([rank]) * PAGE)
        keys = keys_in(namespace(shard=Shard(rank, 2)))
        assert tier.write([WriteRequest(key, None, block) for key in keys]) == [STORED] * 3
    tier.close()
    again = rig.open()
    for shard, expected in ((Shard(0, 2), HIT), (Shard(1, 2), HIT), (Shard(0, 4), MISS), (Shard(1, 4), MISS)):
        for key in keys_in(namespace(shard=shard)):
            buffer = bytearray(PAGE)
            assert again.read([ReadRequest(key, memoryview(buffer))]) == [expected]
            assert expected is MISS or buffer == bytes([shard.rank]) * PAGE
