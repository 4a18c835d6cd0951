"""kvtier-server and the tier over it: whose a slot is, who may have it, and when what is in it counts."""

from __future__ import annotations

from tests.tools.mutation import Mutant

SLOTS = "kvtier/server/slots.py"
NAMING = "kvtier/tiers/naming.py"
QUARANTINE = "kvtier/server/quarantine.py"
MAPPING = "kvtier/tiers/server/mapping.py"
SESSIONS = "tests/server/test_session.py"
LEFT = "tests/server/test_quarantine.py"
GRANTS = "tests/server/test_session_grants.py"
HOST = "tests/core/test_host_tier.py"
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
        old="self.mapping_bytes // HOLDING_SHARE",
        new="self.mapping_bytes",
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
    Mutant(
        name="granted slots of a client that went are free at once",
        rules=(),
        file=SLOTS,
        old="if not (self._void or self._leases or self._granted):",
        new="if not (self._void or self._leases):",
        tests=(f"{GRANTS}::test_who_holds_granted_slots_alone_*",),
    ),
    Mutant(
        name="what is published is free while its client may still read it",
        rules=(),
        file=SLOTS,
        old="self._leases[handles[place]] = self._granted.pop(handles[place])",
        new="self.abort([handles[place]])",
        tests=(f"{GRANTS}::test_the_publisher_holds_a_lease_*",),
    ),
    Mutant(
        name="one client may be granted all of the pool",
        rules=(),
        file=SLOTS,
        old="leases = self._host.grant(nbytes, min(number, room), self._owner)",
        new="leases = self._host.grant(nbytes, max(number, room), self._owner)",
        tests=(f"{GRANTS}::test_what_does_not_fit_*",),
    ),
    Mutant(
        name="a slot is published though its block needs another size",
        rules=(),
        file=SLOTS,
        old="is_there = [lease is not None and lease.nbytes == slot_bytes for lease in granted]",
        new="is_there = [lease is not None for lease in granted]",
        tests=(f"{GRANTS}::test_a_slot_of_another_size_class_*",),
    ),
    Mutant(
        name="slots are granted to who cannot fill them",
        rules=(),
        file="kvtier/server/dialogue.py",
        old='        if not self.is_mapped:\n            raise ConfigError("without a mapping no slot can',
        new='        if False:\n            raise ConfigError("without a mapping no slot can',
        tests=(f"{GRANTS}::test_without_a_mapping_*",),
    ),
    Mutant(
        name="a commit gives away a slot that was granted",
        rules=(),
        file=SLOTS,
        old="        self._abort(handles)  # those that were void\n",
        new="        self.abort(handles)\n",
        tests=(f"{GRANTS}::test_a_grant_is_no_reservation_*",),
    ),
    Mutant(
        name="a slot that is a block already becomes another",
        rules=(),
        file=NAMING,
        old="if len(slots) != len(leases) or not slots.isdisjoint(self._names):",
        new="if len(slots) != len(leases):",
        tests=(f"{HOST}::test_what_is_no_slot_of_a_grant_*",),
    ),
    Mutant(
        name="a block that is being stored is said to be there, to who publishes it",
        rules=(),
        file=NAMING,
        old="return PublishedAs.ALREADY_STORED if is_filled else PublishedAs.BEING_STORED",
        new="return PublishedAs.ALREADY_STORED",
        tests=(f"{HOST}::test_what_is_there_or_on_its_way_*",),
    ),
    Mutant(
        name="publishing a block evicts the one that it continues",
        rules=(),
        file=NAMING,
        old="kept = [] if above is None else self._pool.lease_all([above], self._copier)",
        new="kept: list[Lease] = []",
        tests=(f"{HOST}::test_at_its_quota_a_tenant_publishes_*",),
    ),
    Mutant(
        name="lower tiers are not told of published blocks",
        rules=(),
        file=NAMING,
        old="            self._tell_committed(stored, None)\n",
        new="            pass\n",
        tests=(f"{GRANTS}::test_blocks_that_are_published_go_on_*",),
    ),
]
