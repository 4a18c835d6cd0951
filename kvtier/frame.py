"""The frame: one block as it lies below the host tier, a header page and then the payload, at 4 KiB strides.

The same bytes on disk, in a remote store and on the wire. Sans-I/O: bytes in, bytes or a reason out. A header says
whose block the payload is and what its bytes must hash to, so whatever was torn, flipped or put in the wrong place is
told from the block that was asked for. Checksums are XXH3 (https://github.com/Cyan4973/xxHash): they find accidents;
the key itself is a cryptographic digest.

Header page, little-endian, 4096 bytes, zeros between the fields and the checksum:

    offset  bytes  field
         0      8  magic "KVTframe"
         8      2  format version
        10      2  codec of the payload
        12      4  depth: blocks before this one in its chain, as far as known
        16     48  key: namespace digest, block digest
        64     48  parent's key; zeros for a first block
       112      4  1 when there is a parent
       116      4  length of the tenant
       120      8  raw length: the block's bytes
       128      8  stored length: the payload's bytes
       136      8  XXH3-64 of the payload
       144     16  container: what the frame was written into (a segment's UUID); zeros outside of one
       160     64  tenant, UTF-8, zero-padded
      4088      8  XXH3-64 of bytes 0..4087
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvtier.errors import FrameError
from kvtier.keys import KEY_BYTES, Key

__all__ = [
    "CONTAINER_BYTES",
    "FRAME_MAGIC",
    "HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "NO_CONTAINER",
    "STRIDE_BYTES",
    "FrameHeader",
    "NewerFrameError",
    "frame_bytes",
    "padded",
    "payload_checksum",
]

STRIDE_BYTES = 4096
HEADER_BYTES = STRIDE_BYTES
FRAME_MAGIC = b"KVTframe"
FRAME_VERSION = 1
CONTAINER_BYTES = 16
NO_CONTAINER = bytes(CONTAINER_BYTES)
MAX_TENANT_BYTES = 64
MAX_PAYLOAD_BYTES = 1 << 32
"""No block of any known model comes near; a larger length in a header is damage, and is refused before it is used."""

_FIELDS = struct.Struct("<8sHHI48s48sIIQQQ16s64s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM.size
_NO_KEY = bytes(KEY_BYTES)

assert _FIELDS.size == 224


class NewerFrameError(FrameError):
    """An intact header of a format that this kvtier does not know; `version` is its number."""

    def __init__(self, version: int) -> None:
        super().__init__(f"a frame of format {version}; this kvtier reads format {FRAME_VERSION}")
        self.version = version


def padded(nbytes: int) -> int:
    """The length rounded up to the stride."""
    return -(-nbytes // STRIDE_BYTES) * STRIDE_BYTES


def frame_bytes(stored_bytes: int) -> int:
    """What a frame with a payload of `stored_bytes` takes: header page and padded payload."""
    return HEADER_BYTES + padded(stored_bytes)


def payload_checksum(payload: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a header page says."""

    key: Key
    parent: Key | None
    raw_bytes: int
    """The block's length."""
    stored_bytes: int
    """The payload's length: the block's, unless a codec made it shorter."""
    checksum: int
    """Of the payload as stored."""
    codec: int = 0
    depth: int = 0
    tenant: str = ""
    container: bytes = NO_CONTAINER

    @property
    def frame_bytes(self) -> int:
        return frame_bytes(self.stored_bytes)

    def encode(self) -> bytes:
        """The header page. Raises FrameError for a field that does not fit."""
        tenant = self.tenant.encode("utf-8", "surrogatepass")
        if len(tenant) > MAX_TENANT_BYTES:
            raise FrameError(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes in UTF-8, not {len(tenant)}")
        if not (0 < self.stored_bytes <= MAX_PAYLOAD_BYTES and 0 < self.raw_bytes <= MAX_PAYLOAD_BYTES):
            raise FrameError(
                f"a frame holds 1 to {MAX_PAYLOAD_BYTES} bytes, not {self.stored_bytes} for a block of {self.raw_bytes}"
            )
        if len(self.key) != KEY_BYTES or (self.parent is not None and len(self.parent) != KEY_BYTES):
            raise FrameError(f"a key has {KEY_BYTES} bytes")
        if len(self.container) != CONTAINER_BYTES:
            raise FrameError(f"a container's id has {CONTAINER_BYTES} bytes, not {len(self.container)}")
        try:
            fields = _FIELDS.pack(
                FRAME_MAGIC,
                FRAME_VERSION,
                self.codec,
                self.depth,
                self.key,
                self.parent or _NO_KEY,
                int(self.parent is not None),
                len(tenant),
                self.raw_bytes,
                self.stored_bytes,
                self.checksum,
                self.container,
                tenant,
            )
        except struct.error as error:
            raise FrameError(
                f"a frame's codec, depth and checksum are unsigned integers of 16, 32 and 64 bits, not {self.codec}, "
                f"{self.depth} and {self.checksum}"
            ) from error
        page = fields.ljust(_CHECKSUM_AT, b"\0")
        return page + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))

    @classmethod
    def decode(cls, page: bytes | memoryview) -> FrameHeader:
        """Read a header page. Raises FrameError when it is none or is damaged, NewerFrameError when it is of a newer
        format.
        """
        if len(page) < HEADER_BYTES:
            raise FrameError(f"a frame's header has {HEADER_BYTES} bytes, not {len(page)}")
        fields = bytes(page[: _FIELDS.size])
        if not fields.startswith(FRAME_MAGIC):
            raise FrameError("not a frame: another magic")
        (checksum,) = _CHECKSUM.unpack_from(page, _CHECKSUM_AT)
        if checksum != xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]):
            raise FrameError("a damaged frame header: its checksum does not match")
        _, version, codec, depth, key, parent, has_parent, tenant_bytes, raw, stored, payload, container, tenant = (
            _FIELDS.unpack(fields)
        )
        if version > FRAME_VERSION:
            raise NewerFrameError(version)
        if version != FRAME_VERSION:
            raise FrameError(f"a frame of format {version}; this kvtier reads format {FRAME_VERSION}")
        header_fits = tenant_bytes <= MAX_TENANT_BYTES and 0 < raw <= MAX_PAYLOAD_BYTES
        if has_parent > 1:
            raise FrameError(f"a frame with {has_parent} parents")
        if not header_fits or not 0 < stored <= MAX_PAYLOAD_BYTES:
            raise FrameError(f"a frame that claims {stored} stored and {raw} raw bytes, tenant {tenant_bytes}")
        try:
            name = tenant[:tenant_bytes].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FrameError(f"a frame whose tenant is no UTF-8: {tenant[:tenant_bytes]!r}") from error
        return cls(
            key=Key(key),
            parent=Key(parent) if has_parent else None,
            raw_bytes=raw,
            stored_bytes=stored,
            checksum=payload,
            codec=codec,
            depth=depth,
            tenant=name,
            container=container,
        )
