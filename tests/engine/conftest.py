"""The real model, converted once a user and loaded once a session, on one torch thread; engines over the fake one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier_engine.testing.rig import EngineRig
from tests.engine.restores import Kind, Restores

if TYPE_CHECKING:
    from kvtier_engine.hf_runner import HFRunner

# torch reads it when first imported. Its OpenMP threads spin, so on a shared core a second one costs a factor of ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """bf16 results depend on the number of threads."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    from kvtier.errors import ConfigError
    from kvtier_engine.weights import ensure_default_model

    try:
        return ensure_default_model(print)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def runner_float32(real_model_dir: Path) -> HFRunner:
    """The real model, 64 blocks of 16 tokens. Tests write the blocks they read, and rely on no other content."""
    from kvtier_engine.hf_runner import HFRunner

    return HFRunner.load(real_model_dir, num_blocks=64, dtype="float32")


@pytest.fixture(scope="session")
def runner_bfloat16(real_model_dir: Path) -> HFRunner:
    from kvtier_engine.hf_runner import HFRunner

    return HFRunner.load(real_model_dir, num_blocks=64, dtype="bfloat16")


@pytest.fixture
def open_rig() -> Iterator[Callable[..., EngineRig]]:
    """Engines over the fake model, closed at the end of the test."""
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> EngineRig:
            rig = EngineRig(*args, **kwargs)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture(params=["kvtier", "scripted"])
def open_restores(request: pytest.FixtureRequest) -> Iterator[Callable[..., Restores]]:
    """Engines beside kvtier's connector, and the same story once more beside the scripted one."""
    kind: Kind = request.param
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Restores(kind, *args, **kwargs))


@pytest.fixture
def open_scripted() -> Iterator[Callable[..., Restores]]:
    """Engines beside the scripted connector: lookups, stages and ranks are in the test's hands too."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Restores("scripted", *args, **kwargs))
