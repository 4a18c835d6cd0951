"""vLLM in this process, on one thread: engines with the real model, and nothing left of them after a test."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_engine.weights import ensure_default_model

# vLLM reads them when it is imported. bf16 results depend on the number of threads, and those of torch spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import LLM, __version__

    from tests.vllm.plugin import MODULE, NAME, OpenRig
    from tests.vllm.scheduler_rig import SchedulerRig

if (expected := os.environ.get("EXPECT_VLLM", __version__)) != __version__:
    # As when a tree of another version is not found: the tests would pass in the installed one, and prove nothing.
    raise pytest.UsageError(f"these tests are to run in vLLM {expected}, and {__version__} was imported")

# vLLM and its dependencies warn of their own affairs; what ours warn of stays an error.
WARNINGS = (
    "ignore",
    "error:::kvtier",
    "error:::tests",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS))


class LLMs:
    """Makes engines of one model, and ends them: a process holds one at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._open: list[Any] = []

    def __call__(self, **overrides: Any) -> Any:
        """A vllm.LLM in this process. Overrides are its arguments, such as `kv_transfer_config`; the one that was made
        before is closed first."""
        self.close()
        arguments = {
            "model": str(self._model_dir),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 30,  # unless given, vLLM wants most of the machine's memory to be free
            "num_gpu_blocks_override": 64,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "seed": 0,
        }
        llm = LLM(**arguments | overrides)
        self._open.append(llm)
        return llm

    def close(self) -> None:
        """End the engine, its worker and both halves of its connector."""
        while self._open:
            self._open.pop().llm_engine.engine_core.shutdown()
        gc.collect()


@pytest.fixture
def open_rig() -> Iterator[OpenRig]:
    """Scheduler rigs with the plug-in; nothing of theirs is left at the end."""
    rigs: list[SchedulerRig] = []

    def make(settings: dict[str, Any] | None = None, **kwargs: Any) -> SchedulerRig:
        extra = {"model": "rig", "settings": {"host.size": "16MiB", "host.slab": "1MiB"} | (settings or {})}
        rigs.append(SchedulerRig(MODULE, NAME, extra, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct as the demo uses it, converted once a user (half a minute)."""
    return ensure_default_model(print)


@pytest.fixture
def make_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMs]:
    """`make_llm(**overrides)` gives a vllm.LLM, closed at the end of the test or by `make_llm.close()`."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # a progress bar's thread would outlive the test
    llms = LLMs(model_dir)
    yield llms
    llms.close()
