"""What is said of blocks on their way to the server: slots reserved and committed, or granted and published."""

from __future__ import annotations

from kvtier.keys import DIGEST_BYTES
from kvtier.protocol.fields import (
    AnyMessage,
    BlockBytes,
    BlockCount,
    Checksums,
    Digests,
    Handles,
    Id,
    IdOrNone,
    NamespaceDigest,
    Offsets,
    Outcomes,
    Size,
    check_counts,
    check_digests,
    check_outcomes,
)
from kvtier.protocol.outcomes import CommitOutcome, PublishOutcome, ReserveOutcome

__all__ = ["Abort", "Commit", "Committed", "Grant", "Granted", "Publish", "Published", "Reserve", "Reserved"]


class Reserve(AnyMessage, tag=4, frozen=True):
    """Slots for blocks of `block_bytes`, to be filled and then committed. Answered by Reserved.

    parents: of each block the one before it in its chain, 32 zeros for none. ttl_ms: for how long they are worth
    keeping; 0: as the server is set.
    """

    id: Id
    namespace: NamespaceDigest
    block_bytes: BlockBytes
    digests: Digests
    parents: Digests
    ttl_ms: Size = 0

    def __post_init__(self) -> None:
        check_digests(self.digests)
        check_counts(digests=len(self.digests), parents=len(self.parents))


class Commit(AnyMessage, tag=5, frozen=True):
    """Slots are filled: make the blocks findable, in this order. Answered by Committed once they are.

    checksums: XXH3-64 of each block. Without a mapping the blocks' bytes follow as payload, one behind the other.
    """

    id: Id
    reservations: Handles
    checksums: Checksums

    def __post_init__(self) -> None:
        check_counts(reservations=len(self.reservations), checksums=len(self.checksums))


class Abort(AnyMessage, tag=6, frozen=True):
    """Nothing writes to these slots any more, reserved or granted ones: they are the server's again. Answered by Done,
    unless id is 0."""

    id: IdOrNone
    reservations: Handles


class Grant(AnyMessage, tag=17, frozen=True):
    """Slots for `number` blocks of `block_bytes` that have no name yet: to be filled and then published, or given back
    by Abort. Only with a mapping. Answered by Granted."""

    id: Id
    block_bytes: BlockBytes
    number: BlockCount


class Publish(AnyMessage, tag=18, frozen=True):
    """Granted slots are filled: make each findable as this block, in this order. Answered by Published once they are.

    Of what is STORED the client holds a lease, under the number it was granted under, until Release; the rest stays as
    it was. parents, ttl_ms: as of Reserve. checksums: XXH3-64 of each block. Only with a mapping.
    """

    id: Id
    namespace: NamespaceDigest
    block_bytes: BlockBytes
    reservations: Handles
    digests: Digests
    parents: Digests
    checksums: Checksums
    ttl_ms: Size = 0

    def __post_init__(self) -> None:
        check_digests(self.digests)
        check_counts(digests=len(self.digests), parents=len(self.parents))
        blocks = len(self.digests) // DIGEST_BYTES
        check_counts(blocks=blocks, reservations=len(self.reservations), checksums=len(self.checksums))


class Reserved(AnyMessage, tag=68, frozen=True):
    """outcomes: of ReserveOutcome, a byte a block. reservations, offsets: of those that are RESERVED, in their order;
    an offset is the slot's first byte in the mapping."""

    id: Id
    outcomes: Outcomes
    reservations: Handles
    offsets: Offsets

    def __post_init__(self) -> None:
        check_outcomes(self.outcomes, ReserveOutcome.FULL)
        reserved = self.outcomes.count(ReserveOutcome.RESERVED)
        check_counts(reserved=reserved, reservations=len(self.reservations), offsets=len(self.offsets))


class Committed(AnyMessage, tag=69, frozen=True):
    """outcomes: of CommitOutcome, a byte a block."""

    id: Id
    outcomes: Outcomes

    def __post_init__(self) -> None:
        check_outcomes(self.outcomes, CommitOutcome.VOID)


class Granted(AnyMessage, tag=76, frozen=True):
    """As many slots as there was room for, maybe none. reservations, offsets: as of Reserved."""

    id: Id
    reservations: Handles
    offsets: Offsets

    def __post_init__(self) -> None:
        check_counts(reservations=len(self.reservations), offsets=len(self.offsets))


class Published(AnyMessage, tag=77, frozen=True):
    """outcomes: of PublishOutcome, a byte a block."""

    id: Id
    outcomes: Outcomes

    def __post_init__(self) -> None:
        check_outcomes(self.outcomes, PublishOutcome.VOID)
