"""Operators' commands to a live daemon."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ADMIN = "kvtier/server/admin.py"
OPERATIONS = "kvtier/server/operations.py"
VERIFYING = "kvtier/server/verifying.py"
TESTS = "tests/server/test_admin.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="whoever reaches the admin socket may command",
        rules=(),
        file=ADMIN,
        old="if peer.uid not in (0, os.geteuid()):",
        new="if peer.uid is None:",
        tests=(f"{TESTS}::test_another_user_is_refused_by_the_kernels_word",),
    ),
    Mutant(
        name="any number of commands may be connected",
        rules=(),
        file=ADMIN,
        old="is_full = len(self._connections) >= MAX_CONNECTIONS",
        new="is_full = False",
        tests=(f"{TESTS}::test_there_are_a_few_operators_at_once",),
    ),
    Mutant(
        name="what nobody waits for any more goes on",
        rules=(),
        file=ADMIN,
        old="if self._closing.is_set() or any(event & _GONE for _, event in watch.poll(0)):",
        new="if self._closing.is_set():",
        tests=(f"{TESTS}::test_closing_the_connection_ends_what_was_asked",),
    ),
    Mutant(
        name="a drop forgets every tenant's blocks",
        rules=(),
        file=OPERATIONS,
        old='found = [tenant for tenant in tenants if name in ("", tenant.name)]',
        new="found = list(tenants)",
        tests=(f"{TESTS}::test_dropping_forgets_a_tenants_blocks_in_every_tier_and_no_others",),
    ),
    Mutant(
        name="a flush that did not end says that it did",
        rules=(),
        file=OPERATIONS,
        old="yield Flushed(request.id, tenant.name, lower.name, left, written)",
        new="yield Flushed(request.id, tenant.name, lower.name, 0, written)",
        tests=(f"{TESTS}::test_a_flush_is_bounded_and_says_what_is_not_written",),
    ),
    Mutant(
        name="more blocks are listed than were asked for",
        rules=(),
        file=OPERATIONS,
        old="part = rows[:left]",
        new="part = rows",
        tests=(f"{TESTS}::test_blocks_come_in_pages_within_the_limit",),
    ),
    Mutant(
        name="a damaged block of host memory is told and kept",
        rules=(),
        file=VERIFYING,
        old="store.host.remove(wrong)  # while",
        new="store.host.contains(wrong)  # while",
        tests=(f"{TESTS}::test_a_block_that_was_scribbled_over_is_found_named_and_forgotten",),
    ),
    Mutant(
        name="verifying a disk counts as a use of all that it holds",
        rules=(),
        file="kvtier/tiers/disk/tier.py",
        old="return self._read(requests, is_use=False)",
        new="return self._read(requests, is_use=True)",
        tests=(f"{TESTS}::test_verifying_a_disk_is_no_use_of_its_blocks",),
    ),
]
