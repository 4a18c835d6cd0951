"""Which slots give way in host memory: a policy for each size class, and for each tenant with a quota in it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, IntegrityError
from kvtier.leases import Lease
from kvtier.policy import BUILT_IN, NO_PARENT, EvictionPolicy, GuardedPolicy, PolicyFactory, TailsFirstLRU
from kvtier.reasons import DropReason
from kvtier.slots import SlotPool

__all__ = ["ANY_TENANT", "EvictionOrder"]

ANY_TENANT = "*"
"""Among quotas: each tenant that has none of its own name."""

Policies = dict[int, EvictionPolicy]  # by size class: only equal slots can replace each other

logger = logging.getLogger("kvtier.tiers.eviction")


@dataclass(slots=True, eq=False)
class _Tenant:
    """Whose blocks some slots hold. Tenants without a quota have one `policies` in common."""

    name: str
    quota: int | None
    policies: Policies
    num_slots: int = 0
    used_bytes: int = 0

    @property
    def used_part(self) -> float:
        return self.used_bytes / self.quota if self.quota else 0.0


class EvictionOrder:
    """Owns the policies and whose each slot is; which slot may go at all is the pool's to say.

    A tenant with a quota never has more bytes in slots than that, whole slots counted, from the reservation of a block
    until it is forgotten. At its quota it gives up its own coldest tail. Where the pool itself is full:

    * who has no quota takes from those who have none: they share what is left;
    * who has one, and is below it, takes from those who have none; then from whoever has used more of its quota than
      itself, the most first; then from its own.

    A block that continues one of another tenant keeps that one from eviction, as a child in its own order would.

    Without quotas nothing is counted, and all blocks are in one order for each size class.

    Policies that are not built in are guarded: the first fault in a size class is logged, and LRU goes on there.

    Mutable state is all below `quotas`; the host tier's lock guards it.
    """

    def __init__(self, pool: SlotPool, make_policy: PolicyFactory, quotas: Mapping[str, int]) -> None:
        for name, quota in quotas.items():
            if quota < 1:
                raise ConfigError(f"the quota of tenant {name!r} must be at least 1 byte, not {quota}")
        self._pool = pool
        self._make_policy = make_policy
        self._is_trusted = make_policy in BUILT_IN.values()
        self._quotas = dict(quotas)
        self.has_quotas = bool(quotas)
        """Whether slots must be claimed and disclaimed. An attribute: it is read for every block."""
        self._shared: Policies = {}
        self._tenants: list[_Tenant] = []  # by id
        self._ids: dict[str, int] = {}
        self._free_ids: list[int] = []
        self._owner = array("q")  # tenant's id by slot
        self._ties: dict[int, int] = {}  # slot to its parent's, of blocks whose parent is another tenant's
        self._num_tied: dict[int, int] = {}  # how many such blocks continue a slot
        self._faulty: set[int] = set()  # size classes

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of the slots of each tenant's blocks, of every tenant that has any. Not counted without quotas."""
        return {name: self._tenants[number].used_bytes for name, number in self._ids.items()}

    # ---- whose a slot is -----------------------------------------------------------------------------------------

    def claim(self, slot: int, slot_bytes: int, tenant: str) -> None:
        """A block of this tenant is about to be in `slot`, of so many bytes. Under quotas only."""
        number = self._ids.get(tenant)
        if number is None:
            number = self._admit(tenant)
        if slot >= len(self._owner):
            self._owner.extend([0] * (slot + 1 - len(self._owner)))
        self._owner[slot] = number
        owner = self._tenants[number]
        owner.num_slots += 1
        owner.used_bytes += slot_bytes

    def disclaim(self, slot: int) -> None:
        """No block is in `slot` any more; it was claimed, under quotas."""
        number = self._owner[slot]
        owner = self._tenants[number]
        owner.num_slots -= 1
        owner.used_bytes -= self._pool.class_of(slot)
        if not owner.num_slots:  # names are whatever callers say: only those with blocks cost anything
            del self._ids[owner.name]
            self._free_ids.append(number)

    def is_over(self, nbytes: int, tenant: str) -> bool:
        """Whether one more block of `nbytes` would be more than this tenant's quota."""
        if not self._quotas:
            return False
        quota = self._quota_of(tenant)
        return quota is not None and self._used(tenant) + self._pool.slot_bytes(nbytes) > quota

    # ---- the order -----------------------------------------------------------------------------------------------

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:
        """A claimed slot's block may be read, and evicted. parent: the slot of the block that it continues, of whatever
        size or tenant, or NO_PARENT."""
        policies, slot_bytes = self._shared, self._pool.class_of(slot)
        if parent != NO_PARENT and self._pool.class_of(parent) != slot_bytes:
            parent = NO_PARENT
        if self._quotas:
            policies = self._policies_of(slot)
            if parent != NO_PARENT and self._policies_of(parent) is not policies:
                self._tie(slot, parent)
                parent = NO_PARENT
        policy = policies.get(slot_bytes)
        if policy is None:
            policy = policies[slot_bytes] = self._new_policy(slot_bytes)
        policy.insert(slot, parent, fingerprint)

    def touch(self, leases: Sequence[Lease]) -> None:
        """A prompt used the blocks of these slots, first block first."""
        for slot_bytes in {lease.nbytes for lease in leases}:  # one, unless blocks of one namespace differ in length
            slots = [lease.slot for lease in leases if lease.nbytes == slot_bytes]
            if not self._quotas:
                self._shared[slot_bytes].touch(slots)
                continue
            while slots:  # once, unless tenants share a prefix
                policies = self._policies_of(slots[0])
                policies[slot_bytes].touch([slot for slot in slots if self._policies_of(slot) is policies])
                slots = [slot for slot in slots if self._policies_of(slot) is not policies]

    def remove(self, slot: int) -> None:
        """An inserted slot's block is gone; `disclaim` follows."""
        slot_bytes = self._pool.class_of(slot)
        if not self._quotas:
            self._shared[slot_bytes].remove(slot)
            return
        self._policies_of(slot)[slot_bytes].remove(slot)
        self._untie(slot)

    def victims(self, nbytes: int, tenant: str) -> list[int] | DropReason:
        """What goes next to make room for a block of this tenant: one block, of the same size class where the pool is
        full, or all of another class's least used slab. Or why nothing can go. Changes no order."""
        if released := self._pool.take_released():
            for policy in self._all_policies():
                policy.released(tuple(released))
        slot_bytes = self._pool.slot_bytes(nbytes)
        if not self._quotas:
            shared = self._shared.get(slot_bytes)
            slot = shared.victim(self._pool.can_evict) if shared is not None else None
            return [slot] if slot is not None else self._pool.slab_to_reclaim(nbytes) or DropReason.HOST_FULL
        if self.is_over(nbytes, tenant):
            return self._own_victim(slot_bytes, tenant)
        for policies in self._givers(tenant):
            if (slot := self._victim(policies, slot_bytes)) is not None:
                return [slot]
        slab = self._pool.slab_to_reclaim(nbytes)
        if self._quota_of(tenant) is None:
            slab = slab if all(self._policies_of(slot) is self._shared for slot in slab) else []
        return slab or DropReason.HOST_FULL

    def check_integrity(self, named: Iterable[int], committed: set[int]) -> None:
        """Raises IntegrityError unless the policies order exactly the `committed` slots, and each tenant's bytes are
        those of its `named` ones, within its quota. O(blocks)."""
        used = dict.fromkeys(self._ids, 0)
        for slot in named if self._quotas else ():
            used[self._tenants[self._owner[slot]].name] += self._pool.class_of(slot)
        if used != self.tenant_bytes:
            raise IntegrityError(f"host tier: tenants have {used} bytes, counted are {self.tenant_bytes}")
        for name, number in used.items():
            quota = self._quota_of(name)
            if quota is not None and number > quota:
                raise IntegrityError(f"host tier: tenant {name!r} has {number} bytes of a quota of {quota}")
        for policies in self._all_groups():
            for slot_bytes, policy in policies.items():
                own = {slot for slot in committed if not self._quotas or self._policies_of(slot) is policies}
                policy.check_integrity({slot for slot in own if self._pool.class_of(slot) == slot_bytes})
        tied = [parent for child, parent in self._ties.items() if child in committed and parent in committed]
        if len(tied) != len(self._ties) or {slot: tied.count(slot) for slot in tied} != self._num_tied:
            raise IntegrityError("host tier: blocks that continue another tenant's are miscounted")

    # ---- inside --------------------------------------------------------------------------------------------------

    def _admit(self, name: str) -> int:
        quota = self._quota_of(name)
        tenant = _Tenant(name, quota, self._shared if quota is None else {})
        if self._free_ids:
            number = self._free_ids.pop()
            self._tenants[number] = tenant
        else:
            number = len(self._tenants)
            self._tenants.append(tenant)
        self._ids[name] = number
        return number

    def _quota_of(self, tenant: str) -> int | None:
        return self._quotas.get(tenant, self._quotas.get(ANY_TENANT))

    def _used(self, tenant: str) -> int:
        number = self._ids.get(tenant)
        return 0 if number is None else self._tenants[number].used_bytes

    def _policies_of(self, slot: int) -> Policies:
        return self._tenants[self._owner[slot]].policies

    def _all_groups(self) -> Iterator[Policies]:
        yield self._shared
        for number in self._ids.values():
            if self._tenants[number].quota is not None:
                yield self._tenants[number].policies

    def _all_policies(self) -> Iterator[EvictionPolicy]:
        for policies in self._all_groups():
            yield from policies.values()

    def _own_victim(self, slot_bytes: int, tenant: str) -> list[int] | DropReason:
        number, quota = self._ids.get(tenant), self._quota_of(tenant)
        if number is None or quota is None or quota < slot_bytes:
            return DropReason.QUOTA
        own = self._tenants[number].policies
        for each in sorted(own, key=lambda size: (size != slot_bytes, -size)):
            if (slot := self._victim(own, each)) is not None:
                return [slot]
        return DropReason.QUOTA

    def _givers(self, tenant: str) -> Iterator[Policies]:
        """Who gives way where the pool is full, the first first."""
        yield self._shared
        quota = self._quota_of(tenant)
        if quota is None:
            return
        number, part = self._ids.get(tenant), self._used(tenant) / quota
        others = [self._tenants[other] for other in self._ids.values() if other != number]
        for other in sorted(others, key=lambda each: -each.used_part):
            if other.quota is not None and other.used_part > part:
                yield other.policies
        if number is not None:
            yield self._tenants[number].policies

    def _victim(self, policies: Policies, slot_bytes: int) -> int | None:
        policy = policies.get(slot_bytes)
        return policy.victim(self._can_evict) if policy is not None else None

    def _can_evict(self, slot: int) -> bool:
        return slot not in self._num_tied and self._pool.can_evict(slot)

    def _tie(self, slot: int, parent: int) -> None:
        self._ties[slot] = parent
        self._num_tied[parent] = self._num_tied.get(parent, 0) + 1

    def _untie(self, slot: int) -> None:
        """The block in `slot` continues none of another tenant's any more, and none of theirs continues it."""
        if slot in self._ties:
            parent = self._ties.pop(slot)
            self._num_tied[parent] -= 1
            if not self._num_tied[parent]:
                del self._num_tied[parent]
                self._policies_of(parent)[self._pool.class_of(parent)].released((parent,))
        if self._num_tied.pop(slot, 0):
            self._ties = {child: parent for child, parent in self._ties.items() if parent != slot}

    def _new_policy(self, slot_bytes: int) -> EvictionPolicy:
        if self._is_trusted:
            return self._make_policy()
        if slot_bytes in self._faulty:
            return TailsFirstLRU()

        def note(fault: Exception) -> None:
            if slot_bytes not in self._faulty:
                self._faulty.add(slot_bytes)
                logger.error(
                    "host.policy: the eviction policy failed (%r); blocks of %d bytes go on in the order of 'lru'",
                    fault,
                    slot_bytes,
                    exc_info=fault,
                )

        return GuardedPolicy(self._make_policy, note)
