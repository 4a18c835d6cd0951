"""The leak check tells what a test left open from what another process has."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import is_anothers

HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kvtier-test-") as file:
        file.truncate(4096)
        yield file.name


@contextmanager
def child_that_maps(path: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        yield


def test_what_this_process_or_a_child_has_is_its_own(path: str) -> None:
    with child_that_maps(path):
        assert not is_anothers(f"shared memory {path}")
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert not is_anothers(f"shared memory {path}")


def test_what_nobody_has_was_left(path: str) -> None:
    assert not is_anothers(f"shared memory {path}")
    assert not is_anothers("thread x (1)")


def test_what_only_a_stranger_has_is_its_own_affair(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child_that_maps(path):
        monkeypatch.setattr("os.getpid", lambda: 1 << 30)
        assert is_anothers(f"shared memory {path}")
        monkeypatch.undo()
