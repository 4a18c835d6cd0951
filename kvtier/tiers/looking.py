"""The host tier's books, and what is read from them alone: which blocks are here, and why another is not."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvtier.errors import IntegrityError
from kvtier.index import BlockIndex, BlockState
from kvtier.keys import BlockDigest, Key, split_key
from kvtier.reasons import MissReason
from kvtier.slots import SlotPool
from kvtier.tiers.eviction import EvictionOrder
from kvtier.tiers.forked import OwnProcess
from kvtier.tiers.listeners import Listened
from kvtier.tiers.reservation import Phase, Reservation

__all__ = ["Looked"]


class Looked(OwnProcess, Listened):
    """Base of the host tier, which writes them. Mutable state: all of it but the pool, guarded by `_lock`."""

    def __init__(self, pool: SlotPool, order: EvictionOrder, *, keeps_checksums: bool) -> None:
        super().__init__()
        self._pool = pool
        self._order = order
        self._keeps_checksums = keeps_checksums
        self._lock = threading.Lock()
        self._index = BlockIndex()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        """Keys of blocks that were evicted, the latest last."""
        self._names: dict[int, tuple[bytes, BlockDigest, int, float | None]] = {}  # by slot; its length and lifetime
        self._checksums: dict[int, int] = {}  # by slot
        self._filling: dict[int, Reservation] = {}  # by slot

    @property
    def num_blocks(self) -> int:
        """Blocks that may be read now."""
        return self._index.num_committed

    def committed_run(self, namespace: bytes, digests: Sequence[BlockDigest]) -> int:
        """How many leading blocks are here. Pure: no lease, no recency, no statistics."""
        with self._lock:
            return self._index.committed_length(namespace, digests)

    def committed(self, namespace: bytes, digests: Sequence[bytes]) -> bytes:
        """A byte for each block: 1 where it is here, else 0. Pure, as `committed_run`; thousands in a millisecond."""
        with self._lock:
            return self._index.committed(namespace, digests)

    def state(self, namespace: bytes, digest: BlockDigest) -> BlockState | None:
        """What the index says of one block; None when it is not named."""
        return self.states(namespace, [digest])[0]

    def states(self, namespace: bytes, digests: Sequence[BlockDigest]) -> list[BlockState | None]:
        """What the index says of each block."""
        with self._lock:
            found = [self._index.find(namespace, digest) for digest in digests]
        return [block[1] if block else None for block in found]

    def why_missing(self, namespace: bytes, digest: BlockDigest) -> MissReason:
        """Why a block that a lookup did not find was not found."""
        with self._lock:
            if self._index.find(namespace, digest) is not None:
                return MissReason.BEING_STORED
            return MissReason.EVICTED if namespace + digest in self._ghosts else MissReason.ABSENT

    def namespaces(self) -> list[bytes]:
        """The namespace digests of every block that the index names."""
        with self._lock:
            return self._index.namespaces()

    def digests(self, namespace: bytes) -> list[bytes]:
        """Every block of a namespace that the index names."""
        with self._lock:
            return self._index.digests(namespace)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [bool(self._index.committed_run(space, [digest])) for space, digest in map(split_key, keys)]

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        with self._lock:
            self._index.check_integrity()
            rows = list(self._index.items())
            if {slot: (space, digest) for space, digest, slot, _ in rows} != {s: n[:2] for s, n in self._names.items()}:
                raise IntegrityError("host tier: index and slot names disagree")
            committed = {slot for *_, slot, state in rows if state is BlockState.COMMITTED}
            filling = {slot for slot, filled in self._filling.items() if filled._phase is Phase.FILLING}
            if self._filling.keys() != filling or filling != self._names.keys() - committed:
                raise IntegrityError("host tier: reserved slots and open reservations disagree")
            if self._checksums.keys() != (committed if self._keeps_checksums else set()):
                raise IntegrityError("host tier: committed slots and checksums disagree")
            self._order.check_integrity(self._names, committed)
            unleased = [slot for *_, slot, state in rows if state is BlockState.RESERVED and self._pool.can_evict(slot)]
        if unleased:
            raise IntegrityError(f"host tier: {len(unleased)} reserved slots have no lease")
