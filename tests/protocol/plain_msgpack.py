"""A reader of msgpack from its specification (https://github.com/msgpack/msgpack/blob/master/spec.md): what a client in
another language would use, so that what kvtier says is read by something else than what wrote it."""

from __future__ import annotations

import struct
from typing import Any


def read(data: bytes) -> Any:
    """The one value in `data`."""
    value, at = _value(data, 0)
    assert at == len(data), f"{len(data) - at} bytes behind the value"
    return value


def _number(data: bytes, at: int, code: str) -> tuple[Any, int]:
    end = at + struct.calcsize(code)
    return struct.unpack(f">{code}", data[at:end])[0], end


def _value(data: bytes, at: int) -> tuple[Any, int]:
    first, at = data[at], at + 1
    if first < 0x80:
        return first, at
    if first < 0x90:
        return _map(data, at, first & 0x0F)
    if first < 0xA0:
        return _array(data, at, first & 0x0F)
    if first < 0xC0:
        return _text(data, at, first & 0x1F)
    if first in (0xC2, 0xC3):
        return first == 0xC3, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in (0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3):
        return _number(data, at, "fdBHIQbhiq"[first - 0xCA])
    make, code = {
        0xC4: (_bytes, "B"),
        0xC5: (_bytes, "H"),
        0xC6: (_bytes, "I"),
        0xD9: (_text, "B"),
        0xDA: (_text, "H"),
        0xDB: (_text, "I"),
        0xDC: (_array, "H"),
        0xDD: (_array, "I"),
        0xDE: (_map, "H"),
        0xDF: (_map, "I"),
    }[first]
    length, at = _number(data, at, code)
    return make(data, at, length)


def _bytes(data: bytes, at: int, length: int) -> tuple[Any, int]:
    assert at + length <= len(data)
    return data[at : at + length], at + length


def _text(data: bytes, at: int, length: int) -> tuple[Any, int]:
    value, at = _bytes(data, at, length)
    return value.decode(), at


def _array(data: bytes, at: int, length: int) -> tuple[Any, int]:
    items = []
    for _ in range(length):
        item, at = _value(data, at)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, length: int) -> tuple[Any, int]:
    items, at = _array(data, at, 2 * length)
    return dict(zip(items[::2], items[1::2], strict=True)), at
