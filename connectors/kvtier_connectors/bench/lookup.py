"""Figures of a lookup: hashing a long prompt and finding all of its blocks, against hashing alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvtier.config import HostSettings, Settings
from kvtier.keys import Extras, Namespace, Shard, Tokens, digest_tokens
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason
from kvtier.store import Space, Store
from kvtier_connectors.bench.figures import Figure, measure_pairs, seconds_of

__all__ = ["NUM_TOKENS", "lookup_figures"]

NUM_TOKENS = 131_072
BLOCK_TOKENS = 16
VOCABULARY = 128_256
EXTRAS = Extras(None, None, ())
# Blocks of one page: where a block is and how large it is are the same to a lookup.
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=BLOCK_TOKENS)


def lookup_figures(runs: int, num_tokens: int) -> Iterator[Figure]:
    """Milliseconds for a prompt whose every block is held, given as a numpy array and as a list."""
    array = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens)
    num_blocks = num_tokens // BLOCK_TOKENS
    settings = Settings(host=HostSettings(size=max(64 << 20, 2 * num_blocks * LAYOUT.block_bytes)))
    shape = f"{num_tokens} tokens, blocks of {BLOCK_TOKENS}"
    with Store(settings) as store:
        space = store.open_space(Namespace("kvtier bench", "", LAYOUT, "all", Shard(0, 1)))
        _fill(space, array)
        store.memory.wait_touched(60.0)
        data = array.astype("<u4").tobytes()
        prompts: list[tuple[str, Tokens]] = [("lookup.array", array), ("lookup.list", array.tolist())]
        for name, tokens in prompts:
            value = partial(_milliseconds_of, partial(_lookup, space, tokens, num_blocks))
            limit = partial(_milliseconds_of, partial(_hash, data))
            yield measure_pairs(name, shape, "ms", value, limit, runs)


def _milliseconds_of(work: Callable[[], object]) -> float:
    return 1e3 * seconds_of(work)


def _fill(space: Space, tokens: Tokens) -> None:
    with space.owner("bench") as owner:
        parent = None
        for digest in digest_tokens(tokens, BLOCK_TOKENS, EXTRAS):
            reservation = space.reserve(digest, parent, owner)
            assert not isinstance(reservation, DropReason)
            space.commit([reservation])
            parent = digest


def _lookup(space: Space, tokens: Tokens, num_blocks: int) -> None:
    found = space.lookup(digest_tokens(tokens, BLOCK_TOKENS, EXTRAS)).poll()
    assert found is not None
    assert found.num_blocks == num_blocks


def _hash(data: bytes) -> None:
    """The limit: what any chain over these tokens must do."""
    sha256 = hashlib.sha256
    step = 4 * BLOCK_TOKENS
    digest = sha256(b"root").digest()
    for offset in range(0, len(data), step):
        digest = sha256(digest + data[offset : offset + step]).digest()
