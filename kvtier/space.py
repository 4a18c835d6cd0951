"""A space: one engine's part of a store, every call bound to its namespace and the current epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.decisions import Decision, DecisionLog
from kvtier.durability import Durability
from kvtier.keys import BlockDigest, Namespace, make_key
from kvtier.leases import Lease, Owner
from kvtier.located import Located
from kvtier.lower import LowerTier
from kvtier.membership import Question
from kvtier.metrics import StoreCounters
from kvtier.reasons import DropReason, MissReason
from kvtier.slots import SlotPool
from kvtier.stage import Stage
from kvtier.staging import Stager
from kvtier.tickets import Ticket
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction, Reservation

__all__ = ["Lookup", "Space"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of a lookup: how many leading blocks are held, and why the next one is not."""

    num_blocks: int
    miss: MissReason | None
    """None when every block asked for is held."""


class Home(Protocol):
    """The store, as its spaces need it."""

    @property
    def host(self) -> HostTier: ...

    @property
    def pool(self) -> SlotPool: ...

    @property
    def stager(self) -> Stager: ...

    @property
    def lower(self) -> Sequence[LowerTier]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def counters(self) -> StoreCounters: ...

    @property
    def decisions(self) -> DecisionLog: ...

    def tier(self, name: str) -> LowerTier: ...

    def check_usable(self) -> None: ...


class Space:
    """One namespace's view of the store; binds every call to that namespace and the current epoch."""

    def __init__(self, store: Home, namespace: Namespace) -> None:
        self._store = store
        self._host = store.host
        self.namespace = namespace
        self.block_bytes = namespace.layout.block_bytes
        self._epoch_digest = (store.epoch, namespace.digest(store.epoch))

    @property
    def digest(self) -> bytes:
        """The namespace's digest in the current epoch."""
        epoch, digest = self._epoch_digest
        if epoch != self._store.epoch:
            epoch = self._store.epoch
            digest = self.namespace.digest(epoch)
            self._epoch_digest = (epoch, digest)
        return digest

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The host pool's bytes; a lease's offset points into it."""
        return self._store.pool.buffer

    @property
    def capacity_blocks(self) -> int:
        """Blocks of this layout that the host pool holds when it holds nothing else."""
        return self._store.pool.capacity_slots(self.block_bytes)

    def owner(self, name: str) -> Owner:
        """A holder for leases and reservations; closing it ends them all."""
        return self._store.pool.owner(name)

    def lookup(self, digests: Sequence[BlockDigest]) -> Ticket[Lookup]:
        """Which leading blocks of a prompt are held. Pure: no lease, no recency, no statistics."""
        self._store.check_usable()
        held = self._host.committed_run(self.digest, digests)
        miss = None if held == len(digests) else self._why_missing(digests[held])
        return Ticket.resolved(Lookup(held, miss))

    def _why_missing(self, digest: BlockDigest) -> MissReason:
        miss = self._host.why_missing(self.digest, digest)
        if miss is MissReason.BEING_STORED:
            return miss
        for lower in self._store.lower:
            if lower.holds(self.digest, digest):
                return MissReason.NOT_STAGED if lower.is_available else MissReason.TIER_DOWN
        if miss is MissReason.ABSENT and any(lower.is_remote and not lower.is_available for lower in self._store.lower):
            return MissReason.TIER_DOWN  # it may hold it, and nobody can ask
        return miss

    def locate(self, digests: Sequence[BlockDigest], last: Collection[str] = ()) -> Located:
        """Which tier holds each of a prompt's leading blocks, of lower tiers' only what half the host pool takes: the
        first in their order that does and may be asked now. last: tiers that are taken only where no other holds a
        block. Pure, as `lookup`; `stage` can begin with the answer."""
        self._store.check_usable()
        return self._store.stager.locate(self.digest, digests, self.block_bytes, self.capacity_blocks // 2, last)

    def ask(self, digests: Sequence[BlockDigest], found: Located, last: Collection[str] = ()) -> list[Question]:
        """Begin to ask remote tiers for those of these blocks that `locate` did not find, or only in the `last`; none
        where there is nothing to ask, or nobody. Never blocks. Once all are done `locate` knows what they answered."""
        self._store.check_usable()
        return self._store.stager.ask(self.digest, digests, self.block_bytes, found, last)

    def wait_durable(self, digests: Sequence[BlockDigest], tier: str) -> Ticket[Durability]:
        """A ticket that is answered once none of these blocks is on its way to that lower tier: whether all are there,
        and why not. Never blocks; nobody is hurried: `flush` writes what was put off. Raises ConfigError for a tier
        that is not there. A block that was evicted from a remote tier since it was written is not noticed."""
        self._store.check_usable()
        keys = [make_key(self.digest, digest) for digest in digests]
        lower = self._store.tier(tier)
        return lower.write_behind.watch(keys, lower.held)

    def stage(
        self,
        name: str,
        digests: Sequence[BlockDigest],
        parent: BlockDigest | None,
        max_wait_s: float,
        found: Located | None = None,
        tenant: str = "",
    ) -> Stage | None:
        """Begin to bring a prompt's blocks from lower tiers to host memory; None if those have none. Never blocks. See
        `Stager.begin`. name: the request's, for messages. parent: the block before `digests`."""
        self._store.check_usable()
        stager = self._store.stager
        return stager.begin(name, self.digest, digests, parent, self.block_bytes, max_wait_s, found, tenant)

    def note_use(self, digests: Sequence[BlockDigest], parent: BlockDigest | None) -> None:
        """A prompt was admitted that begins with these blocks: tell the lower tiers, which did not serve them all."""
        self._store.check_usable()
        for lower in self._store.lower:
            lower.note_use(self.digest, digests, parent)

    def holds(self, digest: BlockDigest) -> bool:
        """True when the block is in the host tier or being copied there, or in a tier whose memory that is: there is
        nothing left to store."""
        self._host.check_process()
        return self._host.state(self.digest, digest) is not None or any(
            lower.tier.adopts and lower.is_available and lower.holds(self.digest, digest) for lower in self._store.lower
        )

    @property
    def gets_room(self) -> bool:
        """Whether the host pool, when it has no slot, has some in a moment: it is a tier's memory, and that tier is
        there."""
        return any(lower.tier.adopts and lower.is_available for lower in self._store.lower)

    def reaches(self, digest: BlockDigest) -> bool:
        """True when some tier has the block, or is about to: those that continue it can be restored."""
        return self.holds(digest) or any(
            lower.is_available and lower.holds(self.digest, digest) for lower in self._store.lower
        )

    def lease(self, digests: Sequence[BlockDigest], owner: Owner) -> list[Lease]:
        """Leases on the leading blocks held, which count as used now."""
        self._store.check_usable()
        return self._host.lease_run(self.digest, digests, owner)

    def reserve(
        self,
        digest: BlockDigest,
        parent: BlockDigest | None,
        owner: Owner,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> Reservation | DropReason:
        """A slot to copy one block into; store the parent first. See `HostTier.reserve`."""
        self._store.check_usable()
        return self._host.reserve(self.digest, digest, parent, self.block_bytes, owner, tenant=tenant, ttl_s=ttl_s)

    def commit(self, reservations: Sequence[Reservation]) -> list[bool]:
        """Make filled blocks findable; False where a reset or the owner's end came first."""
        self._store.check_usable()
        outcomes = self._host.commit(reservations)
        counters = self._store.counters
        with counters.lock:
            counters.stored_blocks += sum(outcomes)
            counters.stored_bytes += sum(outcomes) * self.block_bytes
        return outcomes

    def abort(self, reservation: Reservation) -> None:
        """Give a reserved slot back. Idempotent."""
        self._host.abort(reservation)

    def count_lookup(
        self, asked: int, hit: int, miss: MissReason | None, staged: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Count one admission, once: `asked` blocks of which `hit` are served and the rest missed for one reason.

        staged: how many of them came from lower tiers for this request, by tier; the rest are host memory's. Returns
        the served ones by tier.
        """
        tiers = {**(staged or {}), self._host.name: hit}
        return self._store.counters.add_lookup(asked, hit, miss or MissReason.ABSENT, tiers)

    def note_decision(self, decision: Decision) -> None:
        """For people who ask later why a request was not served: here, and at tiers that keep a history."""
        self._store.decisions.note(decision)
        for lower in self._store.lower:
            lower.note_decision(decision)

    def count_fallback(self, reason: MissReason) -> None:
        """Count a request that waited for a lower tier in vain."""
        counters = self._store.counters
        with counters.lock:
            counters.fallbacks[reason] += 1

    def count_error(self, error: BaseException) -> None:
        counters = self._store.counters
        with counters.lock:
            counters.errors[type(error).__name__] += 1

    def on_evict(self, callback: Callable[[Sequence[Eviction]], None]) -> Callable[[], None]:
        """Call back with this space's evicted blocks; on the evicting thread, so be quick and do not raise.

        Returns a call that ends it.
        """

        def mine(evicted: Sequence[Eviction]) -> None:
            own = [item for item in evicted if item.namespace == self.digest]
            if own:
                callback(own)

        return self._host.subscribe(on_evict=mine)
