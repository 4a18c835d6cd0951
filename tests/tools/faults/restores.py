"""Admission of restores: section E of docs/rules.md."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ADMISSION = "engine_adapter/kvtier_engine/admission.py"
ARRIVING = "connectors/kvtier_connectors/arriving.py"
BATCH = "engine_adapter/kvtier_engine/batch.py"
CAPACITY = "engine_adapter/kvtier_engine/capacity.py"
EPISODE = "kvtier/episode.py"
LANDING = "connectors/kvtier_connectors/landing.py"
MATCHING = "connectors/kvtier_connectors/matching.py"
RESTORE = "kvtier/restore.py"
RESTORE_PROGRESS = "kvtier/progress.py"
RESTORING = "connectors/kvtier_connectors/restoring.py"
SCHEDULER = "engine_adapter/kvtier_engine/scheduler.py"
SETTINGS = "kvtier/config/settings.py"
WAITING = "engine_adapter/kvtier_engine/waiting.py"
WAITS = "kvtier/waits.py"

BOUND_TESTS = "tests/engine/test_rules_restore.py"
DECISION_TESTS = "tests/core/test_restore.py"
KEPT_TESTS = "tests/engine/test_rules_capacity.py"
LANDING_TESTS = "tests/connectors/test_landing.py"
LIFE_TESTS = "tests/engine/test_rules_lifetime.py"
POLL_TESTS = "tests/engine/test_rules_polls.py"
RESTORING_TESTS = "tests/connectors/test_restoring.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="poll every step: restores are polled only with a slot free",
        rules=(46,),
        file=SCHEDULER,
        old="poll = self._connector.poll_restores()\n",
        new=(
            "full = len(self.running) >= self._config.max_num_seqs\n"
            "        poll = NO_RESTORES if full else self._connector.poll_restores()\n"
        ),
        tests=(POLL_TESTS,),
    ),
    Mutant(
        name="in a decode turn nothing is restored",
        rules=(46,),
        file=SCHEDULER,
        old="            batch.admit(candidates, may_compute=may_compute)",
        new="            batch.admit(candidates if may_compute else [], may_compute=may_compute)",
        tests=(POLL_TESTS,),
    ),
    Mutant(
        name="any number of restores waits for blocks",
        rules=(46,),
        file=CAPACITY,
        old="or len(self._waiters) < self._max_waiters",
        new="or True",
        tests=(POLL_TESTS,),
    ),
    Mutant(
        name="restores are refused while no slot is free",
        rules=(46, 50),
        file=ADMISSION,
        old="num_slots = self._config.max_num_seqs - len(running)",
        new="num_slots = max(1, self._config.max_num_seqs - len(running))",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="a wait for blocks ends at the first refusal",
        rules=(47,),
        file=WAITS,
        old="return episode.refused.has_reached(now, self._bound_s)",
        new="return True",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: who waited too long is not computed",
        rules=(48, 51),
        file=ADMISSION,
        old="request.restore_expired = True",
        new="request.restore_expired = False",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: a wait ends only past its time",
        rules=(48, 69),
        file=EPISODE,
        old="return now >= self.when(seconds)",
        new="return now > self.when(seconds)",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: what is looked for goes on though the wait is over",
        rules=(48,),
        file=RESTORE,
        old="or episode.is_refreshing or episode.is_expired",
        new="or episode.is_refreshing",
        tests=(f"{DECISION_TESTS}::test_r48_*",),
    ),
    Mutant(
        name="expiry: a copy that fails afterwards is tried again",
        rules=(48,),
        file=RESTORE_PROGRESS,
        old=" and not episode.is_expired:",
        new=":",
        tests=(f"{DECISION_TESTS}::test_r48_*", f"{RESTORING_TESTS}::test_r48_*"),
    ),
    Mutant(
        name="expiry: what is in host memory is computed all the same",
        rules=(48,),
        file=RESTORE_PROGRESS,
        old="        episode.is_expired = True\n        self.tell(episode)\n",
        new="        self.rest(episode, 0)\n",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: what was staged is let go",
        rules=(48,),
        file=ARRIVING,
        old="        if arrival.episode.phase is RestorePhase.READY:\n            self._resting.pop",
        new="        if False:\n            self._resting.pop",
        tests=(f"{RESTORING_TESTS}::test_r48_*",),
    ),
    Mutant(
        name="whoever was refused once is refused until the bound",
        rules=(49,),
        file=ADMISSION,
        old="            if not self._has_room(probe,",
        new="            if request in self.ledger.waiters() or not self._has_room(probe,",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="what was worth a restore once is restored",
        rules=(50,),
        file=RESTORING,
        old="return None if self.decision.is_worth_landing(arrival.episode) else MissReason.COST",
        new="return None",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: who waited too long holds blocks back",
        rules=(51,),
        file=ADMISSION,
        old=(
            "        self.ledger.release(request)\n"
            "        request.refusal = None\n"
            "        request.restore_expired = True"
        ),
        new="        request.refusal = None\n        request.restore_expired = True",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="expiry: who waited too long needs the connector's consent",
        rules=(51,),
        file=ADMISSION,
        old="if self._connector is None or request.restore_expired:",
        new="if self._connector is None:",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="a preempted request stays expired",
        rules=(52,),
        file=ADMISSION,
        old="        request.num_refused = 0\n        request.restore_expired = False",
        new="        request.num_refused = 0",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="each preemption begins with no attempt made",
        rules=(52,),
        file=RESTORE,
        old="0 if query.num_tokens > episode.num_tokens else",
        new="0 if query.num_tokens > 0 else",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="attempts are counted over tokens",
        rules=(52,),
        file=RESTORE,
        old="0 if query.num_tokens > episode.num_tokens else",
        new="0 if query.num_tokens < 0 else",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="hold-back: nothing is kept for a restore that waits",
        rules=(53,),
        file=CAPACITY,
        old="        self.num_held += num_needed\n",
        new="        pass\n",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="hold-back: what was kept in the last step is kept from everybody",
        rules=(53,),
        file=CAPACITY,
        old="        self.num_held = 0\n        for waiter",
        new="        for waiter",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="hold-back: who leaves the queue still holds blocks back",
        rules=(54,),
        file=ADMISSION,
        old="        self.ledger.release(request)\n        request.refusal = None\n        request.num_refused = 0",
        new="        request.refusal = None\n        request.num_refused = 0",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="hold-back: who has nothing to restore any more still holds blocks back",
        rules=(54,),
        file=ADMISSION,
        old="            if not probe.is_restore:\n                self.ledger.release(request)\n",
        new="",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="while nothing is published a waiter is not looked at anew",
        rules=(54,),
        file=ADMISSION,
        old=" and not self.ledger.num_waiters)",
        new=")",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="what never fits waits like any other",
        rules=(55,),
        file=ADMISSION,
        old="is_permanent = probe.num_needed > self._pool.num_blocks",
        new="is_permanent = False",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="a refusal evicts what is cached",
        rules=(56,),
        file=ADMISSION,
        old="        if probe.is_restore and self._connector is not None:\n",
        new=(
            "        self._pool.release(self._pool.allocate(self._pool.num_free) or [])\n"
            "        if probe.is_restore and self._connector is not None:\n"
        ),
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="admitted prompts are promised nothing",
        rules=(57, 61),
        file=CAPACITY,
        old="        return sum(\n            self.needed(request, 0)",
        new="        return 0 * sum(\n            self.needed(request, 0)",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="a decode leaves the blocks that are kept",
        rules=(58,),
        file=BATCH,
        old="            fits = self._tables.grow(request, 1)\n            while",
        new=(
            "            fits = not self._admission.ledger.num_held and self._tables.grow(request, 1)\n"
            "            while"
        ),
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="a decode leaves the blocks that are promised",
        rules=(57,),
        file=BATCH,
        old="            fits = self._tables.grow(request, 1)\n            while",
        new=(
            "            fits = not self._admission.ledger.credits(self._roster.running) and "
            "self._tables.grow(request, 1)\n"
            "            while"
        ),
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="the watermark counts for one that is alone",
        rules=(59,),
        file=CAPACITY,
        old="if is_restore and is_busy else 0",
        new="if is_restore else 0",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="there is no watermark",
        rules=(59,),
        file=CAPACITY,
        old="if is_restore and is_busy else 0",
        new="if False else 0",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="the watermark counts for whoever is computed",
        rules=(59,),
        file=CAPACITY,
        old="if is_restore and is_busy else 0",
        new="if is_busy else 0",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="behind a blocked head nobody goes on",
        rules=(60,),
        file=BATCH,
        old="            if request not in self:\n                self._run_chunk",
        new=(
            "            if request not in self and not self._admission._queue.num_ready:\n"
            "                self._run_chunk"
        ),
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="first-decode reservation: the first block of the output is not counted",
        rules=(61,),
        file=CAPACITY,
        old="request.blocks_for(len(request.tokens) + 1)",
        new="request.blocks_for(len(request.tokens))",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="blocks that are cached already are needed once more",
        rules=(62,),
        file=CAPACITY,
        old="- len(request.block_table) - num_local)",
        new="- len(request.block_table))",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="a landing counts every verdict, not the prefix",
        rules=(63,),
        file=LANDING,
        old="[*landing.copied, False].index(False)",
        new="sum(landing.copied)",
        tests=(LANDING_TESTS,),
    ),
    Mutant(
        name="a torn landing counts as whole",
        rules=(63,),
        file=LANDING,
        old="[*landing.copied, False].index(False)",
        new="landing.num_blocks",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="what was to land counts as landed",
        rules=(63,),
        file=SCHEDULER,
        old="request.num_computed = (outcome.first_block + outcome.num_landed) * request.block_tokens",
        new="request.num_computed = len(request.block_table) * request.block_tokens",
        tests=(KEPT_TESTS,),
    ),
    Mutant(
        name="what failed is tried for ever",
        rules=(64,),
        file=RESTORE_PROGRESS,
        old="if has_time and episode.attempts < self._settings.max_attempts and not episode.is_expired:",
        new="if has_time:",
        tests=(
            f"{DECISION_TESTS}::test_r64_a_stage_*",
            f"{DECISION_TESTS}::test_r64_the_last_*",
        ),
    ),
    Mutant(
        name="what failed is not tried again",
        rules=(64,),
        file=RESTORE_PROGRESS,
        old="if has_time and episode.attempts < self._settings.max_attempts and not episode.is_expired:",
        new="if not has_time:",
        tests=(f"{DECISION_TESTS}::test_r64_a_*",),
    ),
    Mutant(
        name="each attempt has a budget of its own",
        rules=(64,),
        file=EPISODE,
        old="        self.active_s += seconds\n",
        new="        self.active_s = seconds\n",
        tests=(f"{DECISION_TESTS}::test_r64_all_*",),
    ),
    Mutant(
        name="single warning: each end of a restore is told",
        rules=(64, 65),
        file=RESTORE_PROGRESS,
        old=" or episode.is_told:",
        new=":",
        tests=(
            f"{DECISION_TESTS}::test_r64_the_last_*",
            f"{DECISION_TESTS}::test_r65_a_tier_*",
        ),
    ),
    Mutant(
        name="no wait for a tier or a copy has an end",
        rules=(65, 72),
        file=RESTORE,
        old="        if not is_over:",
        new="        if True:",
        tests=(
            POLL_TESTS,
            LIFE_TESTS,
        ),
    ),
    Mutant(
        name="waiting for blocks uses up the time to stage",
        rules=(65,),
        file=EPISODE,
        old="if phase not in ACTIVE:",
        new="if phase is RestorePhase.OVER:",
        tests=(POLL_TESTS,),
    ),
    Mutant(
        name="a request waits longer for a tier than computing takes",
        rules=(65,),
        file=RESTORE_PROGRESS,
        old="FIRST_WAIT_S if recompute_s is None else recompute_s)",
        new="FIRST_WAIT_S if recompute_s is None else 2 * recompute_s)",
        tests=(f"{DECISION_TESTS}::test_r65_the_limit_*",),
    ),
    Mutant(
        name="an answer is looked up again when its lifetime is over",
        rules=(66,),
        file=RESTORE,
        old="ANSWER_LIFETIME_S / 2)",
        new="ANSWER_LIFETIME_S)",
        tests=(f"{DECISION_TESTS}::test_r66_an_answer_*",),
    ),
    Mutant(
        name="an answer is looked up twice at once",
        rules=(66,),
        file=RESTORE,
        old="or episode.is_refreshing or episode.is_expired",
        new="or episode.is_expired",
        tests=(f"{DECISION_TESTS}::test_r66_an_answer_*",),
    ),
    Mutant(
        name="a refresh that fails ends the wait",
        rules=(66,),
        file=RESTORE,
        old="        if self._ends_refresh(episode):\n            return episode.phase\n",
        new="        if self._ends_refresh(episode):\n            self.end(episode)\n",
        tests=(f"{DECISION_TESTS}::test_r66_a_refresh_*",),
    ),
    Mutant(
        name="what left host memory is waited with",
        rules=(66,),
        file=RESTORE,
        old="return episode.phase if is_held else self._lost(episode, parts)",
        new="return episode.phase if is_held or True else self._lost(episode, parts)",
        tests=(f"{DECISION_TESTS}::test_r66_what_*",),
    ),
    Mutant(
        name="what the engine has by now is restored",
        rules=(67,),
        file=RESTORING,
        old="if arrival.is_waiting and num_local < arrival.end_block:",
        new="if arrival.is_waiting:",
        tests=(f"{RESTORING_TESTS}::test_r67_who_*",),
    ),
    Mutant(
        name="what the engine lost is computed",
        rules=(67,),
        file=MATCHING,
        old="return is_open and not episode.is_told and num_local < arrival.first_block",
        new="return is_open and not episode.is_told and num_local < 0",
        tests=(f"{RESTORING_TESTS}::test_r67_a_prefix_*",),
    ),
    Mutant(
        name="a step looks at the whole queue",
        rules=(68,),
        file=WAITING,
        old="FRONT = 32",
        new="FRONT = 1 << 30",
        tests=(POLL_TESTS,),
    ),
    Mutant(
        name="a bound may be negative",
        rules=(69,),
        file=SETTINGS,
        old="capacity_bound_s: Annotated[float, Field(ge=0, le=86400)]",
        new="capacity_bound_s: Annotated[float, Field(le=86400)]",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="a clock that goes back adds to every wait",
        rules=(69,),
        file=EPISODE,
        old="            self._began_at -= self._seen_at - now\n",
        new="            pass\n",
        tests=(BOUND_TESTS,),
    ),
    Mutant(
        name="a restore of nothing is looked up",
        rules=(70,),
        file=RESTORE_PROGRESS,
        old="        elif not episode.max_blocks:\n",
        new="        elif episode.max_blocks is None:\n",
        tests=(f"{DECISION_TESTS}::test_r70_nothing_*",),
    ),
    Mutant(
        name="fewer than no blocks came",
        rules=(70,),
        file=RESTORE,
        old="        num_blocks = min(max(num_blocks, 0), episode.goal)\n        if episode.is_cut",
        new="        num_blocks = min(num_blocks, episode.goal)\n        if episode.is_cut",
        tests=(f"{DECISION_TESTS}::test_r70_no_*",),
    ),
]
