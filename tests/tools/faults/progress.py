"""What a step comes to: sections A and D of docs/rules.md."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ADMISSION = "engine_adapter/kvtier_engine/admission.py"
BATCH = "engine_adapter/kvtier_engine/batch.py"
COMPUTE_SHARE = "engine_adapter/kvtier_engine/compute_share.py"
ENGINE = "engine_adapter/kvtier_engine/engine.py"
LLM = "engine_adapter/kvtier_engine/llm.py"
POOL = "engine_adapter/kvtier_engine/block_pool.py"
ROSTER = "engine_adapter/kvtier_engine/roster.py"
SCHEDULER = "engine_adapter/kvtier_engine/scheduler.py"
WAITING = "engine_adapter/kvtier_engine/waiting.py"

PROGRESS_TESTS = "tests/engine/test_rules_progress.py"
GIVEN_UP_TESTS = "tests/engine/test_rules_given_up.py"
SHARE_TESTS = "tests/engine/test_compute_share.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="escape preemption: a decode in an empty step preempts nobody",
        rules=(1, 41),
        file=BATCH,
        old="            while not fits and self._roster",
        new="            while self.shares and not fits and self._roster",
        tests=(
            f"{PROGRESS_TESTS}::*_r41_*",
            f"{PROGRESS_TESTS}::*_r1_*",
        ),
    ),
    Mutant(
        name="escape preemption: an empty step stays empty",
        rules=(41,),
        file=SCHEDULER,
        old="            batch.escape()\n",
        new="            pass\n",
        tests=(f"{PROGRESS_TESTS}::*_r41_*",),
    ),
    Mutant(
        name="a decode preempts no second time",
        rules=(12,),
        file=BATCH,
        old=(
            "            while not fits and self._roster.preempt_for(request, self.__contains__):\n"
            "                fits = self._tables.grow(request, 1)"
        ),
        new="            if not fits and self._roster.preempt_for(request, self.__contains__):\n                pass",
        tests=(f"{PROGRESS_TESTS}::*_r12_*",),
    ),
    Mutant(
        name="victims that share all they have are looked at one by one",
        rules=(2,),
        file=ROSTER,
        old="            victims.append(victim)\n",
        new="            victims = [victim]\n",
        tests=(f"{PROGRESS_TESTS}::*_r2_*",),
    ),
    Mutant(
        name="all that were looked at for blocks are preempted",
        rules=(2, 13),
        file=ROSTER,
        old="            victims = others if self._num_freed(others) else victims\n",
        new="            del others\n",
        tests=(
            f"{PROGRESS_TESTS}::*_r2_*",
            f"{PROGRESS_TESTS}::*_r13_*",
        ),
    ),
    Mutant(
        name="decodes without a block keep their turn",
        rules=(2,),
        file=BATCH,
        old="            decodes.sort(key=lambda request: request not in chosen)\n",
        new="            decodes = [request for request in decodes if request in chosen]\n",
        tests=(f"{PROGRESS_TESTS}::*_r2_*",),
    ),
    Mutant(
        name="the loop does not wait for the deadline",
        rules=(3,),
        file=ENGINE,
        old="            timeout = max(0.0, min(timeout, self._next_deadline - self._clock.now()))\n",
        new="            pass\n",
        tests=(f"{PROGRESS_TESTS}::*_r3_*",),
    ),
    Mutant(
        name="the loop spins",
        rules=(3,),
        file=LLM,
        old="            self.engine.wait(WAIT_S)",
        new="            pass",
        tests=(f"{PROGRESS_TESTS}::*_r3_*",),
    ),
    Mutant(
        name="a wait is a stall",
        rules=(3, 37),
        file=SCHEDULER,
        old="        elif in_flight or failed or self._is_wait_for_room():\n",
        new="        elif failed or self._is_wait_for_room():\n",
        tests=(
            f"{PROGRESS_TESTS}::*_r3_*",
            f"{PROGRESS_TESTS}::*_r37_*",
        ),
    ),
    Mutant(
        name="a wait for blocks without a slot hides a stall",
        rules=(4, 51),
        file=SCHEDULER,
        old="num_waiters > 0 and len(self.running) < self._config.max_num_seqs",
        new="num_waiters > 0",
        tests=(f"{GIVEN_UP_TESTS}::*_r4_*",),
    ),
    Mutant(
        name="a wait for blocks that just began has no deadline",
        rules=(3,),
        file=SCHEDULER,
        old="self.admission.num_sent_back or is_untold else",
        new="self.admission.num_sent_back else",
        tests=(f"{GIVEN_UP_TESTS}::*_r3_*",),
    ),
    Mutant(
        name="a stall fails who waits before who runs",
        rules=(4, 37),
        file=SCHEDULER,
        old="min(self.running or self.waiting.first_ready(1), ",
        new="min([*self.running, *self.waiting.first_ready(1)], ",
        tests=(f"{GIVEN_UP_TESTS}::*_r37_*",),
    ),
    Mutant(
        name="a stall is counted at each step",
        rules=(4,),
        file=SCHEDULER,
        old="        self._num_stalled_steps = 0\n        return [",
        new="        self.num_stalls += 1\n        self._num_stalled_steps = 0\n        return [",
        tests=(f"{PROGRESS_TESTS}::*_r4_*",),
    ),
    Mutant(
        name="the first stalled step fails a request",
        rules=(4,),
        file=SCHEDULER,
        old="            self.admission.look_anew()\n            return []\n",
        new="            self.admission.look_anew()\n",
        tests=(f"{PROGRESS_TESTS}::*_r4_*",),
    ),
    Mutant(
        name="a stall fails nobody",
        rules=(4, 36),
        file=SCHEDULER,
        old="        return [(self._requests[stall.request_id], stall.describe())]",
        new="        return []",
        tests=(
            f"{PROGRESS_TESTS}::*_r4_*",
            f"{PROGRESS_TESTS}::*_r36_*",
        ),
    ),
    Mutant(
        name="stalled steps need not follow each other",
        rules=(4,),
        file=SCHEDULER,
        old="        if stall is None:\n            self._num_stalled_steps = 0\n",
        new="",
        tests=(f"{PROGRESS_TESTS}::*_r4_*",),
    ),
    Mutant(
        name="a stall does not say who holds blocks",
        rules=(36,),
        file=POOL,
        old="        self._holders.setdefault(block_id, []).append(holder)",
        new="        self._holders.setdefault(block_id, []).append('a copy')",
        tests=(f"{PROGRESS_TESTS}::*_r36_*",),
    ),
    Mutant(
        name="the model is run for an empty batch",
        rules=(5,),
        file=ENGINE,
        old="        outputs = self._forward(plan.scheduled) if plan.scheduled else []\n",
        new="        outputs = self._forward(plan.scheduled)\n",
        tests=(f"{PROGRESS_TESTS}::*_r5_*",),
    ),
    Mutant(
        name="head patience: a blocked head is passed for ever",
        rules=(7, 8),
        file=ADMISSION,
        old="            if request.num_refused >= self._config.head_patience:",
        new="            if request.num_refused < 0:",
        tests=(
            f"{PROGRESS_TESTS}::*_r7_*",
            f"{PROGRESS_TESTS}::*_r8_*",
        ),
    ),
    Mutant(
        name="head patience: a blocked head is passed by nobody",
        rules=(7,),
        file=ADMISSION,
        old="            if request.num_refused >= self._config.head_patience:",
        new="            if request.num_refused:",
        tests=(f"{PROGRESS_TESTS}::*_r7_*",),
    ),
    Mutant(
        name="more are admitted than there are slots",
        rules=(9,),
        file=ADMISSION,
        old="            if len(found) == num_slots:\n                break\n",
        new="",
        tests=(f"{PROGRESS_TESTS}::*_r9_*",),
    ),
    Mutant(
        name="the same decodes have each turn",
        rules=(10,),
        file=BATCH,
        old="                request.last_decode_step = self._step\n",
        new="",
        tests=(f"{PROGRESS_TESTS}::*_r10_*",),
    ),
    Mutant(
        name="prompts take the decodes' turns",
        rules=(11,),
        file=COMPUTE_SHARE,
        old="        first = WorkClass.PREFILL if prefill.runtime < decode.runtime else WorkClass.DECODE\n",
        new="        first = WorkClass.PREFILL\n",
        tests=(f"{PROGRESS_TESTS}::*_r11_*",),
    ),
    Mutant(
        name="decodes come after prompts",
        rules=(11,),
        file=SCHEDULER,
        old=(
            "            batch.run_decodes()\n"
            "            batch.run_prefills()\n"
            "            batch.admit(candidates, may_compute=True)\n"
            "            return None"
        ),
        new=(
            "            batch.run_prefills()\n"
            "            batch.admit(candidates, may_compute=True)\n"
            "            return None"
        ),
        tests=(f"{PROGRESS_TESTS}::*_r11_*",),
    ),
    Mutant(
        name="a victim comes back as the last",
        rules=(12,),
        file=WAITING,
        old="        index = bisect_left(self._ready, entry)\n        self._ready.insert",
        new="        index = len(self._ready)\n        self._ready.insert",
        tests=(f"{PROGRESS_TESTS}::*_r12_*",),
    ),
    Mutant(
        name="whose blocks are pinned is preempted too",
        rules=(13,),
        file=POOL,
        old=(
            "        return sum(self._refs[b] == count and not self._pins[b] for b, count in "
            "Counter(block_ids).items())"
        ),
        new="        return sum(self._refs[b] == count for b, count in Counter(block_ids).items())",
        tests=(f"{PROGRESS_TESTS}::*_r13_*",),
    ),
    Mutant(
        name="whose tokens this step computes is preempted too",
        rules=(13,),
        file=ROSTER,
        old=" or is_scheduled(victim):",
        new=":",
        tests=(f"{PROGRESS_TESTS}::*_r13_*",),
    ),
    Mutant(
        name="the connector is not told of a preemption",
        rules=(14,),
        file=ROSTER,
        old=(
            "        if self._connector is not None:\n"
            "            self._connector.requeue_request(victim.request_id, num_local, len(victim.tokens))\n"
        ),
        new="",
        tests=(f"{PROGRESS_TESTS}::*_r14_*",),
    ),
    Mutant(
        name="the connector is not told of an end",
        rules=(14,),
        file=ROSTER,
        old=(
            "        if self._connector is not None:\n"
            "            self._connector.finish_request(request.request_id)\n"
            "        return request.forget_blocks()"
        ),
        new="        return request.forget_blocks()",
        tests=(f"{PROGRESS_TESTS}::*_r14_*",),
    ),
    Mutant(
        name="the connector is told of an end twice",
        rules=(14,),
        file=ROSTER,
        old="            self._connector.finish_request(request.request_id)\n",
        new=(
            "            self._connector.finish_request(request.request_id)\n"
            "            self._connector.finish_request(request.request_id)\n"
        ),
        tests=(f"{PROGRESS_TESTS}::*_r14_*",),
    ),
    Mutant(
        name="a share is of steps, not of seconds",
        rules=(38,),
        file=COMPUTE_SHARE,
        old="charge = seconds / weight\n",
        new="charge = 1.0 / weight\n",
        tests=(f"{SHARE_TESTS}::test_r38_the_*",),
    ),
    Mutant(
        name="what one had to itself is its credit",
        rules=(39,),
        file=COMPUTE_SHARE,
        old="            self._end_contention()\n",
        new="            pass\n",
        tests=(f"{SHARE_TESTS}::test_r39_*",),
    ),
    Mutant(
        name="contention ends while a step is under way",
        rules=(39,),
        file=COMPUTE_SHARE,
        old=(
            "        if not any(account.reservations for account in self._accounts.values()):\n            self._forget"
        ),
        new="        if True:\n            self._forget",
        tests=(f"{SHARE_TESTS}::test_r39_*",),
    ),
    Mutant(
        name="an outlier is paid back in full",
        rules=(40,),
        file=COMPUTE_SHARE,
        old="trailing.charged += max(0.0, ",
        new="trailing.charged += min(0.0, ",
        tests=(f"{SHARE_TESTS}::test_r40_*",),
    ),
    Mutant(
        name="an empty step takes its time",
        rules=(44,),
        file=COMPUTE_SHARE,
        old="            reservations.pop()\n",
        new="            pass\n",
        tests=(f"{SHARE_TESTS}::test_r44_*",),
    ),
    Mutant(
        name="what is under way settles with the new share",
        rules=(44,),
        file=COMPUTE_SHARE,
        old="weight = account.reservations.popleft().weight",
        new="weight = account.reservations.popleft().weight and (self._weight(work) or 1.0)",
        tests=(f"{SHARE_TESTS}::test_r44_*",),
    ),
    Mutant(
        name="a prefill turn runs the decodes as well",
        rules=(42,),
        file=SCHEDULER,
        old="        if work is WorkClass.PREFILL:\n            batch.run_prefills()\n",
        new=(
            "        if work is WorkClass.PREFILL:\n            batch.run_prefills()\n            batch.run_decodes()\n"
        ),
        tests=(f"{PROGRESS_TESTS}::*_r42_*",),
    ),
    Mutant(
        name="all that wait could be computed",
        rules=(43,),
        file=SCHEDULER,
        old=(
            "        could_prefill = self._could_prefill() or any(not candidate.is_restore for candidate in "
            "candidates)\n"
        ),
        new="        could_prefill = self._could_prefill() or len(self.waiting) > 0\n",
        tests=(f"{PROGRESS_TESTS}::*_r43_*",),
    ),
    Mutant(
        name="a decode without a block ends the batch",
        rules=(45,),
        file=BATCH,
        old="            if fits:\n                request.last",
        new=(
            "            if not fits:\n"
            "                self._budget = 0\n"
            "            if fits:\n"
            "                request.last"
        ),
        tests=(f"{PROGRESS_TESTS}::*_r45_*",),
    ),
]
