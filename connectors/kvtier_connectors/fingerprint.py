"""What identifies a model: its weights, not its name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["file_digest", "model_fingerprint"]


def model_fingerprint(model_dir: Path | str) -> str:
    """64 hex digits that identify the weights: SHA-256 over the config and the whole content of every safetensors file.

    Equal for copies in other places. The config counts as parsed JSON, less the entries that only say which library
    wrote it and where from. Reads every byte (about 1 s per GB, the disk allowing). Raises ConfigError if the
    directory holds no model.
    """
    directory = Path(model_dir)
    files = sorted(directory.glob("*.safetensors"))
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model in {directory}: config.json cannot be read ({error})") from error
    if not files:
        raise ConfigError(f"no model in {directory}: it has no .safetensors file")
    if not isinstance(config, dict):
        raise ConfigError(f"no model in {directory}: config.json is not a JSON object")
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    digest = hashlib.sha256(b"kvtier-model-1\0" + json.dumps(config, sort_keys=True).encode())
    for path in files:
        digest.update(f"\0{path.name}\0".encode() + file_digest(path))
    return digest.hexdigest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
