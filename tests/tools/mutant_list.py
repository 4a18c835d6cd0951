"""Mutants: small deliberate faults in the code, each of which must make a test fail.

To add one, append a `Mutant` to `MUTANTS`:

    Mutant(
        name="the bound expires late",
        rules=(48,),
        file="kvtier/restore.py",
        old="if elapsed >= bound:",
        new="if elapsed > bound:",
        tests=("tests/core/test_restore.py",),
    )

* `old` must stand in the file exactly once, or the mutant is out of date: take enough of the line, or several lines,
  indentation included. `new` must still parse, and fail by behaviour: NameError and ImportError are no kill.
* `tests` are files, or `file::pattern` with a shell pattern over test names (no parameters): `*` and `?` stand for
  what they usually do. Of a bare file the tests that name one of the mutant's rules run, or all if it has none.
* For each of `rules` a test that names it (`test_r48_...`) must fail. A mutant without rules must make any test fail.
* The fault is there in the process that runs the tests. Tests that start other processes do not see it.
* A test that hangs counts, once it is stopped by its time limit; it makes the run slow, so prefer a fault that ends.

`python -m tests.tools.mutants NAME...` runs those whose names contain one of the words, and with `-v` says what each
failing test said. `make mutants` runs all. Rules that no fault of ours can break go into `NO_MUTANT` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`, and for each of `rules` one of `tests` that names it must fail."""

    name: str
    rules: tuple[int, ...]
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError when it is out of date, or is no Python."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"mutant out of date: what it replaces stands {found} times in {self.file}: {self.old!r}")
        mutated = text.replace(self.old, self.new)
        try:
            compile(mutated, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"not Python with this mutant: {self.file}: {error}") from error
        return mutated


POOL = "engine_adapter/kvtier_engine/block_pool.py"
POOL_TESTS = ("tests/engine/test_block_pool.py",)
LANDING = "connectors/kvtier_connectors/landing.py"
LANDING_TESTS = ("tests/connectors/test_landing.py",)
STAGE = "kvtier/stage.py"
STAGING = "kvtier/staging.py"

MUTANTS: list[Mutant] = [
    # ---- the engine's blocks
    Mutant(
        name="a reused block keeps its digest",
        rules=(22,),
        file=POOL,
        old="            self._refs[block_id] = 1\n            self._forget(block_id)\n",
        new="            self._refs[block_id] = 1\n",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="a twin is not shared",
        rules=(23,),
        file=POOL,
        old="                return twin\n",
        new="                return block_id\n",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="equal digests match whatever their tokens",
        rules=(24,),
        file=POOL,
        old=" or content.parent != parent or content.tokens != tokens_of(index):",
        new=":",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="prefixes are reused before tails",
        rules=(29,),
        file=POOL,
        old="for block_id in reversed(block_ids):",
        new="for block_id in block_ids:",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="probing forgets",
        rules=(17,),
        file=POOL,
        old="            parent = content.node\n",
        new="            parent = content.node\n            self.queue_version += 1\n",
        tests=POOL_TESTS,
    ),
    Mutant(
        name="pinned blocks are handed out",
        rules=(),
        file=POOL,
        old="            if not self._pins[block_id]:\n                taken.append(block_id)",
        new="            taken.append(block_id)",
        tests=("tests/engine/test_block_pool.py::test_pinned_blocks_are_passed_over",),
    ),
    # ---- landing
    Mutant(
        name="a landing counts every verdict, not the prefix",
        rules=(63,),
        file=LANDING,
        old="[*landing.copied, False].index(False)",
        new="sum(landing.copied)",
        tests=LANDING_TESTS,
    ),
    Mutant(
        name="destinations are unpinned while copies write them",
        rules=(71,),
        file=LANDING,
        old="        self._pin(landing)\n        self._num_copying",
        new="        self._num_copying",
        tests=LANDING_TESTS,
    ),
    Mutant(
        name="a reset lets what was under way land",
        rules=(76,),
        file=LANDING,
        old="0 if is_void else [*",
        new="[*",
        tests=LANDING_TESTS,
    ),
    # ---- staging
    Mutant(
        name="a stage has no deadline",
        rules=(),
        file=STAGE,
        old="if not self._begun_at <= now < self._deadline:",
        new="if not self._begun_at <= now:",
        tests=("tests/core/test_staging.py::test_at_its_deadline_*",),
    ),
    Mutant(
        name="a block behind a failed one counts",
        rules=(),
        file=STAGE,
        old="self._end, self._miss = index, read.failure",
        new="self._miss = read.failure",
        tests=("tests/core/test_staging.py::test_a_block_that_fails_*",),
    ),
    Mutant(
        name="each stage reads for itself",
        rules=(),
        file=STAGING,
        old="            if under_way is not None:\n",
        new="            if False:\n",
        tests=("tests/core/test_staging.py::test_stages_share_a_read_*",),
    ),
]

NO_MUTANT: dict[int, str] = {}
"""Rules that no fault can be put in for, and why."""
