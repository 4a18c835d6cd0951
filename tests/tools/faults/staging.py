"""From the tiers to host memory; the rules speak of it where requests wait for it."""

from __future__ import annotations

from tests.tools.mutation import Mutant

STAGE = "kvtier/stage.py"

STAGING_TESTS = "tests/core/test_staging.py"

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
        file="kvtier/readqueue.py",
        old="            if under_way is not None and (",
        new="            if False and (",
        tests=(f"{STAGING_TESTS}::test_stages_share_a_read_*",),
    ),
    Mutant(
        name="what a step overwrites is waited for, and dropped all the same",
        rules=(),
        file="connectors/kvtier_connectors/storing.py",
        old="if copying is not None and not copying.is_fenced:",
        new="if copying is not None:",
        tests=("tests/connectors/test_storing.py",),
    ),
    Mutant(
        name="a copy that began before is not waited for",
        rules=(),
        file="connectors/kvtier_connectors/storing.py",
        old="        for job_id, job in self._jobs.items():\n            fenced",
        new="        for job_id, job in [(new.job_id, self._jobs[new.job_id]) for new in jobs]:\n            fenced",
        tests=("tests/connectors/test_storing.py",),
    ),
]
