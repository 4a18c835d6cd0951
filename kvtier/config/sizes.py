"""Sizes as text or numbers: bytes, bytes a second, bytes by tenant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

__all__ = ["parse_host_size", "parse_quotas", "parse_rate", "parse_room", "parse_size"]

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SIZE_FORM = "write bytes as a positive integer, or a number and B, KiB, MiB, GiB or TiB, such as '8GiB'"


def parse_size(value: object) -> int:
    """Bytes from a positive integer or text with a binary unit; '4.1GiB' is rounded down to a whole byte."""
    num_bytes = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in _UNITS:
        whole, _, fraction = match[1].partition(".")
        num_bytes = int(whole + fraction) * _UNITS[match[2]] // 10 ** len(fraction)
    if type(num_bytes) is not int or num_bytes <= 0:
        raise ValueError(_SIZE_FORM)
    return num_bytes


def parse_host_size(value: object) -> int | Literal["auto"]:
    """As `parse_size`, or the word 'auto'."""
    if value == "auto":
        return "auto"
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def parse_room(value: object) -> int:
    """As `parse_size`, or 0."""
    return 0 if value in (0, "0") and not isinstance(value, bool) else parse_size(value)


def parse_rate(value: object) -> int | Literal["off"]:
    """As `parse_size`, a second, or the word 'off'."""
    if value == "off":
        return "off"
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'off'") from None


_QUOTAS_FORM = (
    "write a table of tenant = size, or text such as 'a=8GiB,b=2GiB', with '*' for any other tenant, or 'none'"
)
MIN_QUOTA = 4096
"""A page: no slot of the pool is worth less."""
MIN_BARE_QUOTA = 1 << 20
"""Of a number without a unit: fewer bytes are a unit forgotten."""
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}|\*")


def parse_quotas(value: object) -> dict[str, int]:
    """Bytes by tenant from a table, or from text with commas between them; the word 'none' is no quota."""
    if isinstance(value, str):
        parts = [] if value == "none" else [part.partition("=") for part in value.split(",")]
        value = {name.strip(): size for name, _, size in parts}
        if len(value) != len(parts):
            raise ValueError("name each tenant once")
    named = value if isinstance(value, Mapping) else {"": 0}
    try:
        quotas = {str(name): parse_size(size) for name, size in named.items()}
    except ValueError:
        raise ValueError(_QUOTAS_FORM) from None
    for (name, size), given in zip(quotas.items(), named.values(), strict=True):
        if not _TENANT.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a tenant; {_QUOTAS_FORM}")
        if size.bit_length() > 63:
            raise ValueError("write numbers below 2**63")
        has_unit = isinstance(given, str) and given.strip()[-1:].isalpha()
        if size < (MIN_QUOTA if has_unit else MIN_BARE_QUOTA):
            example = f"{name}={size}{'GiB' if size < MIN_QUOTA else 'B'}"
            raise ValueError(
                f"{name} may have {size} bytes only: write a unit, such as '{example}', or leave {name} out"
            )
    return quotas
