"""Who a block is: namespace, digest chain, key. Pure functions of canonical bytes; no environment can change them.

A block's digest is SHA-256 over its parent's digest, its tokens and, where it has any, its extras. A chain starts from
a root digest that carries what holds for the whole prompt (adapter, cache salt). The scheme is that of vLLM's prefix
cache (a hash chain over full blocks with extra keys), with a fixed byte encoding in place of pickled objects.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, TokenError
from kvtier.layout import KVLayout

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES",
    "NAMESPACE_BYTES",
    "BlockDigest",
    "DigestChain",
    "Extras",
    "Key",
    "MediaItem",
    "Namespace",
    "Shard",
    "Tokens",
    "check_keys",
    "digest_tokens",
    "make_key",
    "split_key",
]

NAMESPACE_BYTES = 16
DIGEST_BYTES = 32
KEY_BYTES = NAMESPACE_BYTES + DIGEST_BYTES

FORMAT_VERSION = 1
HASH_ALGORITHM = "sha256"

BlockDigest = NewType("BlockDigest", bytes)
"""32 bytes. A NewType so that a type checker tells it from any other bytes at no cost at run time."""

Key = NewType("Key", bytes)
"""Namespace digest, then block digest: 48 bytes, the same in every tier, file and message."""

Tokens = Sequence[int] | npt.NDArray[np.integer]

_MAX_UINT32 = (1 << 32) - 1
_MAX_POSITION = (1 << 63) - 1


def make_key(namespace_digest: bytes, digest: bytes) -> Key:
    """Join the two halves; raises ConfigError if either has another length than the scheme's."""
    if len(namespace_digest) != NAMESPACE_BYTES or len(digest) != DIGEST_BYTES:
        raise ConfigError(
            f"a key is a namespace digest of {NAMESPACE_BYTES} bytes and a block digest of {DIGEST_BYTES}, "
            f"not {len(namespace_digest)} and {len(digest)}; digests of other hash algorithms are not accepted"
        )
    return Key(namespace_digest + digest)


def split_key(key: Key) -> tuple[bytes, BlockDigest]:
    """The namespace digest and the block digest of `key`."""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key[:NAMESPACE_BYTES], BlockDigest(key[NAMESPACE_BYTES:])


def check_keys(keys: Sequence[Key]) -> None:
    """Raises ConfigError, as `split_key`, unless each is a key. At once, as there may be thousands: only where one has
    another length they are looked at one by one."""
    if set(map(len, keys)) - {KEY_BYTES}:
        for key in keys:
            split_key(key)


def _field(data: bytes) -> bytes:
    """Length-delimited, so that no two lists of fields encode alike."""
    return struct.pack("<I", len(data)) + data


def _optional(text: str | None) -> bytes:
    """Absent and empty differ."""
    return b"\x00" if text is None else b"\x01" + _field(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of every block one worker holds: rank of size. `Shard(0, 1)` also stands for replicated KV."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if type(self.rank) is not int or type(self.size) is not int or self.size > _MAX_UINT32:
            raise ConfigError(
                f"Shard.rank and Shard.size must be integers below 2**32, not {self.rank!r} and {self.size!r}"
            )
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"Shard.rank must lie in 0..size-1; it is {self.rank} of size {self.size}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must match for KV to be reusable, fixed for the life of an engine. Nothing in it has a default.

    model: fingerprint of the weights, not a name or path: two models of one name must differ here.
    revision: anything else of the model that changes its KV (quantisation, rope scaling, adapter merged in).
    layout: shape and type of a block.
    group: the KV group's name, for models whose layers keep different caches.
    shard: whose part of the block.
    """

    model: str
    revision: str
    layout: KVLayout
    group: str
    shard: Shard

    def __post_init__(self) -> None:
        kinds = {"model": str, "revision": str, "layout": KVLayout, "group": str, "shard": Shard}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"Namespace.{name} must be a {kind.__name__}, not {value!r}")

    def digest(self, epoch: int) -> bytes:
        """16 bytes of a SHA-256 over every field, format version, hash algorithm and the epoch, which counts resets."""
        parts = (
            b"kvtier namespace",
            struct.pack("<II" if epoch < 1 << 32 else "<IQ", FORMAT_VERSION, epoch),
            HASH_ALGORITHM.encode(),
            self.model.encode("utf-8", "surrogatepass"),
            self.revision.encode("utf-8", "surrogatepass"),
            self.layout.canonical_bytes(),
            self.group.encode("utf-8", "surrogatepass"),
            struct.pack("<II", self.shard.rank, self.shard.size),
        )
        return hashlib.sha256(b"".join(_field(part) for part in parts)).digest()[:NAMESPACE_BYTES]


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, sound or embedding whose placeholder tokens say nothing of its content.

    content: a cryptographic digest of the content, as bytes.
    start, length: the placeholder tokens it stands for, as positions in the prompt below 2**63.
    """

    content: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.content, bytes):
            raise TokenError(f"MediaItem.content must be bytes, a digest of the content, not {self.content!r}")
        if type(self.start) is not int or type(self.length) is not int:
            raise TokenError(f"MediaItem needs integers, not start {self.start!r} and length {self.length!r}")
        if self.start < 0 or self.length < 1 or self.end > _MAX_POSITION or not 0 < len(self.content) <= _MAX_UINT32:
            raise TokenError(
                f"MediaItem needs content, start >= 0, length >= 1 and an end below 2**63; "
                f"got {len(self.content)} bytes, start {self.start}, length {self.length}"
            )

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides its tokens decides a prompt's KV. No field has a default: an integration that lacks one must say
    None.

    adapter: LoRA or other adapter, id and version in one string; None is the base model.
    salt: separates users who must not learn from each other's cache; None and "" differ.
    media: items in the order of their start, not overlapping.
    """

    adapter: str | None
    salt: str | None
    media: tuple[MediaItem, ...]

    def __post_init__(self) -> None:
        for name in ("adapter", "salt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TokenError(f"Extras.{name} must be text or None, not {value!r}")
        if not isinstance(self.media, tuple):
            raise TokenError(f"Extras.media must be a tuple of MediaItem, not {self.media!r}")
        end = 0
        for item in self.media:
            if not isinstance(item, MediaItem):
                raise TokenError(f"Extras.media must be a tuple of MediaItem; found {item!r}")
            if item.start < end:
                raise TokenError(
                    f"Extras.media must be in order and not overlap: an item starts at {item.start} before {end}"
                )
            end = item.end

    def root(self, block_tokens: int) -> BlockDigest:
        """The digest that a chain of blocks of `block_tokens` tokens starts from; ConfigError for a size that is
        none.
        """
        if type(block_tokens) is not int or not 1 <= block_tokens <= _MAX_UINT32:
            raise ConfigError(f"block_tokens must be an integer in 1..2**32-1, not {block_tokens!r}")
        data = b"kvtier chain" + struct.pack("<II", FORMAT_VERSION, block_tokens)
        return BlockDigest(hashlib.sha256(data + _optional(self.adapter) + _optional(self.salt)).digest())


def _token_bytes(tokens: Tokens) -> bytes:
    """Little-endian uint32, the canonical form of tokens."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise TokenError(f"tokens must be a 1-D integer array, not {tokens.ndim}-D {tokens.dtype}")
        if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < 1 << 32):
            raise TokenError(f"token ids must lie in 0..2**32-1, not {int(tokens.min())}..{int(tokens.max())}")
        return tokens.astype("<u4", copy=False).tobytes()
    if isinstance(tokens, (bytes, bytearray)):
        tokens = list(tokens)  # array() would take them for packed words
    try:
        packed = array("I", tokens)
    except (NotImplementedError, OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers in 0..2**32-1; found {_first_bad(tokens)!r}") from error
    return np.frombuffer(packed, np.uint32).astype("<u4", copy=False).tobytes()


def _first_bad(tokens: Tokens) -> object:
    """The first that is no token id; all of them where they cannot be told apart."""
    try:
        return next((t for t in tokens if not isinstance(t, (int, np.integer)) or not 0 <= t <= _MAX_UINT32), tokens)
    except (NotImplementedError, TypeError):  # no sequence, or one of several dimensions
        return tokens


class DigestChain:
    """The digests of one prompt's full blocks, extended as tokens come; the tail that fills no block waits.

    Owned by one thread. A chain that was extended piece by piece equals one extended at once.
    """

    __slots__ = ("_block_tokens", "_digests", "_media", "_next_media", "_parent", "_tail")

    def __init__(self, block_tokens: int, extras: Extras) -> None:
        if not isinstance(extras, Extras):
            raise TokenError(f"extras must be an Extras, Extras(None, None, ()) when there are none, not {extras!r}")
        self._parent = extras.root(block_tokens)
        self._block_tokens = block_tokens
        self._media = extras.media
        self._next_media = 0  # the first item that does not end before the next block
        self._digests: list[BlockDigest] = []
        self._tail = b""

    @property
    def digests(self) -> Sequence[BlockDigest]:
        """One digest per full block, first block first. The list grows in place; do not change it."""
        return self._digests

    @property
    def num_tokens(self) -> int:
        return len(self._digests) * self._block_tokens + len(self._tail) // 4

    def extend(self, tokens: Tokens) -> None:
        """Append tokens; raises TokenError, and appends nothing, when one is not an integer in 0..2**32-1."""
        data = self._tail + _token_bytes(tokens) if self._tail else _token_bytes(tokens)
        step = 4 * self._block_tokens
        full = len(data) - len(data) % step
        if self._media:
            self._hash_with_media(data, full, step)
        else:
            self._hash(data, full, step)
        self._tail = data[full:]

    def _hash(self, data: bytes, full: int, step: int) -> None:
        # The cost of a lookup is this loop: a NewType's call per block would add a tenth to it.
        parent: bytes = self._parent
        sha256, append = hashlib.sha256, cast("list[bytes]", self._digests).append
        for offset in range(0, full, step):
            parent = sha256(parent + data[offset : offset + step]).digest()
            append(parent)
        self._parent = BlockDigest(parent)

    def _hash_with_media(self, data: bytes, full: int, step: int) -> None:
        for offset in range(0, full, step):
            block = self._parent + data[offset : offset + step] + self._media_of_next_block()
            self._parent = BlockDigest(hashlib.sha256(block).digest())
            self._digests.append(self._parent)

    def _media_of_next_block(self) -> bytes:
        """Media that overlap the block, each with its place relative to it. They are in order: none is passed twice."""
        media, index = self._media, self._next_media
        start = len(self._digests) * self._block_tokens
        end = start + self._block_tokens
        while index < len(media) and media[index].end <= start:
            index += 1
        self._next_media = index
        parts = []
        while index < len(media) and media[index].start < end:
            item = media[index]
            parts.append(struct.pack("<qq", item.start - start, item.length) + _field(item.content))
            index += 1
        return b"".join(parts)


def digest_tokens(tokens: Tokens, block_tokens: int, extras: Extras) -> list[BlockDigest]:
    """The digests of the full blocks of `tokens`."""
    chain = DigestChain(block_tokens, extras)
    chain.extend(tokens)
    return list(chain.digests)
