"""Tiers of other machines, and several tiers below host memory."""

from __future__ import annotations

from tests.tools.mutation import Mutant

REMOTE = "tests/core/test_remote.py"
ARRIVING = "tests/connectors/test_remote_arriving.py"
GUARDED = "kvtier/tiers/guarded.py"
LOOKING = "connectors/kvtier_connectors/looking.py"
WRITE_BEHIND = "kvtier/writebehind.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="a request is the probe of a sick remote tier",
        rules=(),
        file=GUARDED,
        old="may_probe=not self.is_remote",
        new="may_probe=True",
        tests=(f"{REMOTE}::test_a_sick_tier_is_asked_by_nobody_but_its_probe",),
    ),
    Mutant(
        name="a call that is late and failed is one failure of three",
        rules=(),
        file=GUARDED,
        old="            if not (well or in_time):\n                call.permit.overdue()\n",
        new="",
        tests=(f"{REMOTE}::test_one_call_that_takes_too_long_and_fails_is_enough",),
    ),
    Mutant(
        name="what a remote tier was found to hold is believed for ever",
        rules=(),
        file="kvtier/tiers/known.py",
        old="0.0 <= now - at < LIFETIME_S",
        new="0.0 <= now - at",
        tests=(f"{REMOTE}::test_what_is_known_is_known_for_a_while_*",),
    ),
    Mutant(
        name="a block that was not there is believed to be",
        rules=(),
        file="kvtier/lower.py",
        old="known.add(key for key, _ in blocks), known.discard)",
        new="known.add(key for key, _ in blocks), lambda keys: None)",
        tests=(f"{REMOTE}::test_what_is_known_is_known_for_a_while_*",),
    ),
    Mutant(
        name="a reset leaves what was known",
        rules=(),
        file="kvtier/lower.py",
        old="        if self._known is not None:\n            self._known.clear()\n        queued = self",
        new="        queued = self",
        tests=(f"{REMOTE}::test_a_reset_leaves_nothing_known",),
    ),
    Mutant(
        name="what a tier held before it fell sick is believed after",
        rules=(),
        file="kvtier/lower.py",
        old="        if self._known is not None:  # who",
        new="        if False:  # who",
        tests=(f"{REMOTE}::test_nothing_is_believed_of_a_tier_that_was_sick",),
    ),
    Mutant(
        name="what a remote tier is known to hold is sent to it again",
        rules=(),
        file=WRITE_BEHIND,
        old="        if self._known is not None:\n",
        new="        if False:\n",
        tests=(f"{REMOTE}::test_what_a_remote_tier_is_known_to_hold_*",),
    ),
    Mutant(
        name="blocks behind a gap are asked for",
        rules=(),
        file="kvtier/membership.py",
        old="            if not all(held):\n                return None\n",
        new="",
        tests=(f"{REMOTE}::test_a_prompt_costs_few_round_trips_*",),
    ),
    Mutant(
        name="whoever waits for an answer does not see that the tier is sick",
        rules=(),
        file="kvtier/membership.py",
        old="return self._done or not self._source.is_available",
        new="return self._done",
        tests=(f"{REMOTE}::test_whoever_waits_for_an_answer_learns_*",),
    ),
    Mutant(
        name="an answer is waited for without a bound",
        rules=(),
        file=LOOKING,
        old="if not arrival.episode.has_taken(self._clock.now(), ASKING_SHARE):",
        new="if True:",
        tests=(f"{ARRIVING}::test_an_answer_that_does_not_come_*",),
    ),
    Mutant(
        name="waiting for an answer takes the time to stage",
        rules=(),
        file=LOOKING,
        old="ASKING_SHARE = 0.25\n",
        new="ASKING_SHARE = 1.0\n",
        tests=(f"{ARRIVING}::test_what_is_known_without_the_answer_lands",),
    ),
    Mutant(
        name="who does not wait asks",
        rules=(),
        file=LOOKING,
        old="if found is None or not arrival.episode.max_wait_s:",
        new="if found is None:",
        tests=(f"{ARRIVING}::test_who_does_not_wait_asks_nobody",),
    ),
    Mutant(
        name="a tier that gives nothing back keeps the others waiting",
        rules=(),
        file="kvtier/readqueue.py",
        old="budgets = [budget for each, budget in list(self._budgets.items()) if source in (None, each)]",
        new="budgets = list(self._budgets.values())",
        tests=(f"{REMOTE}::test_a_tier_that_gives_nothing_back_*",),
    ),
    Mutant(
        name="what waited too long is written",
        rules=(),
        file=WRITE_BEHIND,
        old="if is_orphan or now - block.due_at > self._max_age_s:",
        new="if is_orphan:",
        tests=(f"{REMOTE}::test_a_store_that_waited_too_long_*",),
    ),
    Mutant(
        name="what continues a block that was too old is written",
        rules=(),
        file=WRITE_BEHIND,
        old="is_orphan = block.parent in gone or block.parent in self._dropped",
        new="is_orphan = False",
        tests=(f"{REMOTE}::test_a_store_that_waited_too_long_*",),
    ),
    Mutant(
        name="a block that arrives between two looks is told lost",
        rules=(),
        file="kvtier/durability.py",
        old="            under_way = {key for key in keys if key in self._under_way}\n",
        new="            under_way = set[Key]()\n",
        tests=(f"{REMOTE}::test_durability_is_told_once_nothing_is_on_its_way",),
    ),
    Mutant(
        name="a detached tier's stages wait for it",
        rules=(),
        file="kvtier/staging.py",
        old="            queued = self._queue.take_queued(source, MissReason.TIER_DOWN)\n",
        new="            queued = list[StageRead]()\n",
        tests=(f"{REMOTE}::test_a_stage_of_a_tier_that_is_detached_ends",),
    ),
    Mutant(
        name="a tier is attached with blocks of epochs before",
        rules=(),
        file="kvtier/below.py",
        old="if opened.tier.epoch < epoch:",
        new="if False:",
        tests=(f"{REMOTE}::test_attach_and_detach_at_run_time",),
    ),
]
