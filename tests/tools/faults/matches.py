"""What host memory is believed to hold, and who is told that it holds no more."""

from __future__ import annotations

from tests.tools.mutation import Mutant

KNOWN = "connectors/kvtier_connectors/known.py"
HOST = "kvtier/tiers/host.py"
INDEX = "kvtier/index.py"
STORING = "connectors/kvtier_connectors/storing.py"

KNOWN_TESTS = ("tests/connectors/test_known.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="a match is believed though its blocks have gone",
        rules=(),
        file=KNOWN,
        old="if not run.digests.isdisjoint(islice(reversed(self._gone), num_new)):",
        new="if run.digests.isdisjoint(run.digests) and run.digests:",
        tests=KNOWN_TESTS,
    ),
    Mutant(
        name="a match is believed though more has gone than was noted",
        rules=(),
        file=KNOWN,
        old="if num_new > len(self._gone):",
        new="if num_new < 0:",
        tests=KNOWN_TESTS,
    ),
    Mutant(
        name="a match is believed over a reset",
        rules=(),
        file=KNOWN,
        old="if run.epoch != self._space.digest or not run.first <= first <= run.end:",
        new="if not run.first <= first <= run.end:",
        tests=KNOWN_TESTS,
    ),
    Mutant(
        name="a match is believed of blocks before it",
        rules=(),
        file=KNOWN,
        old="if run.epoch != self._space.digest or not run.first <= first <= run.end:",
        new="if run.epoch != self._space.digest or not first <= run.end:",
        tests=KNOWN_TESTS,
    ),
    Mutant(
        name="who relies on blocks is not told that they were removed",
        rules=(),
        file=HOST,
        old="        self._tell_evicted(gone)\n        return states",
        new="        return states",
        tests=("tests/core/test_host_tier.py::*size_class_may_take*",),
    ),
    Mutant(
        name="blocks that are being filled count as held",
        rules=(),
        file=INDEX,
        old="if not self._num_reserved and all(",
        new="if all(",
        tests=("tests/core/test_index.py",),
    ),
    Mutant(
        name="an engine stops stepping while blocks are due",
        rules=(),
        file=STORING,
        old="return 0 if self._abandoned else len(self._due)",
        new="return 0",
        tests=("tests/connectors/test_storing.py::*has_stores*",),
    ),
    Mutant(
        name="an engine steps for ever for blocks that cannot be copied",
        rules=(),
        file=STORING,
        old="return 0 if self._abandoned else len(self._due)",
        new="return len(self._due)",
        tests=("tests/connectors/test_storing.py::*has_stores*",),
    ),
]
