"""Digests and keys: the byte format stated a second time, and everything that must make a key differ."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtier.keys
from kvtier.errors import ConfigError, LayoutError, TokenError
from kvtier.keys import (
    DigestChain,
    Extras,
    MediaItem,
    Namespace,
    Shard,
    digest_tokens,
    make_key,
    split_key,
)
from kvtier.layout import KVKind, KVLayout

NOTHING = Extras(adapter=None, salt=None, media=())
TOKENS = list(range(64))
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
NAMESPACE = Namespace(model="weights", revision="r1", layout=LAYOUT, group="main", shard=Shard(0, 1))
GOLDEN_BLOCKS = [
    "57840c26f71330a36e3badeeda769cb18686a5469785090604b6e84d077ea52e",
    "14704cab8bc38eb6caca01760f338bfd409e9c61b3d274a82eae29a55730d63b",
    "a29458bcfa30ce45945fea794a60261d07b15eff62a901ba4bc300dc0860baf9",
    "1a61a1b842fc588e27c0215eafa0fdc2e2fcbb6fbae873ada1724bc10355aa0c",
]
GOLDEN_NAMESPACE = "7cd27deb1b2faa650f70c6f8ca724700"

# ---- the format again, from hashlib and int.to_bytes alone -----------------------------------------------------------


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def stated_field(data: bytes) -> bytes:
    return u32(len(data)) + data


def stated_optional(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + stated_field(text.encode())


def stated_digests(tokens: list[int], block_tokens: int, extras: Extras) -> list[bytes]:
    parent = hashlib.sha256(
        b"kvtier chain" + u32(1) + u32(block_tokens) + stated_optional(extras.adapter) + stated_optional(extras.salt)
    ).digest()
    digests = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        data = parent + b"".join(u32(token) for token in tokens[start : start + block_tokens])
        for item in extras.media:
            if item.start < start + block_tokens and item.start + item.length > start:
                data += (item.start - start).to_bytes(8, "little", signed=True) + item.length.to_bytes(8, "little")
                data += stated_field(item.content)
        parent = hashlib.sha256(data).digest()
        digests.append(parent)
    return digests


def stated_namespace(namespace: Namespace, epoch: int) -> bytes:
    layout = namespace.layout
    fields = [
        b"kvtier namespace",
        u32(1) + u32(epoch),
        b"sha256",
        namespace.model.encode(),
        namespace.revision.encode(),
        f"{layout.num_layers}|{layout.num_kv_heads}|{layout.head_dim}|{layout.dtype}|{layout.block_tokens}|"
        f"{layout.kind.value}".encode(),
        namespace.group.encode(),
        u32(namespace.shard.rank) + u32(namespace.shard.size),
    ]
    return hashlib.sha256(b"".join(map(stated_field, fields))).digest()[:16]


texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def any_extras(draw: st.DrawFn) -> Extras:
    media, end = [], 0
    for gap, length, content in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.binary(min_size=1, max_size=4)), max_size=4)
    ):
        media.append(MediaItem(content, end + gap, length))
        end += gap + length
    return Extras(draw(texts), draw(texts), tuple(media))


# ---- digests ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("WR01")
def test_digests_are_the_golden_ones() -> None:
    extras = Extras(adapter="lora-7@2", salt="", media=(MediaItem(b"\xaa" * 32, 20, 20),))
    assert [digest.hex() for digest in digest_tokens(TOKENS, 16, extras)] == GOLDEN_BLOCKS
    assert NAMESPACE.digest(epoch=3).hex() == GOLDEN_NAMESPACE


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), any_extras())
def test_digests_are_as_stated(tokens: list[int], block_tokens: int, extras: Extras) -> None:
    assert digest_tokens(tokens, block_tokens, extras) == stated_digests(tokens, block_tokens, extras)


@given(st.integers(0, 2**32 - 1), st.text(max_size=5).filter(str.isascii), st.integers(0, 5))
def test_namespace_digest_is_as_stated(epoch: int, text: str, rank: int) -> None:
    namespace = Namespace(text, "é", LAYOUT, text, Shard(rank, 6))
    assert namespace.digest(epoch) == stated_namespace(namespace, epoch)


@pytest.mark.bug("WR01")
def test_every_process_computes_the_same_keys_whatever_its_hash_seed() -> None:
    code = (
        "from kvtier.keys import *; from kvtier.layout import KVLayout\n"
        "n = Namespace('weights', 'r1', KVLayout(30, 3, 64, 'bfloat16', 16), 'main', Shard(0, 1))\n"
        "print(n.digest(3).hex(), *(d.hex() for d in digest_tokens(range(64), 16, Extras(None, None, ()))))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment | seed, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        for seed in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "7"})
    ]
    expected = [GOLDEN_NAMESPACE, *(digest.hex() for digest in stated_digests(TOKENS, 16, NOTHING))]
    assert printed == [expected] * 3


def test_the_core_asks_no_interpreter_for_a_hash() -> None:
    package = Path(kvtier.keys.__file__).parent
    calls = {
        f"{path.relative_to(package)}: {ast.unparse(node)}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hash", "id")
    }
    assert calls == set()


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=12), max_size=6), st.integers(1, 7), any_extras())
def test_pieces_equal_the_whole(pieces: list[list[int]], block_tokens: int, extras: Extras) -> None:
    whole = [token for piece in pieces for token in piece]
    chain = DigestChain(block_tokens, extras)
    for number, piece in enumerate(pieces):
        chain.extend(np.array(piece, np.int64) if number % 2 else piece)
    assert list(chain.digests) == digest_tokens(whole, block_tokens, extras)
    assert chain.num_tokens == len(whole)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", ">i8", "<u8", "i2", "u1"])
def test_arrays_of_any_integer_type_are_their_numbers(dtype: str) -> None:
    expected = digest_tokens(TOKENS, 4, NOTHING)
    assert digest_tokens(np.array(TOKENS, dtype), 4, NOTHING) == expected
    assert digest_tokens(np.repeat(np.array(TOKENS, dtype), 2)[::2], 4, NOTHING) == expected


@pytest.mark.parametrize("kind", [tuple, range, bytes, bytearray, memoryview])
def test_other_sequences_are_their_numbers(kind: Any) -> None:
    tokens = range(64) if kind is range else kind(bytes(range(64))) if kind is memoryview else kind(range(64))
    assert digest_tokens(tokens, 4, NOTHING) == digest_tokens(TOKENS, 4, NOTHING)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, -7], "-7"),
        ([1, 2**32], str(2**32)),
        ([1, 2.5], "2.5"),
        ([1, "two"], "'two'"),
        ([1, None], "None"),
        ([[1, 2], [3, 4]], "[1, 2]"),
        ("text", "'t'"),
        (None, "None"),
        (7, "7"),
        (memoryview(bytes(4)).cast("B", (2, 2)), "memory"),
        (np.array([1.5]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), "2-D"),
        (np.array(3), "0-D"),
        (np.array([3, -7]), "-7"),
        (np.array([3, 2**32]), str(2**32)),
        (np.array([2**63], np.uint64), str(2**63)),
        ([1, np.int64(-7)], "-7"),
        ([1, np.float32(2.5)], "2.5"),
    ],
)
def test_bad_tokens_are_named_and_change_nothing(tokens: Any, named: str) -> None:
    chain = DigestChain(2, NOTHING)
    chain.extend([1, 2, 3])
    with pytest.raises(TokenError) as caught:
        chain.extend(tokens)
    assert named in str(caught.value)
    chain.extend([4])
    assert list(chain.digests) == digest_tokens([1, 2, 3, 4], 2, NOTHING)


def test_a_partial_block_has_no_digest() -> None:
    assert digest_tokens(TOKENS[:15], 16, NOTHING) == []
    assert len(digest_tokens(TOKENS[:33], 16, NOTHING)) == 2


@pytest.mark.parametrize("block_tokens", [0, -1, 1 << 32, 1.5, True, "16", None])
def test_a_block_size_that_is_none_is_refused(block_tokens: Any) -> None:
    for make in (NOTHING.root, lambda size: DigestChain(size, NOTHING)):
        with pytest.raises(ConfigError, match=r"block_tokens must be an integer in 1\.\.2\*\*32-1, not"):
            make(block_tokens)
    assert len(NOTHING.root((1 << 32) - 1)) == 32


# ---- what must never share -------------------------------------------------------------------------------------------


def shares_nothing(one: Extras, other: Extras, block_tokens: int = 16) -> bool:
    digests = digest_tokens(TOKENS, block_tokens, one), digest_tokens(TOKENS, block_tokens, other)
    return len(digests[0]) == len(digests[1]) > 0 and set(digests[0]).isdisjoint(digests[1])


ROOTS = [(None, None), ("", None), (None, ""), ("", ""), ("a", None), (None, "a"), ("b", None), ("a", "b"), ("ab", "")]


@pytest.mark.bug("WR03", "WR07")
def test_adapters_and_salts_share_no_block() -> None:
    digests = [digest for adapter, salt in ROOTS for digest in digest_tokens(TOKENS, 16, Extras(adapter, salt, ()))]
    assert len(set(digests)) == len(ROOTS) * 4


@pytest.mark.bug("WR07")
@pytest.mark.parametrize("entry", [Extras, Namespace, MediaItem, Shard, DigestChain, digest_tokens, Namespace.digest])
def test_nothing_that_separates_users_or_models_has_a_default(entry: Any) -> None:
    defaults = [p.name for p in inspect.signature(entry).parameters.values() if p.default is not p.empty]
    assert defaults == []


@pytest.mark.bug("WR05")
def test_other_media_share_only_the_blocks_before_the_first_overlap() -> None:
    def with_media(content: bytes, start: int, length: int = 21) -> list[bytes]:
        return [*digest_tokens(TOKENS, 16, Extras(None, None, (MediaItem(content, start, length),)))]

    plain, image = digest_tokens(TOKENS, 16, NOTHING), with_media(b"image", 20)
    for other in (with_media(b"other", 20), with_media(b"image", 21), with_media(b"image", 20, 22)):
        assert image[0] == other[0] == plain[0]
        assert set(image[1:]).isdisjoint(other[1:])
    assert set(plain[1:]).isdisjoint(image[1:])


def test_media_touch_a_block_from_their_first_token_to_their_last() -> None:
    plain = digest_tokens(TOKENS, 16, NOTHING)
    for start, length, shared in [(15, 1, 0), (16, 1, 1), (31, 1, 1), (32, 1, 2), (0, 64, 0), (64, 5, 4)]:
        media = digest_tokens(TOKENS, 16, Extras(None, None, (MediaItem(b"m", start, length),)))
        assert [a == b for a, b in zip(plain, media, strict=True)] == [block < shared for block in range(4)]


@pytest.mark.parametrize("media", [(MediaItem(b"a", 4, 4), MediaItem(b"b", 7, 1)), (MediaItem(b"a", 4, 4),) * 2])
def test_media_that_overlap_are_refused(media: tuple[MediaItem, ...]) -> None:
    with pytest.raises(TokenError, match="order and not overlap"):
        Extras(None, None, media)


@pytest.mark.parametrize(
    "fields",
    [
        (b"", 0, 1),
        (b"a", -1, 1),
        (b"a", 0, 0),
        ("a", 0, 1),
        (None, 0, 1),
        (bytearray(b"a"), 0, 1),
        (b"a", 1.0, 1),
        (b"a", 0, 1.5),
        (b"a", True, 1),
        (b"a", np.uint8(3), 1),
        (b"a", 0, None),
        (b"a", 1 << 63, 1),
        (b"a", 8, 1 << 63),
        (b"a", (1 << 63) - 1, 1),
    ],
)
def test_media_without_content_or_place_are_refused(fields: Any) -> None:
    with pytest.raises(TokenError, match="MediaItem"):
        MediaItem(*fields)


def test_media_may_end_where_positions_end() -> None:
    for item in (MediaItem(b"a", 8, (1 << 63) - 9), MediaItem(b"a", (1 << 63) - 2, 1)):
        extras = Extras(None, None, (item,))
        assert digest_tokens(TOKENS, 16, extras) == stated_digests(TOKENS, 16, extras)


ITEM = MediaItem(b"a", 0, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adapter", 7),
        ("adapter", b"lora"),
        ("salt", 7),
        ("salt", b"salt"),
        ("media", None),
        ("media", [ITEM]),
        ("media", ITEM),
        ("media", (None,)),
        ("media", ((b"a", 0, 1),)),
    ],
)
def test_extras_of_other_types_are_refused(field: str, value: Any) -> None:
    with pytest.raises(TokenError, match=rf"Extras\.{field} must be"):
        dataclasses.replace(NOTHING, **{field: value})


@pytest.mark.parametrize("extras", [None, (None, None, ())])
def test_a_chain_wants_extras_that_say_there_are_none(extras: Any) -> None:
    with pytest.raises(TokenError, match=r"Extras\(None, None, \(\)\)"):
        DigestChain(16, extras)


class CountedMedia(tuple[MediaItem, ...]):
    """A tuple that counts how often an item is read."""

    __slots__ = ()
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[MediaItem]:
        return map(self.__getitem__, range(len(self)))


def test_the_cost_of_many_media_grows_with_their_number_alone() -> None:
    media = CountedMedia(MediaItem(number.to_bytes(4, "little"), 3 * number, 2) for number in range(700))
    tokens, extras = list(range(3 * len(media))), Extras(None, None, media)
    chain = DigestChain(4, extras)
    CountedMedia.reads = 0
    for start in range(0, len(tokens), 100):
        chain.extend(tokens[start : start + 100])
    assert CountedMedia.reads < 10 * (len(media) + len(chain.digests))
    assert list(chain.digests) == stated_digests(tokens, 4, extras)


def test_block_sizes_share_no_block() -> None:
    assert set(digest_tokens(TOKENS, 16, NOTHING)).isdisjoint(digest_tokens(TOKENS, 8, NOTHING))
    assert digest_tokens([7] * 4, 4, NOTHING)[0] != digest_tokens([7] * 8, 8, NOTHING)[0]


@pytest.mark.bug("WR09", "WR11")
def test_each_field_of_a_namespace_changes_its_digest() -> None:
    def with_layout(**change: Any) -> Namespace:
        return dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, **change))

    changed = [
        dataclasses.replace(NAMESPACE, model="other"),
        dataclasses.replace(NAMESPACE, revision="r2"),
        dataclasses.replace(NAMESPACE, group="other"),
        dataclasses.replace(NAMESPACE, shard=Shard(0, 2)),
        dataclasses.replace(NAMESPACE, shard=Shard(1, 2)),
        dataclasses.replace(NAMESPACE, shard=Shard(1, 4)),
        dataclasses.replace(NAMESPACE, model="weightsr1", revision=""),
        dataclasses.replace(NAMESPACE, model="weights", revision="r1main", group=""),
        with_layout(num_layers=3, num_kv_heads=30),
        with_layout(num_kv_heads=1),
        with_layout(num_kv_heads=1, kind=KVKind.MLA),
        with_layout(head_dim=128),
        with_layout(block_tokens=32),
        *(with_layout(dtype=dtype) for dtype in ("float16", "float32", "float8_e4m3", "float8_e5m2", "int8")),
    ]
    digests = {namespace.digest(epoch) for namespace in [NAMESPACE, *changed] for epoch in (0, 1, 2)}
    assert len(digests) == 3 * (1 + len(changed))
    assert {field.name for field in dataclasses.fields(Namespace)} == {"model", "revision", "layout", "group", "shard"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", None), ("model", b"weights"), ("revision", 2), ("layout", "bf16"), ("group", None), ("shard", (0, 1))],
)
def test_a_namespace_is_checked_by_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Namespace\.{field} must be"):
        dataclasses.replace(NAMESPACE, **{field: value})


@pytest.mark.parametrize(
    ("rank", "size"),
    [(-1, 1), (1, 1), (0, 0), (0.0, 1), (0, 1.0), ("0", 1), (0, None), (False, True), (0, 1 << 32)],
)
def test_a_shard_lies_in_its_size(rank: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"Shard\.rank"):
        Shard(rank, size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("head_dim", -1),
        ("block_tokens", 16.0),
        ("num_kv_heads", True),
        ("dtype", "bf16"),
        ("kind", "kv"),
    ],
)
def test_a_layout_is_checked_by_field(field: str, value: Any) -> None:
    with pytest.raises(LayoutError, match=rf"KVLayout\.{field}"):
        dataclasses.replace(LAYOUT, **{field: value})


def test_a_latent_has_one_head() -> None:
    with pytest.raises(LayoutError, match="num_kv_heads must be 1"):
        dataclasses.replace(LAYOUT, kind=KVKind.MLA)


def test_layout_sizes() -> None:
    assert (LAYOUT.num_planes, LAYOUT.segment_bytes, LAYOUT.block_bytes) == (60, 6144, 60 * 6144)
    assert LAYOUT.token_bytes * 16 == LAYOUT.block_bytes
    latent = KVLayout(
        num_layers=61, num_kv_heads=1, head_dim=576, dtype="float8_e4m3", block_tokens=64, kind=KVKind.MLA
    )
    assert (latent.num_planes, latent.block_bytes) == (61, 61 * 64 * 576)


# ---- keys ------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
def test_a_key_is_its_halves_unshortened(namespace: bytes, digest: bytes) -> None:
    key = make_key(namespace, digest)
    assert key == namespace + digest
    assert split_key(key) == (namespace, digest)


@pytest.mark.bug("SE08")
@pytest.mark.parametrize("length", [0, 4, 8, 16, 20, 28, 31, 33, 64])
def test_digests_of_other_hashes_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"32, not 16 and {length}"):
        make_key(bytes(16), bytes(length))
    with pytest.raises(ConfigError, match=f"48 bytes, not {length}"):
        split_key(kvtier.keys.Key(bytes(length)))


def test_namespace_digests_of_other_lengths_are_refused() -> None:
    for length in (0, 15, 17, 32):
        with pytest.raises(ConfigError, match=f"not {length} and 32"):
            make_key(bytes(length), bytes(32))
