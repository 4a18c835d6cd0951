"""kvtier-server and the tier over it: whose a slot is, who may have it, and when what is in it counts."""

from __future__ import annotations

from tests.tools.mutation import Mutant

SLOTS = "kvtier/server/slots.py"
QUARANTINE = "kvtier/server/quarantine.py"
MAPPING = "kvtier/tiers/server/mapping.py"
SESSIONS = "tests/server/test_session.py"
LEFT = "tests/server/test_quarantine.py"
CALLS = "tests/server_tier/test_server_calls.py"
HOSTILE = "tests/server_tier/test_server_hostile.py"
MAPPINGS = "tests/server_tier/test_server_mapping.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="slots of a client that hung up are free though its process lives",
        rules=(),
        file=QUARANTINE,
        old="if entry.died_at is None and entry.process.is_dead():",
        new="if entry.died_at is None:",
        tests=(f"{LEFT}::test_after_its_clients_death_*",),
    ),
    Mutant(
        name="a dead client's slots are free while its devices may still write",
        rules=(),
        file=QUARANTINE,
        old="now - entry.died_at >= self._grace_s",
        new="now - entry.died_at >= 0",
        tests=(f"{LEFT}::test_after_its_clients_death_*",),
    ),
    Mutant(
        name="a slot whose time is over goes to another while its client may still write",
        rules=(),
        file=SLOTS,
        old="            if not self._is_mapped:\n",
        new="            if True:\n",
        tests=(f"{LEFT}::test_a_client_that_stops_within_a_fill_*",),
    ),
    Mutant(
        name="slots are taken back while a payload is being written to them",
        rules=(),
        file=SLOTS,
        old="while self._filling and not self.receiving:",
        new="while self._filling:",
        tests=(f"{LEFT}::test_a_payload_on_its_way_*",),
    ),
    Mutant(
        name="one client may hold all of the pool",
        rules=(),
        file="kvtier/server/tenants.py",
        old="HOLDING_SHARE = 2\n",
        new="HOLDING_SHARE = 1\n",
        tests=(f"{LEFT}::test_nobody_holds_more_than_half_*",),
    ),
    Mutant(
        name="who cannot be watched gets the memory",
        rules=(),
        file="kvtier/server/peers.py",
        old='return self.kind == "unix" and self.process is not None',
        new='return self.kind == "unix"',
        tests=(f"{SESSIONS}::test_who_wants_no_mapping_*",),
    ),
    Mutant(
        name="on a Unix socket a token says whose blocks these are",
        rules=(),
        file="kvtier/server/tenants.py",
        old='if peer.kind == "unix":',
        new='if peer.kind == "unix" and not token:',
        tests=(f"{SESSIONS}::test_who_shows_no_credential_*",),
    ),
    Mutant(
        name="a client may ask for more than its credits",
        rules=(),
        file="kvtier/server/session.py",
        old="if self.num_requests >= self._settings.credits:",
        new="if False:",
        tests=(f"{SESSIONS}::test_more_requests_than_credits_*",),
    ),
    Mutant(
        name="a message is taken amid a payload",
        rules=(),
        file="kvtier/server/session.py",
        old="if self._dialogue is not None and self._dialogue.payload is not None:",
        new="if False:",
        tests=(f"{SESSIONS}::test_a_message_within_a_payload_*",),
    ),
    Mutant(
        name="a block that is being stored is said to be there",
        rules=(),
        file=SLOTS,
        old="return ReserveOutcome.ALREADY_STORED if is_filled else ReserveOutcome.BEING_STORED",
        new="return ReserveOutcome.ALREADY_STORED",
        tests=(f"{SESSIONS}::test_two_clients_store_one_key_*",),
    ),
    Mutant(
        name="a commit is answered and its block is not findable",
        rules=(),
        file=SLOTS,
        old="stored = self._host.commit(",
        new="stored = [True] * len(live) or self._host.commit(",
        tests=(f"{SESSIONS}::test_a_block_is_findable_from_its_commit_*",),
    ),
    Mutant(
        name="a block that another stores is given up at once",
        rules=(),
        file="kvtier/tiers/server/storing.py",
        old="if outcome == ReserveOutcome.BEING_STORED:",
        new="if False:",
        tests=(f"{CALLS}::test_a_block_that_another_stores_*",),
    ),
    Mutant(
        name="what does not have its checksum is served",
        rules=(),
        file="kvtier/tiers/server/fetching.py",
        old="= ReadOutcome.OK if is_well else ReadOutcome.DAMAGED",
        new="= ReadOutcome.OK",
        tests=(f"{HOSTILE}::test_what_is_not_what_was_stored_*",),
    ),
    Mutant(
        name="memory that the server may cut short is mapped",
        rules=(),
        file=MAPPING,
        old="if not seals & fcntl.F_SEAL_SHRINK:",
        new="if False:",
        tests=(f"{HOSTILE}::test_what_is_no_kvtier_server_*",),
    ),
    Mutant(
        name="a server that was started anew is taken for the one before",
        rules=(),
        file=MAPPING,
        old="identity = (found.st_dev, found.st_ino)",
        new="identity = (found.st_dev, nbytes)",
        tests=(f"{MAPPINGS}::test_memory_of_a_server_that_was_started_anew_*",),
    ),
]
