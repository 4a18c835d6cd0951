"""How a block's bytes are made smaller on their way to a slow tier, and whether that pays.

Bytes in, bytes out; no I/O, no state, any thread. LZ4 lets go of the GIL while it works.

LZ4 is the block format (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md) without a length in front: the
frame around the payload has it, and a length that came from a device is never one to allocate by. SHUFFLE_LZ4 first
puts all low bytes of the block's 2-byte elements before all high ones: in bf16 and fp16 the high bytes, sign and
exponent, repeat among neighbours, and the low ones hardly do. The last byte of an odd length stays last.
"""

from __future__ import annotations

from enum import IntEnum

import lz4.block  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, FrameError

__all__ = ["Codec", "codec_by_name", "decode", "encode"]

PAGE_BYTES = 4096
MIN_SAVED = 16
"""One page in this many must be saved."""
MAX_LZ4_BYTES = 0x7E000000  # LZ4_MAX_INPUT_SIZE

_Bytes = npt.NDArray[np.uint8]


class Codec(IntEnum):
    """The numbers stand in frame headers: they never change their meaning."""

    RAW = 0
    LZ4 = 1
    SHUFFLE_LZ4 = 2


def codec_by_name(name: str) -> Codec:
    """The codec that a setting names. Raises ConfigError, which lists them, when it is none."""
    try:
        return {codec.name.lower(): codec for codec in Codec}[name]
    except KeyError:
        known = ", ".join(repr(codec.name.lower()) for codec in Codec)
        raise ConfigError(f"there is no codec {name!r}; there are {known}") from None


def encode(codec: Codec, block: memoryview) -> tuple[Codec, bytes | memoryview]:
    """The payload for a block, and the codec it really has: RAW with the block itself where compressing does not pay.

    block: contiguous bytes of any length. Takes up to about twice its length of memory for the time of the call.
    """
    if codec is Codec.RAW or not PAGE_BYTES < len(block) <= MAX_LZ4_BYTES:
        return Codec.RAW, block
    source: memoryview | _Bytes = _shuffled(block) if codec is Codec.SHUFFLE_LZ4 else block
    payload: bytes = lz4.block.compress(source, store_size=False)
    return (codec, payload) if _pays(len(block), len(payload)) else (Codec.RAW, block)


def decode(codec: int, payload: memoryview, out: memoryview) -> None:
    """Fill `out` with the block that `payload` stands for.

    Raises FrameError for a codec this kvtier does not know, and for a payload that does not decode to exactly
    len(out) bytes; `out` is undefined then. Takes at most about len(out) bytes of memory, whatever the payload claims.
    A payload that was damaged and still decodes is not found here: the frame's checksum is for that.
    """
    if codec == Codec.RAW:
        if len(payload) != len(out):
            raise FrameError(f"a raw payload of {len(payload)} bytes for a block of {len(out)}")
        out[:] = payload
    elif codec == Codec.LZ4:
        out[:] = _decompressed(payload, len(out))
    elif codec == Codec.SHUFFLE_LZ4:
        _unshuffle(np.frombuffer(_decompressed(payload, len(out)), np.uint8), np.frombuffer(out, np.uint8))
    else:
        raise FrameError(f"a payload of codec {codec}; this kvtier knows 0 to {max(Codec)}")


def _pays(raw_bytes: int, stored_bytes: int) -> bool:
    # A frame takes whole pages, so only whole pages are saved in room and transfer. Every read pays for decompressing
    # all of the block, at one to a few GB/s of a core, where a raw one goes straight into its buffer: a device about as
    # fast must bring at least 1/16 less for that.
    pages = -(-raw_bytes // PAGE_BYTES)
    saved = pages - -(-stored_bytes // PAGE_BYTES)
    return saved * MIN_SAVED >= pages


def _decompressed(payload: memoryview, nbytes: int) -> bytes:
    if nbytes > MAX_LZ4_BYTES:
        raise FrameError(f"an LZ4 payload for a block of {nbytes} bytes; LZ4 ends at {MAX_LZ4_BYTES}")
    try:
        # With the size given, LZ4 writes at most that much; a payload that claims more is an error.
        block: bytes = lz4.block.decompress(payload, uncompressed_size=nbytes)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise FrameError(f"a payload that LZ4 cannot decode to {nbytes} bytes: {error}") from error
    if len(block) != nbytes:
        raise FrameError(f"a payload that decodes to {len(block)} bytes for a block of {nbytes}")
    return block


def _shuffled(block: memoryview) -> _Bytes:
    source = np.frombuffer(block, np.uint8)
    planes = np.empty_like(source)
    half = len(source) // 2
    planes[:half] = source[0 : 2 * half : 2]
    planes[half : 2 * half] = source[1 : 2 * half : 2]
    planes[2 * half :] = source[2 * half :]
    return planes


def _unshuffle(planes: _Bytes, out: _Bytes) -> None:
    half = len(out) // 2
    out[0 : 2 * half : 2] = planes[:half]
    out[1 : 2 * half : 2] = planes[half : 2 * half]
    out[2 * half :] = planes[2 * half :]
