"""Between the tiers and host memory: staging, of which the rules speak where requests wait for it; copies down and
write-behind; how large their jobs are, and what becomes of a job of which a part is lost."""

from __future__ import annotations

from tests.tools.mutation import Mutant

STAGE = "kvtier/stage.py"
BASE = "kvtier/tiers/base.py"
WRITE_BEHIND = "kvtier/writebehind.py"
READ_QUEUE = "kvtier/readqueue.py"
STAGING = "kvtier/staging.py"
FILLING = "kvtier/filling.py"
FENCE = "kvtier/fence.py"
HOST = "kvtier/tiers/host.py"
STORING = "connectors/kvtier_connectors/storing.py"

STAGING_TESTS = "tests/core/test_staging.py"
HOST_TESTS = "tests/core/test_host_tier.py"
WRITE_BEHIND_TESTS = "tests/core/test_writebehind.py"
WRAPPER_TESTS = "tests/core/test_wrappers.py"
STORING_TESTS = "tests/connectors/test_storing.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="a stage has no deadline",
        rules=(),
        file=STAGE,
        old="if not self._begun_at <= now < self._deadline:",
        new="if not self._begun_at <= now:",
        tests=(f"{STAGING_TESTS}::test_at_its_deadline_*",),
    ),
    Mutant(
        name="a block behind a failed one counts",
        rules=(),
        file=STAGE,
        old="self._end, self._miss = index, read.failure",
        new="self._miss = read.failure",
        tests=(f"{STAGING_TESTS}::test_a_block_that_fails_*",),
    ),
    Mutant(
        name="each stage reads for itself",
        rules=(),
        file=READ_QUEUE,
        old="            if under_way is not None and (",
        new="            if False and (",
        tests=(f"{STAGING_TESTS}::test_stages_share_a_read_*",),
    ),
    Mutant(
        name="a larger job takes more blocks than one hold of the lock bears",
        rules=(),
        file=READ_QUEUE,
        old="most // READ_BLOCKS",
        new="READ_BYTES // READ_BLOCKS",
        tests=(f"{STAGING_TESTS}::test_a_larger_job_*",),
    ),
    Mutant(
        name="one thread reads all of a stage",
        rules=(),
        file=READ_QUEUE,
        old="stage._left[source] * stage._nbytes // JOBS_OF_STAGE",
        new="stage._left[source] * stage._nbytes",
        tests=(f"{STAGING_TESTS}::test_a_job_is_as_large_as_*",),
    ),
    Mutant(
        name="a tier in a wrapper reads as any other",
        rules=(),
        file="kvtier/tiers/wrapper.py",
        old="return self._inner.read_bytes(least, share)",
        new="return least",
        tests=(f"{WRAPPER_TESTS}::test_a_wrapper_forwards_*",),
    ),
    Mutant(
        name="a stage leases what is behind a block that failed",
        rules=(),
        file=STAGING,
        old="return read.source, read.failure is None, read.reservation is None",
        new="return read.source, read.reservation is None",
        tests=(f"{STAGING_TESTS}::test_a_block_that_fails_*",),
    ),
    Mutant(
        name="blocks of two tiers are said to come from one",
        rules=(),
        file=STAGING,
        old="return read.source, read.failure is None, read.reservation is None",
        new="return read.failure is None, read.reservation is None",
        tests=(f"{STAGING_TESTS}::test_what_a_job_brought_*",),
    ),
    Mutant(
        name="a stage leases what is behind a block that came and went",
        rules=(),
        file=STAGING,
        old="return read.source, read.failure is None, read.reservation is None",
        new="return read.source, read.failure is None",
        tests=(f"{STAGING_TESTS}::test_nothing_is_leased_behind_*",),
    ),
    Mutant(
        name="a stage leases what is behind a block that became void",
        rules=(),
        file=FILLING,
        old="number = next((i for i, guard in enumerate(guards) if guard is None), len(guards))",
        new="number = len(guards)",
        tests=(f"{STAGING_TESTS}::test_nothing_is_leased_behind_*",),
    ),
    Mutant(
        name="a read that was replaced keeps the name of its block",
        rules=(),
        file=FENCE,
        old="if read.is_replaced:  # since",
        new="if False:  # since",
        tests=(f"{STAGING_TESTS}::test_a_read_that_is_replaced_*",),
    ),
    Mutant(
        name="a job evicts under one hold of the lock whatever it needs",
        rules=(),
        file=FENCE,
        old="stop = start + BLOCKS_AT_ONCE",
        new="stop = len(reads)",
        tests=(f"{STAGING_TESTS}::test_one_hold_of_the_lock_evicts_*",),
    ),
    Mutant(
        name="a listener that raises takes others' blocks along",
        rules=(),
        file="kvtier/tiers/listeners.py",
        old="except Exception:  # it is somebody else's",
        new="except ZeroDivisionError:  # it is somebody else's",
        tests=(f"{STAGING_TESTS}::test_listeners_of_host_memory_*", f"{HOST_TESTS}::test_a_listener_that_raises_*"),
    ),
    Mutant(
        name="blocks without number are committed under one hold of the lock",
        rules=(),
        file=FILLING,
        old="reads = reads[:BLOCKS_AT_ONCE]",
        new="reads = list(reads)",
        tests=(f"{STAGING_TESTS}::test_one_hold_of_the_lock_commits_*",),
    ),
    Mutant(
        name="a block that ended while the one before it was committed waits for ever",
        rules=(),
        file=STAGING,
        old="ready = [late for read in ready for late in read.after]",
        new="ready = []",
        tests=(f"{STAGING_TESTS}::test_a_block_that_ends_while_*",),
    ),
    Mutant(
        name="a guard is kept once its block was told",
        rules=(),
        file=STAGING,
        old="self._pool.release_all([read.guard for read in reads if read.guard is not None])",
        new="pass",
        tests=(f"{STAGING_TESTS}::test_stages_share_a_read_*",),
    ),
    Mutant(
        name="behind a block without a slot others are evicted",
        rules=(),
        file=HOST,
        old="if is_chain and isinstance(outcome, DropReason)",
        new="if False and isinstance(outcome, DropReason)",
        tests=(f"{STAGING_TESTS}::test_behind_a_block_without_a_slot_*", f"{HOST_TESTS}::test_a_batch_is_*"),
    ),
    Mutant(
        name="a slot that came with a block that is here already stays leased",
        rules=(),
        file=HOST,
        old="self._pool.release_all([lease for lease in leases if lease not in kept])",
        new="pass",
        tests=(f"{HOST_TESTS}::test_a_batch_of_slots_*",),
    ),
    Mutant(
        name="what a step overwrites is waited for, and dropped all the same",
        rules=(),
        file=STORING,
        old="if copying is not None and not copying.is_fenced:",
        new="if copying is not None:",
        tests=(STORING_TESTS,),
    ),
    Mutant(
        name="a copy that began before is not waited for",
        rules=(),
        file=STORING,
        old="        for job_id, job in self._jobs.items():\n            fenced",
        new="        for job_id, job in [(new.job_id, self._jobs[new.job_id]) for new in jobs]:\n            fenced",
        tests=(STORING_TESTS,),
    ),
    Mutant(
        name="jobs: a tier of any speed takes all that waits",
        rules=(),
        file=BASE,
        old="return min(max(least, share), self.job_scale * least)",
        new="return max(least, share)",
        tests=(WRITE_BEHIND_TESTS,),
    ),
    Mutant(
        name="jobs: where little waits jobs are smaller than others'",
        rules=(),
        file=BASE,
        old="min(max(least, share), self.job_scale * least)",
        new="min(share, self.job_scale * least)",
        tests=(f"{WRITE_BEHIND_TESTS}::test_a_job_of_a_scaled_*",),
    ),
    Mutant(
        name="jobs: a wrapper makes a fast tier's jobs small",
        rules=(),
        file="kvtier/tiers/wrapper.py",
        old="        self.job_scale = tier.job_scale\n",
        new="",
        tests=(f"{WRAPPER_TESTS}::test_jobs_are_as_large_*",),
    ),
    Mutant(
        name="jobs: a batch at a rate is as large as the tier's",
        rules=(),
        file="kvtier/tiers/throttled.py",
        old="self.job_scale = 1",
        new="self.job_scale = tier.job_scale",
        tests=(f"{WRAPPER_TESTS}::test_jobs_at_a_rate_*",),
    ),
    Mutant(
        name="jobs: the first of a tier's writes takes the share of all",
        rules=(),
        file=WRITE_BEHIND,
        old="self._queued_bytes // self._max_jobs",
        new="self._queued_bytes",
        tests=(f"{WRITE_BEHIND_TESTS}::test_jobs_at_once_*",),
    ),
    Mutant(
        name="jobs: writes to a fast tier are as small as to others",
        rules=(),
        file=WRITE_BEHIND,
        old="most = self._tier.job_bytes(WRITE_BYTES, ",
        new="most = min(WRITE_BYTES, ",
        tests=(f"{WRITE_BEHIND_TESTS}::test_a_job_of_a_scaled_*",),
    ),
    Mutant(
        name="jobs: any number of small blocks is taken under one lock to be written",
        rules=(),
        file=WRITE_BEHIND,
        old="in range(WRITE_BLOCKS):",
        new="in range(WRITE_BYTES):",
        tests=(f"{WRITE_BEHIND_TESTS}::test_a_job_writes_no_more_*",),
    ),
    Mutant(
        name="jobs: blocks that waited too long are looked at without end",
        rules=(),
        file=WRITE_BEHIND,
        old="            for _ in range(WRITE_BLOCKS):\n                if not self._queue or",
        new="            while len(batch) < WRITE_BLOCKS:\n                if not self._queue or",
        tests=(f"{WRITE_BEHIND_TESTS}::test_blocks_that_waited_too_long_count_*",),
    ),
    Mutant(
        name="commit: a call for each block of a copy job",
        rules=(),
        file=STORING,
        old="self._space.commit([item.reservation for item in copied])",
        new="[self._space.commit([item.reservation])[0] for item in copied]",
        tests=(f"{STORING_TESTS}::test_the_blocks_of_a_copy_job_*",),
    ),
    Mutant(
        name="commit: a call for nothing",
        rules=(),
        file=STORING,
        old='self._attempt("commit", self._commit, wanted) if wanted else ()',
        new='self._attempt("commit", self._commit, wanted)',
        tests=(f"{STORING_TESTS}::test_a_job_of_which_nothing_*",),
    ),
    Mutant(
        name="commit: what continues a lost block of its job is found",
        rules=(),
        file=STORING,
        old="""count as reachable
                self._lose(item, why_not)
        are_stored =""",
        new="""count as reachable
                later = [*locals().get("later", ()), (item, why_not)]
        for item, why_not in locals().get("later", ()):
            self._lose(item, why_not)
        are_stored =""",
        tests=(f"{STORING_TESTS}::test_a_block_that_is_lost_*",),
    ),
    Mutant(
        name="commit: what continues a block that is nowhere is found",
        rules=(),
        file="connectors/kvtier_connectors/copies.py",
        old="return None if is_reachable(self.block.parent) else DropReason.ORPHAN",
        new="return None",
        tests=(f"{STORING_TESTS}::test_a_block_that_is_lost_*",),
    ),
    Mutant(
        name="commit: a void block counts as stored",
        rules=(),
        file=STORING,
        old="if isinstance(are_stored, DropReason) or not are_stored[place]:",
        new="if isinstance(are_stored, DropReason):",
        tests=(f"{STORING_TESTS}::test_a_block_that_is_lost_*",),
    ),
    Mutant(
        name="commit: what was reused while it was copied is found",
        rules=(),
        file="connectors/kvtier_connectors/copies.py",
        old="        if self.overtaken:\n            return DropReason.OVERTAKEN\n",
        new="",
        tests=(f"{STORING_TESTS}::test_a_block_that_is_lost_*",),
    ),
    Mutant(
        name="commit: too few answers are taken for the first blocks'",
        rules=(),
        file=STORING,
        old="        if len(are_stored) != len(copied):",
        new="        if False:",
        tests=(f"{STORING_TESTS}::test_a_commit_that_answers_for_too_few_*",),
    ),
    Mutant(
        name="commit: one that raises is taken for a reset",
        rules=(),
        file=STORING,
        old="are_stored if isinstance(are_stored, DropReason) else DropReason.RESET",
        new="DropReason.RESET",
        tests=(f"{STORING_TESTS}::test_a_commit_that_raises_drops_*",),
    ),
]
