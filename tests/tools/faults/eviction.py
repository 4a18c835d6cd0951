"""Which block of host memory gives way: orders, another's order, quotas."""

from __future__ import annotations

from tests.tools.mutation import Mutant

LEAVES = "kvtier/policy/leaves.py"
LRU = "kvtier/policy/lru.py"
S3FIFO = "kvtier/policy/s3fifo.py"
GHOST = "kvtier/policy/ghost.py"
GUARDED = "kvtier/policy/guarded.py"
ORDER = "kvtier/tiers/eviction.py"

POLICY_TESTS = ("tests/core/test_policy.py",)
EVICTION_TESTS = ("tests/core/test_eviction.py",)
QUOTA_TESTS = ("tests/core/test_quotas.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="eviction: a prefix goes before its tail",
        rules=(),
        file=LEAVES,
        old="== entry >> PLACE_SHIFT and not self._children[slot] and slot",
        new="== entry >> PLACE_SHIFT and slot",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="eviction: a slot's next block is taken for the last one's child",
        rules=(),
        file=LEAVES,
        old=" and self._life[parent] == self._parent_life[slot]:",
        new=":",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="eviction: a prefix whose tails went is never evicted",
        rules=(),
        file=LRU,
        old="        if parent != NO_PARENT:\n            self._push(self._heap, parent)\n",
        new="",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="s3fifo: who moves to the main queue leaves its prefix behind",
        rules=(),
        file=S3FIFO,
        old="            slot = self._parent_of(slot)\n",
        new="            slot = NO_PARENT\n",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="s3fifo: a prefix counts down only at its own turns",
        rules=(),
        file=S3FIFO,
        old="        if not self._uses_left(slot):\n            return False\n",
        new="        if not self._uses[slot]:\n            return False\n        self._uses[slot] -= 1\n",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="s3fifo: nothing that went is remembered",
        rules=(),
        file=S3FIFO,
        old="            if slot == self._chosen:",
        new="            if slot < 0:",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="s3fifo: what was never seen is taken for a ghost",
        rules=(),
        file=GHOST,
        old="serial >= max(0, self._first + len(self._queue) - most)",
        new="serial >= self._first + len(self._queue) - most",
        tests=POLICY_TESTS,
    ),
    Mutant(
        name="another's policy: a leased slot is believed",
        rules=(),
        file=GUARDED,
        old="        if not can_evict(slot):\n",
        new="        if slot < 0:\n",
        tests=EVICTION_TESTS,
    ),
    Mutant(
        name="another's policy: a prefix is believed",
        rules=(),
        file=GUARDED,
        old="        if not self._spare.is_leaf(slot):\n",
        new="        if slot < 0:\n",
        tests=EVICTION_TESTS,
    ),
    Mutant(
        name="another's policy: it is believed that nothing may go",
        rules=(),
        file=GUARDED,
        old="            if other is not None:\n",
        new="            if other == -1:\n",
        tests=EVICTION_TESTS,
    ),
    Mutant(
        name="another's policy: uses before its fault are forgotten",
        rules=(),
        file=GUARDED,
        old="        self._spare.touch(slots)\n",
        new="",
        tests=EVICTION_TESTS,
    ),
    Mutant(
        name="another's policy: it is called after its fault",
        rules=(),
        file=GUARDED,
        old="        self._theirs = None\n        self._note_fault(fault)\n",
        new="        self._note_fault(fault)\n",
        tests=EVICTION_TESTS,
    ),
    Mutant(
        name="quotas: one block more than the quota is stored",
        rules=(),
        file=ORDER,
        old="self._used(tenant) + self._pool.slot_bytes(nbytes) > quota",
        new="self._used(tenant) > quota",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: who has none takes from those who have one",
        rules=(),
        file=ORDER,
        old="        if quota is None:\n            return\n        number, part",
        new="        quota = quota or 1\n        number, part",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: a slab of those who have one is given to others",
        rules=(),
        file=ORDER,
        old="slab if all(self._policies_of(slot) is self._shared for slot in slab) else []",
        new="slab",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: another tenant's tail loses its prefix",
        rules=(),
        file=ORDER,
        old="return slot not in self._num_tied and self._pool.can_evict(slot)",
        new="return self._pool.can_evict(slot)",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: a prefix is kept though the other tenant's tail went",
        rules=(),
        file=ORDER,
        old="                self._policies_of(parent)[self._pool.class_of(parent)].released((parent,))\n",
        new="",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: everything goes for a block that is larger than the quota",
        rules=(),
        file=ORDER,
        old="if number is None or quota is None or quota < slot_bytes:",
        new="if number is None or quota is None:",
        tests=QUOTA_TESTS,
    ),
    Mutant(
        name="quotas: tenants that have no blocks are kept",
        rules=(),
        file=ORDER,
        old="            self._free_ids.append(number)\n",
        new="",
        tests=QUOTA_TESTS,
    ),
]
