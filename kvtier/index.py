"""Which block is in which slot, and in what state: bytes to packed integers, no object per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import repeat

from kvtier.errors import IntegrityError

__all__ = ["BlockIndex", "BlockState"]

STATE_BITS = 1
COMMITTED_BIT = 1


class BlockState(IntEnum):
    """What a lookup may say of a block that the index names."""

    RESERVED = 0
    """A slot is set aside and being filled; nobody may read it."""
    COMMITTED = 1
    """Its bytes are there and are this block's."""


class BlockIndex:
    """Maps (namespace digest, block digest) to slot and state.

    A dictionary per namespace, so that looking up a prompt joins no keys. Not thread-safe: the tier that owns it
    guards it with its lock.
    """

    def __init__(self) -> None:
        self._spaces: dict[bytes, dict[bytes, int]] = {}
        self._num_committed = 0
        self._num_reserved = 0

    @property
    def num_committed(self) -> int:
        return self._num_committed

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    def find(self, namespace: bytes, digest: bytes) -> tuple[int, BlockState] | None:
        """Slot and state, or None when the index does not name the block."""
        packed = self._spaces.get(namespace, {}).get(digest)
        if packed is None:
            return None
        return packed >> STATE_BITS, BlockState(packed & 1)

    def slot_of(self, namespace: bytes, digest: bytes) -> int | None:
        """As `find`, without the state."""
        space = self._spaces.get(namespace)
        packed = None if space is None else space.get(digest)
        return None if packed is None else packed >> STATE_BITS

    def committed_slot(self, namespace: bytes, digest: bytes) -> int | None:
        """Where a block may be read, or None."""
        space = self._spaces.get(namespace)
        packed = 0 if space is None else space.get(digest, 0)
        return packed >> STATE_BITS if packed & 1 else None

    def committed_run(self, namespace: bytes, digests: Sequence[bytes]) -> list[int]:
        """The slots of the leading blocks that are committed, up to the first that is not."""
        get = self._spaces.get(namespace, {}).get
        slots: list[int] = []
        for digest in digests:
            packed = get(digest)
            if packed is None or not packed & 1:
                break
            slots.append(packed >> STATE_BITS)
        return slots

    def committed_length(self, namespace: bytes, digests: Sequence[bytes]) -> int:
        """How long `committed_run` is."""
        space = self._spaces.get(namespace, {})
        if not self._num_reserved and all(map(space.__contains__, digests)):  # as fast as Python can look them up
            return len(digests)
        num_blocks = 0
        for packed in map(space.get, digests):
            if packed is None or not packed & 1:
                break
            num_blocks += 1
        return num_blocks

    def committed(self, namespace: bytes, digests: Sequence[bytes]) -> bytes:
        """A byte for each block: 1 where it is committed, else 0."""
        space = self._spaces.get(namespace)
        if not space:
            return bytes(len(digests))
        if not self._num_reserved:  # as fast as Python can look them up
            return bytes(map(space.__contains__, digests))
        return bytes([packed & 1 for packed in map(space.get, digests, repeat(0))])

    def reserve(self, namespace: bytes, digest: bytes, slot: int) -> None:
        space = self._spaces.setdefault(namespace, {})
        assert digest not in space, "reserved twice"
        space[digest] = slot << STATE_BITS  # RESERVED
        self._num_reserved += 1

    def commit(self, namespace: bytes, digest: bytes) -> None:
        """RESERVED to COMMITTED."""
        space = self._spaces[namespace]
        assert not space[digest] & 1, "committed twice"
        space[digest] |= COMMITTED_BIT
        self._num_reserved -= 1
        self._num_committed += 1

    def remove(self, namespace: bytes, digest: bytes) -> None:
        """Forget the block, whatever its state."""
        space = self._spaces[namespace]
        packed = space.pop(digest)
        if not space:
            del self._spaces[namespace]
        if packed & 1:
            self._num_committed -= 1
        else:
            self._num_reserved -= 1

    def namespaces(self) -> list[bytes]:
        """Every namespace with a block."""
        return list(self._spaces)

    def digests(self, namespace: bytes) -> list[bytes]:
        """Every block of a namespace, whatever its state."""
        return list(self._spaces.get(namespace, ()))

    def items(self) -> Iterator[tuple[bytes, bytes, int, BlockState]]:
        """Namespace, digest, slot and state of every block, in no order. O(blocks)."""
        for namespace, space in self._spaces.items():
            for digest, packed in space.items():
                yield namespace, digest, packed >> STATE_BITS, BlockState(packed & 1)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts match and no slot has two blocks. O(blocks)."""
        rows = list(self.items())
        slots = [slot for _, _, slot, _ in rows]
        if len(set(slots)) != len(slots):
            raise IntegrityError("index: two blocks name one slot")
        committed = sum(state is BlockState.COMMITTED for *_, state in rows)
        if (committed, len(rows) - committed) != (self._num_committed, self._num_reserved):
            raise IntegrityError(
                f"index: counts {self._num_committed} committed and {self._num_reserved} reserved, "
                f"holds {committed} and {len(rows) - committed}"
            )
