"""Aborts, failures, resets, stores and what can be seen: sections F, G and H of docs/rules.md."""

from __future__ import annotations

from tests.tools.mutation import Mutant

CONNECTOR = "connectors/kvtier_connectors/scheduler.py"
DUE = "connectors/kvtier_connectors/due.py"
ENGINE = "engine_adapter/kvtier_engine/engine.py"
EPISODE = "kvtier/episode.py"
LANDING = "connectors/kvtier_connectors/landing.py"
PROGRESS = "engine_adapter/kvtier_engine/progress.py"
RANKS = "connectors/kvtier_connectors/ranks.py"
RESTORING = "connectors/kvtier_connectors/restoring.py"
SCHEDULER = "engine_adapter/kvtier_engine/scheduler.py"
STORING = "connectors/kvtier_connectors/storing.py"
WAITS = "kvtier/waits.py"
WORKER = "connectors/kvtier_connectors/worker.py"

DUE_TESTS = "tests/connectors/test_due.py"
LANDING_TESTS = "tests/connectors/test_landing.py"
LIFE_TESTS = "tests/engine/test_rules_lifetime.py"
LOG_TESTS = "tests/engine/test_progress.py"
RANK_TESTS = "tests/connectors/test_ranks.py"
STORING_TESTS = "tests/connectors/test_storing.py"
WORKER_TESTS = "tests/connectors/test_worker.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="pin: destinations are not pinned while copies write them",
        rules=(71,),
        file=LANDING,
        old="        self._pin(landing)\n        self._num_copying",
        new="        self._num_copying",
        tests=(LANDING_TESTS,),
    ),
    Mutant(
        name="an abandoned landing is waited for",
        rules=(72,),
        file=SCHEDULER,
        old="elif outcome.is_abandoned or outcome.will_retry:",
        new="elif outcome.will_retry:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="nobody fails for a restore",
        rules=(72,),
        file=SCHEDULER,
        old="            if outcome.must_fail:",
        new="            if False:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="who failed for a stage is recomputed whatever was asked for",
        rules=(72,),
        file=SCHEDULER,
        old="for name in poll.failed if name in self._requests]",
        new="for name in () if name in self._requests]",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a rank is heard twice",
        rules=(73,),
        file=RANKS,
        old="return told is None or rank not in told.ranks",
        new="return True",
        tests=(f"{RANK_TESTS}::test_r73_*",),
    ),
    Mutant(
        name="a job that nobody knows is taken",
        rules=(73,),
        file=CONNECTOR,
        old="if not is_known or not self._ranks.can_take(result):",
        new="if not self._ranks.can_take(result):",
        tests=(
            f"{LANDING_TESTS}::test_r73_*",
            f"{STORING_TESTS}::test_r73_*",
        ),
    ),
    Mutant(
        name="epoch check: a copy's end is told to whoever has the name now",
        rules=(74,),
        file=RESTORING,
        old="if request is None or request.landing is not landing:",
        new="if request is None:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="deferred free: blocks come back in the middle of a step",
        rules=(75,),
        file=SCHEDULER,
        old="if self._is_computing and request_id in self._scheduled:",
        new="if False:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a reset spares nobody",
        rules=(76,),
        file=ENGINE,
        old="if self.num_unfinished and not preempt_running:",
        new="if False:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a reset leaves the running where they are",
        rules=(76,),
        file=ENGINE,
        old="        self.scheduler.preempt_all()\n",
        new="",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a reset forgets who was to be looked up again",
        rules=(76,),
        file=RESTORING,
        old="        self._freed.update(dict.fromkeys(request.request_id for request in self._lost))\n",
        new="",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="epoch check: a reset lets what was under way land",
        rules=(76,),
        file=LANDING,
        old="0 if is_void else [*",
        new="[*",
        tests=(LANDING_TESTS,),
    ),
    Mutant(
        name="an engine without requests has no work",
        rules=(77,),
        file=ENGINE,
        old="or self._copies_in_flight > 0",
        new="",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="pin: a block is not pinned while it is copied down",
        rules=(78,),
        file=STORING,
        old='            pinned = self._attempt("pin", self._pool.pin, block.block_id, PIN_HOLDER)\n',
        new="            pinned = None\n",
        tests=(f"{STORING_TESTS}::test_r78_*",),
    ),
    Mutant(
        name="fence: what was reused while it was copied is stored",
        rules=(78,),
        file="connectors/kvtier_connectors/copies.py",
        old="        if self.overtaken:\n",
        new="        if False:\n",
        tests=(f"{STORING_TESTS}::test_r78_*",),
    ),
    Mutant(
        name="fence: a copy does not wait for what writes its blocks",
        rules=(),
        file=WORKER,
        old="fired = written.wait(FENCE_TIMEOUT_S)",
        new="fired = True",
        tests=(f"{WORKER_TESTS}::test_a_copy_begins_*",),
    ),
    Mutant(
        name="an idle engine stores all it has",
        rules=(79,),
        file=DUE,
        old="islice(pool.free_queue(), depth)",
        new="pool.free_queue()",
        tests=(f"{STORING_TESTS}::test_r79_*",),
    ),
    Mutant(
        name="an engine that turns over stores nothing",
        rules=(79,),
        file=DUE,
        old="        self._rate += RATE_WEIGHT * (operator.index(demand.allocated) - self._rate)\n",
        new="",
        tests=(f"{DUE_TESTS}::test_r79_*",),
    ),
    Mutant(
        name="a drop is not counted",
        rules=(79,),
        file=STORING,
        old="        self.ledger.add_dropped(reason, 1)\n        if reason not in TRIED_AGAIN",
        new="        if reason not in TRIED_AGAIN",
        tests=(f"{STORING_TESTS}::test_r79_dropped_*",),
    ),
    Mutant(
        name="a tail is stored before its prefix",
        rules=(79,),
        file=STORING,
        old="            self._due.update(reversed(chain.items()))",
        new="            self._due.update(chain.items())",
        tests=(f"{STORING_TESTS}::test_r79_ancestors_*",),
    ),
    Mutant(
        name="what a full host memory cannot take stays pinned",
        rules=(80,),
        file=STORING,
        old="        self._drop(block, reservation)\n        return None",
        new=(
            '        self._attempt("pin", self._pool.pin, block.block_id, PIN_HOLDER)\n'
            "        self._drop(block, reservation)\n"
            "        return None"
        ),
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a store is over when one rank has told",
        rules=(81,),
        file=RANKS,
        old="        if len(told.ranks) < self._num_ranks:\n            return None\n",
        new="",
        tests=(f"{RANK_TESTS}::test_r81_*",),
    ),
    Mutant(
        name="a store that is not told over is waited for",
        rules=(81,),
        file=STORING,
        old="        self.give_up_overdue()\n",
        new="",
        tests=(f"{STORING_TESTS}::test_r81_a_copy_*",),
    ),
    Mutant(
        name="nobody is seen to wait for a stage",
        rules=(82,),
        file=SCHEDULER,
        old="waiting_for_stage=self.waiting.num_staging",
        new="waiting_for_stage=0",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="nobody is seen to wait for blocks",
        rules=(82,),
        file=SCHEDULER,
        old="restore_capacity_waits=self.admission.ledger.num_waiters",
        new="restore_capacity_waits=0",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="the longest wait is that of the last look",
        rules=(82,),
        file=EPISODE,
        old="return max(now, self._seen_at) - self._began_at",
        new="return self._seen_at - self._began_at",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a wait is logged once",
        rules=(82,),
        file=WAITS,
        old="if seconds < num_lines * LOG_PERIOD_S:",
        new="if num_lines:",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="the end of a wait is not logged",
        rules=(82,),
        file=WAITS,
        old="        if num_lines:\n            logger.info(",
        new="        if False:\n            logger.info(",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="who waits for a copy seems stuck",
        rules=(82,),
        file=ENGINE,
        old="is_event_due=plan.verdict is Verdict.WAIT",
        new="is_event_due=False",
        tests=(LIFE_TESTS,),
    ),
    Mutant(
        name="a prompt is done before its forward",
        rules=(82,),
        file=ENGINE,
        old="share.start, share.num_tokens, is_chunked)\n",
        new=(
            "share.start, share.num_tokens, is_chunked)\n"
            "                self.progress.computed(request.request_id, share.start + share.num_tokens)\n"
        ),
        tests=(f"{LIFE_TESTS}::test_r82_a_prompt_*",),
    ),
    Mutant(
        name="an aborted prompt is remembered",
        rules=(82,),
        file=PROGRESS,
        old="        self._prefills.pop(request_id, None)\n",
        new="        pass\n",
        tests=(f"{LOG_TESTS}::test_r82_a_request_*",),
    ),
    Mutant(
        name="prompts that are done pile up",
        rules=(82,),
        file=PROGRESS,
        old="if not prefill.is_done and self._is_live(request_id)",
        new="if self._is_live(request_id)",
        tests=(f"{LOG_TESTS}::test_r82_above_*",),
    ),
]
