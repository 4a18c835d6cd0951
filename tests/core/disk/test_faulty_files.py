"""The injected faults themselves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.disk import Files

PAGE = 4096
CONTENT = bytes(range(256)) * (4 * PAGE // 256)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def file(directory: int) -> Iterator[int]:
    fd = Files().open("file", os.O_RDWR | os.O_CREAT, directory)
    yield fd
    os.close(fd)


def vectors(content: bytes = CONTENT) -> list[memoryview]:
    view = memoryview(bytearray(content))
    return [view[at : at + PAGE] for at in range(0, len(view), PAGE)]


def read(files: Files, file: int) -> bytes:
    target = vectors(bytes(len(CONTENT)))
    files.read(file, target, 0)
    return b"".join(target)


def test_without_faults_they_are_files(file: int) -> None:
    files = FaultyFiles()
    files.write(file, vectors(), 0)
    assert read(files, file) == CONTENT
    assert not files.counts
    with pytest.raises(OSError, match="ends before"):
        files.read(file, vectors(), PAGE)


def test_more_vectors_than_one_call_takes(file: int) -> None:
    content = os.urandom(3000)
    Files().write(file, [memoryview(content[at : at + 1]) for at in range(3000)], 5)
    target = bytearray(3000)
    Files().read(file, [memoryview(target)[at : at + 1] for at in range(3000)], 5)
    assert target == content


@pytest.mark.parametrize("seed", range(20))
def test_short_transfers_are_carried_on(file: int, seed: int) -> None:
    files = FaultyFiles(seed)
    files.inject(Fault.SHORT_WRITE, probability=0.7)
    files.inject(Fault.SHORT_READ, probability=0.7)
    files.write(file, vectors(), 0)
    assert read(files, file) == CONTENT, repr(files)


def test_no_progress_is_an_error(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    monkeypatch.setattr(files, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="no progress"):
        files.write(file, vectors(), 0)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault.READ_ERROR, errno.EIO),
        (Fault.WRITE_ERROR, errno.EIO),
        (Fault.TORN_WRITE, errno.EIO),
        (Fault.FULL_ON_WRITE, errno.ENOSPC),
    ],
)
def test_errors_come_when_they_are_due(file: int, fault: Fault, code: int) -> None:
    files = FaultyFiles()
    files.inject(fault, skip=2, times=1)
    call = files.read if fault is Fault.READ_ERROR else files.write
    Files().write(file, vectors(), 0)
    for number in range(5):
        if number == 2:
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                call(file, vectors(), 0)
            assert caught.value.errno == code
        else:
            call(file, vectors(), 0)
    assert files.counts == {fault: 1}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("fault", [Fault.FLIP_ON_READ, Fault.FLIP_ON_WRITE])
def test_one_bit_flips_and_the_callers_buffer_stays(file: int, fault: Fault, seed: int) -> None:
    files = FaultyFiles(seed)
    files.inject(fault, times=1)
    source = vectors()
    files.write(file, source, 0)
    assert b"".join(source) == CONTENT
    got = read(files, file)
    assert sum((a ^ b).bit_count() for a, b in zip(got, CONTENT, strict=True)) == 1, repr(files)


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_write_says_that_all_is_well(file: int, seed: int) -> None:
    files = FaultyFiles(seed)
    Files().write(file, vectors(bytes(len(CONTENT))), 0)
    files.inject(Fault.LOST_WRITE)
    files.write(file, vectors(), 0)
    got = read(files, file)
    written = len(got.rstrip(b"\0"))
    assert 0 < written < len(CONTENT)
    assert got[:written] == CONTENT[:written]


def test_places_and_opens(directory: int, tmp_path: Path) -> None:
    files = FaultyFiles()
    files.inject(Fault.NO_DIRECT, where="bad")
    files.inject(Fault.FULL_ON_ALLOCATE, where="bad")
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        files.open("bad", os.O_RDWR | os.O_CREAT | os.O_DIRECT, directory)
    for name in ("good", "bad"):
        fd = files.open(name, os.O_RDWR | os.O_CREAT, directory)
        try:
            if name == "bad":
                with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                    files.allocate(fd, PAGE)
            else:
                files.allocate(fd, PAGE)
        finally:
            files.close(fd)
    assert (tmp_path / "good").stat().st_blocks == PAGE // 512
    (tmp_path / "link").symlink_to("good")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        files.open("link", os.O_RDONLY, directory)


def test_slowness_is_the_tests_own(file: int) -> None:
    pauses: list[int] = []
    files = FaultyFiles(pause=lambda: pauses.append(1))
    files.inject(Fault.SLOW, times=2)
    for _ in range(3):
        files.write(file, vectors(), 0)
    assert len(pauses) == 2
    assert "seed=0" in repr(files)
