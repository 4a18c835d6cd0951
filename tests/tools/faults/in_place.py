"""A host pool that is a kvtier-server's memory: slots granted, published, adopted and given back."""

from __future__ import annotations

from tests.tools.mutation import Mutant

KEEPER = "kvtier/tiers/server/keeper.py"
IN_PLACE = "kvtier/tiers/server/inplace.py"
ADDRESSES = "kvtier/tiers/server/addresses.py"
MAPPING = "kvtier/tiers/server/mapping.py"
FILLING = "kvtier/filling.py"

TOLD = "tests/server_tier/test_keeper.py"
STORES = "tests/server_tier/test_in_place.py"
MAPS = "tests/server_tier/test_server_mapping.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="in place: goodbye is said while a slot is used",
        rules=(),
        file=KEEPER,
        old="            lost = self.pool.lost_eras() if self._left else set()\n",
        new="            lost = set[int]()\n",
        tests=(f"{TOLD}::test_no_goodbye_is_said_*",),
    ),
    Mutant(
        name="in place: goodbye is said at the end while a slot is used",
        rules=(),
        file=KEEPER,
        old="farewell=not is_used)",
        new="farewell=True)",
        tests=(f"{TOLD}::test_closing_says_goodbye_*", f"{STORES}::test_a_store_that_is_closed_with_leases_out_*"),
    ),
    Mutant(
        name="in place: memory is taken away with leases out",
        rules=(),
        file=MAPPING,
        old="        self._addresses = None\n\n    def unmap",
        new="        pass\n\n    def unmap",
        tests=(f"{MAPS}::test_a_view_keeps_memory_that_was_left_*",),
    ),
    Mutant(
        name="in place: a request does not wait for the server's memory",
        rules=(),
        file=KEEPER,
        old="            self._await_try(deadline)\n",
        new="",
        tests=(f"{STORES}::test_the_first_request_of_a_store_*", f"{TOLD}::test_a_server_that_is_down_*"),
    ),
    Mutant(
        name="in place: a slot outside the memory is taken",
        rules=(),
        file=KEEPER,
        old="not 0 <= offset <= nbytes - slot_bytes",
        new="not 0 <= offset",
        tests=(f"{TOLD}::test_a_slot_is_whole_*",),
    ),
    Mutant(
        name="in place: more slots are taken than were asked for",
        rules=(),
        file=KEEPER,
        old="            if len(answer.offsets) > asked:\n",
        new="            if False:\n",
        tests=(f"{TOLD}::test_no_slot_comes_of_a_lie",),
    ),
    Mutant(
        name="in place: what is too much is kept",
        rules=(),
        file=KEEPER,
        old="if there.num_free > stock:",
        new="if False:",
        tests=(f"{TOLD}::test_a_stock_is_asked_for_*",),
    ),
    Mutant(
        name="in place: a server without room is asked all the time",
        rules=(),
        file=KEEPER,
        old="                self._rest(slot_bytes, FULL_PAUSE_S)\n",
        new="",
        tests=(f"{TOLD}::test_a_server_that_has_no_more_slots_*",),
    ),
    Mutant(
        name="in place: what is the server's is kept here",
        rules=(),
        file=KEEPER,
        old="            self._host.forget_slots(idle, self.pool.is_idle)\n",
        new="            pass\n",
        tests=(f"{TOLD}::test_what_the_host_tier_names_*",),
    ),
    Mutant(
        name="in place: what is let go of is not given back",
        rules=(),
        file=KEEPER,
        old="            self._give_back(connection, era)\n",
        new="            self.pool.take_returned(era)\n",
        tests=(f"{TOLD}::test_what_is_published_is_released_*",),
    ),
    Mutant(
        name="in place: a slot is filled anew while the server has it as a block",
        rules=(),
        file=IN_PLACE,
        old="if each == PublishOutcome.STORED], SlotKind.SHARED)",
        new="if each == PublishOutcome.STORED], SlotKind.SPARE)",
        tests=(f"{STORES}::test_what_is_published_or_adopted_*",),
    ),
    Mutant(
        name="in place: a slot of a lost connection is published on the next",
        rules=(),
        file=IN_PLACE,
        old="if handle is None or handle.era != era:",
        new="if handle is None:",
        tests=(f"{TOLD}::test_no_goodbye_is_said_*", f"{TOLD}::test_a_block_of_a_connection_before_*"),
    ),
    Mutant(
        name="in place: a block is published twice",
        rules=(),
        file=IN_PLACE,
        old="elif not self._pool.is_private(each.slot):",
        new="elif False:",
        tests=(f"{STORES}::test_a_block_is_published_once_*",),
    ),
    Mutant(
        name="in place: what was adopted is not verified",
        rules=(),
        file=IN_PLACE,
        old="            is_well = adoption.checksum is None or (",
        new="            is_well = True or (",
        tests=(f"{STORES}::test_what_a_client_scribbled_over_*",),
    ),
    Mutant(
        name="in place: what kept a block in the server's memory is not given back",
        rules=(),
        file=IN_PLACE,
        old="                connection.say(Release(0, answer.leases))\n",
        new="",
        tests=(f"{TOLD}::test_a_block_that_only_a_lower_tier_has_*",),
    ),
    Mutant(
        name="in place: a lease for a block that finds no slot here is kept",
        rules=(),
        file=IN_PLACE,
        old="                connection.say(Release(0, refused))\n",
        new="                pass\n",
        tests=(f"{TOLD}::test_blocks_that_overlap_are_adopted_once",),
    ),
    Mutant(
        name="in place: a block of before a reset comes back",
        rules=(),
        file=FILLING,
        old="self.fence.reserve([read for read, _ in adopted], leases, number)",
        new="self.fence.reserve([read for read, _ in adopted], leases)",
        tests=(f"{STORES}::test_a_block_that_is_adopted_while_a_reset_*",),
    ),
    Mutant(
        name="in place: jobs stay large once something lies below",
        rules=(),
        file=IN_PLACE,
        old="MAX_READ_SCALE) if is_all_there else 1",
        new="MAX_READ_SCALE)",
        tests=(f"{TOLD}::test_reads_are_larger_*",),
    ),
    Mutant(
        name="in place: a job takes a small pool for itself",
        rules=(),
        file=IN_PLACE,
        old=", self._pool.nbytes // READ_SHARE))",
        new="))",
        tests=(f"{TOLD}::test_reads_are_larger_*",),
    ),
    Mutant(
        name="in place: two runs of the server at the same addresses",
        rules=(),
        file=MAPPING,
        old="if self._addresses is not None and self._mappings:",
        new="if False:",
        tests=(f"{MAPS}::test_memory_of_one_run_after_the_other_*",),
    ),
    Mutant(
        name="in place: a child has the server's memory",
        rules=(),
        file=ADDRESSES,
        old="(mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP)",
        new="(mmap.MADV_DONTDUMP,)",
        tests=(f"{MAPS}::test_a_child_has_none_of_it",),
    ),
    Mutant(
        name="in place: pages are made that the server has not made",
        rules=(),
        file=MAPPING,
        old="return not failed and bool((pages & 1).all())",
        new="return not failed",
        tests=(f"{MAPS}::test_pages_come_as_far_as_*",),
    ),
]
