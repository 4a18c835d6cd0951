"""What every test runs under: hypothesis with a seed that is printed, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtier.errors import KVTierError
from kvtier.testing.redis_servers import TlsFiles, make_tls_files

settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

LEAK_DEADLINE_S = 5.0

collect_ignore = [] if find_spec("vllm") else ["vllm"]  # an environment of its own: make test-vllm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-seconds", type=float, default=0.0, help="go on with new seeds for so long in each test marked soak"
    )


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seeds for a test marked soak: one, or as many as `--soak-seconds` leaves time for. Printed, for a failure."""
    first = int(request.config.option.hypothesis_seed)
    end = time.monotonic() + request.config.getoption("--soak-seconds")

    def draw() -> Iterator[int]:
        for seed in itertools.count(first):
            print(f"seed {seed}")
            yield seed
            if time.monotonic() >= end:
                return

    return draw()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose hypothesis's seed here unless one was given, so that the header can name it."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"to draw the same examples: --hypothesis-seed={config.option.hypothesis_seed}"


def open_resources() -> set[str]:
    """Open descriptors with what they stand for, live threads, and shared memory: what a test must give back."""
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    found |= {f"shared memory {path}" for path in Path("/dev/shm").glob("*")}  # noqa: S108
    for descriptor in [*Path("/proc/self/fd").iterdir()]:
        try:
            found.add(f"descriptor {descriptor.name} -> {descriptor.readlink()}")
        except FileNotFoundError:  # the listing's own, and others closed since
            continue
    return found


def is_anothers(resource: str) -> bool:
    """Whether it is shared memory that only processes map which this one did not begin: what else runs here."""
    path = resource.removeprefix("shared memory ")
    if path == resource:
        return False
    parents: dict[int, int] = {}
    mapping: set[int] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if path in (directory / "maps").read_text():
                mapping.add(int(directory.name))
        except (OSError, ProcessLookupError):  # ended since, or not ours to read
            continue

    def is_ours(process: int) -> bool:
        while process not in (0, os.getpid()):
            process = parents.get(process, 0)
        return process != 0

    return bool(mapping) and not any(map(is_ours, mapping))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test after which descriptors, threads or shared memory are open that were not before.

    What was told to end gets a moment for it. Fixtures of a wider scope are set up before this one, so what they hold
    is not the test's; nor is what another process has.
    """
    before = open_resources()
    yield
    deadline = time.monotonic() + LEAK_DEADLINE_S
    while left := open_resources() - before:
        if time.monotonic() > deadline:
            left = {resource for resource in left if not is_anothers(resource)}
            if not left:
                return
            pytest.fail(f"left open {LEAK_DEADLINE_S:g} s after the test: {', '.join(sorted(left))}")
        gc.collect()  # a failed assertion's traceback may be all that still holds them
        time.sleep(0.01)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Certificates and keys, by openssl."""
    try:
        return make_tls_files(tmp_path_factory.mktemp("tls"))
    except KVTierError as error:
        pytest.skip(str(error))
