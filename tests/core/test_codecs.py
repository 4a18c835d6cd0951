"""Codecs: what goes in comes out, what does not pay stays as it was, and damage is an answer."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import lz4.block  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs import Codec, codec_by_name, decode, encode
from kvtier.errors import ConfigError, FrameError

COMPRESSING = [Codec.LZ4, Codec.SHUFFLE_LZ4]
PAGE = 4096


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Repetitive, random, or half of each; of any length around pages and odd."""
    nbytes = draw(st.one_of(st.integers(0, 3), st.integers(PAGE - 2, PAGE + 2), st.integers(0, 40_000)))
    noise = random.Random(draw(st.integers(0, 2**32))).randbytes(nbytes)
    period = draw(st.integers(1, 64))
    quiet = (noise[:period] * (nbytes // period + 1))[:nbytes]
    cut = draw(st.sampled_from([0, nbytes // 2, nbytes]))
    return noise[:cut] + quiet[cut:]


def decoded(codec: int, payload: bytes | memoryview, nbytes: int) -> bytes:
    """What decode gives, into the middle of a larger buffer whose other bytes must stay."""
    buffer = bytearray(b"\xa5" * (nbytes + 14))
    decode(codec, memoryview(payload), memoryview(buffer)[7 : 7 + nbytes])
    assert buffer[:7] == buffer[7 + nbytes :] == b"\xa5" * 7
    return bytes(buffer[7 : 7 + nbytes])


@given(st.sampled_from(Codec), blocks())
def test_what_goes_in_comes_out(codec: Codec, block: bytes) -> None:
    used, payload = encode(codec, memoryview(block))
    assert used in (codec, Codec.RAW)
    assert decoded(used, payload, len(block)) == block


@given(st.sampled_from(COMPRESSING), blocks())
def test_a_compressed_payload_saves_a_sixteenth_of_the_pages(codec: Codec, block: bytes) -> None:
    view = memoryview(block)
    used, payload = encode(codec, view)
    if used is Codec.RAW:
        assert payload is view
    else:
        pages, taken = -(-len(block) // PAGE), -(-len(payload) // PAGE)
        assert (pages - taken) * 16 >= pages > taken


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, PAGE - 1, PAGE])
def test_a_block_of_one_page_has_no_page_to_save(codec: Codec, nbytes: int) -> None:
    block = memoryview(bytes(nbytes))
    assert encode(codec, block) == (Codec.RAW, block)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_noise_stays_as_it_is(codec: Codec) -> None:
    block = memoryview(random.Random(0).randbytes(64 * PAGE + 1))
    used, payload = encode(codec, block)
    assert used is Codec.RAW
    assert payload is block


@pytest.mark.parametrize(("quiet_pages", "pays"), [(6, True), (3, False)])
def test_a_saving_under_a_sixteenth_is_none(quiet_pages: int, pays: bool) -> None:
    block = random.Random(1).randbytes((64 - quiet_pages) * PAGE) + bytes(quiet_pages * PAGE)
    assert (encode(Codec.LZ4, memoryview(block))[0] is Codec.LZ4) is pays


def test_byte_planes_find_what_plain_lz4_does_not() -> None:
    values = np.random.default_rng(7).normal(size=64 * 1024).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    assert encode(Codec.LZ4, memoryview(bf16))[0] is Codec.RAW
    used, payload = encode(Codec.SHUFFLE_LZ4, memoryview(bf16))
    assert used is Codec.SHUFFLE_LZ4
    assert decoded(used, payload, len(bf16)) == bf16


def test_the_stored_forms_do_not_change() -> None:
    planes = lz4.block.compress(b"\x01\x03\x02\x04\x05", store_size=False)
    assert decoded(2, planes, 5) == b"\x01\x02\x03\x04\x05"
    assert decoded(1, b"\x50abcde", 5) == b"abcde"
    assert decoded(0, b"abcde", 5) == b"abcde"


@pytest.mark.parametrize("codec", [3, 65535, -1])
def test_an_unknown_codec(codec: int) -> None:
    with pytest.raises(FrameError, match=f"codec {codec}"):
        decoded(codec, b"abcd", 4)


@given(st.sampled_from(Codec), blocks(), st.integers(0, 50_000))
def test_another_length_is_an_error(codec: Codec, block: bytes, nbytes: int) -> None:
    used, payload = encode(codec, memoryview(block))
    with pytest.raises(FrameError):
        decoded(used, payload, nbytes + (nbytes >= len(block)))


@pytest.mark.parametrize("codec", COMPRESSING)
def test_no_bytes_from_a_compressed_payload(codec: Codec) -> None:
    assert decoded(codec, b"\0", 0) == b""


@given(st.sampled_from(COMPRESSING), st.binary(max_size=300), st.integers(0, 5000))
def test_any_bytes_decode_or_are_an_error(codec: Codec, payload: bytes, nbytes: int) -> None:
    with contextlib.suppress(FrameError):
        decoded(codec, payload, nbytes)


@given(st.sampled_from(COMPRESSING), blocks(), st.data())
def test_a_damaged_payload_decodes_or_is_an_error(codec: Codec, block: bytes, data: st.DataObject) -> None:
    payload = bytearray(encode(codec, memoryview(block))[1])
    for _ in range(data.draw(st.integers(0, 3)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(payload)))
    with contextlib.suppress(FrameError):
        decoded(codec, bytes(payload[:cut]), len(block))


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_payload_that_claims_much_takes_no_memory(codec: Codec) -> None:
    bomb = lz4.block.compress(bytes(64 << 20), store_size=False)
    out = bytearray(8192)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(codec, memoryview(bomb), memoryview(out))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_names() -> None:
    assert [codec_by_name(name) for name in ("raw", "lz4", "shuffle_lz4")] == list(Codec)
    for name in ("", "zstd", "RAW"):
        with pytest.raises(ConfigError, match="'raw', 'lz4', 'shuffle_lz4'"):
            codec_by_name(name)
