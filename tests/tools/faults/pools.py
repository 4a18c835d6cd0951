"""Slots of host memory: leases, and slots that a server granted."""

from __future__ import annotations

from tests.tools.mutation import Mutant

SLOTS = "kvtier/slots.py"
GRANTED = "kvtier/granted.py"
GRANTS = "kvtier/grants.py"
ROOM = "connectors/kvtier_connectors/room.py"
STORING = "connectors/kvtier_connectors/storing.py"

POOL_TESTS = ("tests/core/test_pool.py",)
GRANTED_TESTS = ("tests/core/test_granted.py",)
STORING_TESTS = ("tests/connectors/test_storing.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="each slot that comes is compared with all that there are",
        rules=(),
        file=GRANTED,
        old="if handle in self._slot_of or handle in self._returned:",
        new="if not all(map({handle}.isdisjoint, (self._slot_of, self._returned))):",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="a slot that cannot be adopted is adopted",
        rules=(),
        file=GRANTED,
        old="or self._flaw(slot_bytes, handle, offset, limit) is not None:",
        new="or False:",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="pool: a slot that is leased still is given up with its name",
        rules=(),
        file=SLOTS,
        old="            if not self._leases[slot]:\n                self._give_up(slot)",
        new="            self._give_up(slot)",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="pool: a slot is named that nobody leases",
        rules=(),
        file=SLOTS,
        old='            assert self._leases[slot], f"slot {slot} is not leased"\n',
        new="",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="granted: a shared slot is filled with another block",
        rules=(),
        file=GRANTED,
        old="if kind in (PRIVATE, SPARE):",
        new="if kind != LOST:",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: a spare copy stays spare when its slot is used again",
        rules=(),
        file=GRANTED,
        old="            self._kinds[slot] = PRIVATE\n            self._free",
        new="            self._free",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: a lost slot is returned to the next connection",
        rules=(),
        file=GRANTED,
        old="        if kind == SHARED:\n            self._returned",
        new="        if kind != PRIVATE:\n            self._returned",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: what a lost connection left to return is returned to the next",
        rules=(),
        file=GRANTED,
        old="            self._slot_of.clear()\n            self._returned.clear()\n",
        new="            self._slot_of.clear()\n",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: grants of a lost connection are taken",
        rules=(),
        file=GRANTED,
        old="if self._lost_era is not None and era <= self._lost_era:",
        new="if self._lost_era is not None and era < self._lost_era:",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: a slot may lie where a lost one is in use",
        rules=(),
        file=GRANTED,
        old="        if not self._pages.are_free(offset, slot_bytes):",
        new="        if self._lost_era is None and not self._pages.are_free(offset, slot_bytes):",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: pages stay taken after their slot is gone",
        rules=(),
        file=GRANTS,
        old="self._taken[start:stop] = bytes(stop - start)",
        new="self._taken[start : stop - 1] = bytes(stop - start - 1)",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: adopted blocks are more than the pool may have",
        rules=(),
        file=GRANTED,
        old="has_room = self._granted_bytes + slot_bytes <= self._max_bytes",
        new="has_room = True",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: an idle slot is told though it is leased again",
        rules=(),
        file=GRANTED,
        old="return [slot for slot in idle if self._is_idle(slot)]",
        new="return list(idle)",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: nobody learns that a published block is idle",
        rules=(),
        file=GRANTED,
        old="        super()._end(lease)\n        self._note_idle(lease.slot)\n",
        new="        super()._end(lease)\n",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: the keeper is woken for every block",
        rules=(),
        file=GRANTED,
        old="                self._is_told = self._has_work\n",
        new="",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: an allocation that finds no slot wakes nobody",
        rules=(),
        file=GRANTED,
        old="        self._has_work = True\n        return False\n",
        new="        return False\n",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="granted: the keeper is not woken where the end of a lease fails",
        rules=(),
        file=GRANTED,
        old="        try:\n            super()._close_owner(owner)\n        finally:\n            self._tell_work()\n",
        new="        super()._close_owner(owner)\n        self._tell_work()\n",
        tests=GRANTED_TESTS,
    ),
    Mutant(
        name="room: a block is dropped though a slot is about to come",
        rules=(),
        file=STORING,
        old="if reservation is DropReason.HOST_FULL and self.room.note_full():",
        new="if reservation is DropReason.HOST_FULL and not self.room.note_full():",
        tests=STORING_TESTS,
    ),
    Mutant(
        name="room: a block waits for a slot for ever",
        rules=(),
        file=ROOM,
        old=" and self._clock.now() - since < MAX_WAIT_S",
        new="",
        tests=STORING_TESTS,
    ),
    Mutant(
        name="room: the wait goes on where the last one ended",
        rules=(),
        file=STORING,
        old="            self.room.note_room()\n",
        new="",
        tests=STORING_TESTS,
    ),
    Mutant(
        name="room: an engine without requests is not told to look again",
        rules=(),
        file=ROOM,
        old="        return soon if end is None else min(soon, end)",
        new="        return end",
        tests=STORING_TESTS,
    ),
]
