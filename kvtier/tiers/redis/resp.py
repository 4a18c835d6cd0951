"""The Redis protocol (RESP2), sans-I/O: commands to bytes, and what a reply's lines say.

Where the commands of a batch differ in their keys only, `repeated` makes all of them with a few operations on whole
strings: a look-up of thousands of blocks costs the server's time, not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.keys import Key

__all__ = [
    "CRLF",
    "KEY_ARGUMENT_BYTES",
    "ErrorReply",
    "ProtocolError",
    "Reply",
    "encode",
    "key_argument",
    "parse_number",
    "repeated",
]

CRLF = b"\r\n"
MAX_DIGITS = 20


class ProtocolError(Exception):
    """Bytes that no Redis server sends in this place."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An answer that begins with a minus; `text` is all of it but that."""

    text: str

    @property
    def code(self) -> str:
        """Its first word, in capitals by custom: OOM, MOVED, ERR."""
        return self.text.partition(" ")[0]


Reply = int | bytes | None | ErrorReply | list["Reply"]


def encode(*arguments: bytes | str | int) -> bytes:
    """One command."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def key_argument(key: Key) -> str:
    """How a key stands in the text that names it: namespace, colon, digest, in hex."""
    return key.hex(":", 32)  # counted from the right: after the namespace's 16 bytes, and nowhere else


KEY_ARGUMENT_BYTES = 97
"""Its length."""


def repeated(verb: str, prefix: str, keys: Sequence[Key], *options: str | int, before: bytes = b"") -> bytes:
    """`verb prefix+key options`, once for each key. before: whole commands that go before each of them."""
    tail = "".join(f"${len(str(option))}\r\n{option}\r\n" for option in options)
    head = (
        before.decode("ascii")
        + f"*{2 + len(options)}\r\n${len(verb)}\r\n{verb}\r\n${len(prefix) + KEY_ARGUMENT_BYTES}\r\n{prefix}"
    )
    between = f"\r\n{tail}{head}"
    if not keys:
        return b""
    return f"{head}{between.join([key.hex(':', 32) for key in keys])}\r\n{tail}".encode("ascii")


def parse_number(digits: bytes) -> int:
    """What stands after a colon, dollar or star. Raises ProtocolError for what Redis would not write."""
    if not 0 < len(digits) <= MAX_DIGITS or not digits.removeprefix(b"-").isdigit():
        raise ProtocolError(f"a length or number was expected, not {digits[:40]!r}")
    return int(digits)
