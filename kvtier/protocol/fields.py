"""What fields of messages may hold: types with their bounds, and what must agree within one message.

Every list has a bound, for the decoder allocates as many places as a list says it has before it reads them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.decisions import MAX_NAME
from kvtier.keys import DIGEST_BYTES, NAMESPACE_BYTES

VERSIONS = (1,)
"""Of the protocol, that this kvtier speaks; the latest last."""
MAX_MESSAGE_BYTES = 1 << 20
"""Of one message without its payload."""
MAX_HELLO_BYTES = 1 << 12
"""Of a Hello: all that may come from someone who is not yet known."""
MAX_BLOCKS = 256
"""That one message reserves, commits, stages or releases, or is granted or publishes: some milliseconds of the
server's time."""
HOLDING_SHARE = 2
"""A client may hold the bytes of the mapping divided by this, leased or being filled: the others go on."""
MAX_LOOKUP_BLOCKS = 16_384
"""That one message asks for, touches or removes."""
MAX_WAIT_MS = 600_000
"""That one message may wait for blocks."""

Id = Annotated[int, Meta(ge=1, lt=1 << 53)]
IdOrNone = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""0: no answer is wanted, or no request is meant."""
Handle = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
BlockBytes = Annotated[int, Meta(ge=1, le=1 << 32)]
BlockCount = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
Credits = Annotated[int, Meta(ge=1, le=1 << 16)]
WaitMs = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
Checksum = Annotated[int, Meta(ge=0)]
"""64 bits: msgpack has no more."""
NamespaceDigest = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Digests = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_BLOCKS * DIGEST_BYTES)]
ManyDigests = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_LOOKUP_BLOCKS * DIGEST_BYTES)]
Parent = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Handles = Annotated[list[Handle], Meta(max_length=MAX_BLOCKS)]
Offsets = Annotated[list[Size], Meta(max_length=MAX_BLOCKS)]
Checksums = Annotated[list[Checksum], Meta(max_length=MAX_BLOCKS)]
Outcomes = Annotated[bytes, Meta(max_length=MAX_BLOCKS)]
ManyOutcomes = Annotated[bytes, Meta(max_length=MAX_LOOKUP_BLOCKS)]
Versions = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1, max_length=16)]
TierNames = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)]
Token = Annotated[str, Meta(max_length=512)]
ShortText = Annotated[str, Meta(max_length=64)]
RequestName = Annotated[str, Meta(max_length=MAX_NAME)]
TierCounts = Annotated[list[Size], Meta(max_length=16)]
Text = Annotated[str, Meta(max_length=1024)]
Counts = Annotated[dict[Text, int | float | Text], Meta(max_length=1024)]
NamedCounts = Annotated[dict[Text, int | float | Text | Counts], Meta(max_length=1024)]


class AnyMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """id: names a request; its answer has the same. 0 where no answer is wanted, or none is meant."""


def check_digests(digests: bytes, parent: bytes = b"") -> None:
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"`digests` of {len(digests)} bytes: no multiple of {DIGEST_BYTES}")
    if len(parent) not in (0, DIGEST_BYTES):
        raise ValueError(f"`parent` of {len(parent)} bytes: {DIGEST_BYTES}, or 0 for none")


def check_outcomes(outcomes: bytes, last: int) -> None:
    if outcomes and max(outcomes) > last:
        raise ValueError(f"outcome {max(outcomes)}: {last} is the last")


def check_counts(**counts: int) -> None:
    if len(set(counts.values())) > 1:
        raise ValueError(f"these must be equal: {counts}")
