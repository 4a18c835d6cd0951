"""Whose turn it is to be staged, and what is kept in host memory for those that wait."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ARRIVING = "connectors/kvtier_connectors/arriving.py"
SCHEDULER = "connectors/kvtier_connectors/scheduler.py"
TURNS = "connectors/kvtier_connectors/turns.py"

TESTS = ("tests/connectors/test_restoring.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="turns: time counts though others go first",
        rules=(),
        file=TURNS,
        old="        elif self._has_stopped:\n",
        new="        elif False:\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: no time counts though the engine computes nothing",
        rules=(),
        file=TURNS,
        old="return self.is_held and self.is_engine_busy",
        new="return self.is_held",
        tests=TESTS,
    ),
    Mutant(
        name="turns: time before and after the others' counts no more than theirs",
        rules=(),
        file=TURNS,
        old="            arrival.held_s = self._held_s\n            self._waiting.add",
        new="            self._waiting.add",
        tests=TESTS,
    ),
    Mutant(
        name="turns: a later one keeps what an earlier one needs",
        rules=(),
        file=ARRIVING,
        old="if kept.order < arrival.order or num_kept >= num_over:",
        new="if True:",
        tests=TESTS,
    ),
    Mutant(
        name="turns: an earlier one lets go of what is kept for it",
        rules=(),
        file=ARRIVING,
        old="if kept.order < arrival.order or num_kept >= num_over:",
        new="if num_kept >= num_over:",
        tests=TESTS,
    ),
    Mutant(
        name="turns: a later one lets go of what helps nobody",
        rules=(),
        file=ARRIVING,
        old="            if num_kept < num_over:\n",
        new="            if not later:\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: an urgent one waits behind those that came before",
        rules=(),
        file=SCHEDULER,
        old="order = (request.options.priority, next(self._orders))",
        new="order = (0, next(self._orders))",
        tests=TESTS,
    ),
    Mutant(
        name="turns: who comes to be the first is not looked at",
        rules=(),
        file=ARRIVING,
        old="self._is_full = self._is_full and self._pending.first is not arrival",
        new="pass",
        tests=TESTS,
    ),
    Mutant(
        name="turns: what was found at arrival is staged whenever its turn comes",
        rules=(),
        file=ARRIVING,
        old="            if self._decision.refresh_due(arrival.episode):\n                self._decision.refreshing",
        new="            if False:\n                self._decision.refreshing",
        tests=TESTS,
    ),
    Mutant(
        name="host memory gives up what it has for one that waits",
        rules=(),
        file=ARRIVING,
        old="is_held = len(self._space.lease(digests, owner)) == len(digests)",
        new="is_held = False",
        tests=TESTS,
    ),
]
