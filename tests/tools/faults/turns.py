"""Whose turn it is to be staged, and what is kept in host memory for those that wait."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ARRIVING = "connectors/kvtier_connectors/arriving.py"
KEEPING = "connectors/kvtier_connectors/keeping.py"
SCHEDULER = "connectors/kvtier_connectors/scheduler.py"
TURNS = "connectors/kvtier_connectors/turns.py"

TESTS = ("tests/connectors/test_restoring.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="turns: time counts though others go first",
        rules=(),
        file=TURNS,
        old="        elif is_held and self._has_computed:\n",
        new="        elif False:\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: no time counts though the engine computes nothing",
        rules=(),
        file=TURNS,
        old="        elif is_held and self._has_computed:\n",
        new="        elif is_held:\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: an engine that computed once is busy for good",
        rules=(),
        file=TURNS,
        old="self._seen_at, self._has_computed, self._is_held = now, False, is_held",
        new="self._seen_at, self._is_held = now, is_held",
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
        file=KEEPING,
        old="kept.order < arrival.order or num_looked",
        new="True or num_looked",
        tests=TESTS,
    ),
    Mutant(
        name="turns: an earlier one lets go of what is kept for it",
        rules=(),
        file=KEEPING,
        old="kept.order < arrival.order or num_looked",
        new="num_looked",
        tests=TESTS,
    ),
    Mutant(
        name="turns: a later one lets go of what helps nobody",
        rules=(),
        file=KEEPING,
        old="return found if num_freed >= num_over else []",
        new="return found",
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
        file=KEEPING,
        old="is_held = len(self._space.lease(digests, owner)) == len(digests)",
        new="is_held = False",
        tests=TESTS,
    ),
    Mutant(
        name="turns: who is to be computed keeps what it does not go for",
        rules=(),
        file=ARRIVING,
        old="        if arrival.episode.phase is not RestorePhase.READY:\n            self._let_go(arrival)\n",
        new="        if arrival.episode.phase is not RestorePhase.READY:\n            pass\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: who waits to be staged again keeps what its last stage brought",
        rules=(),
        file=ARRIVING,
        old="            self._let_go(arrival)  # of what an attempt before brought; and it may be the first by now\n",
        new="",
        tests=TESTS,
    ),
    Mutant(
        name="turns: nobody is looked at when the first of them ends",
        rules=(),
        file=ARRIVING,
        old="        self._keeper.let_go(arrival)\n        self._is_full = False\n",
        new="        self._keeper.let_go(arrival)\n",
        tests=TESTS,
    ),
    Mutant(
        name="turns: what a tier never gives back holds them",
        rules=(),
        file=ARRIVING,
        old="is_moving = now - self._read_at < STUCK_S",
        new="is_moving = True",
        tests=TESTS,
    ),
    Mutant(
        name="turns: what several share is let go by one of them",
        rules=(),
        file=KEEPING,
        old="num_freed += uses[digest] == self._leased[digest] and digest not in wanted",
        new="num_freed += 1",
        tests=TESTS,
    ),
    Mutant(
        name="turns: the rest of them waits for something else to happen",
        rules=(),
        file=ARRIVING,
        old="        if self._new or self._has_more:\n",
        new="        if self._new:\n",
        tests=TESTS,
    ),
    Mutant(
        name="who lost a prefix waits for something else to happen",
        rules=(67,),
        file="engine_adapter/kvtier_engine/scheduler.py",
        old="next_deadline=-math.inf if self.admission.num_sent_back or is_untold else poll.next_deadline,",
        new="next_deadline=poll.next_deadline,",
        tests=("tests/engine/test_rules_restore.py",),
    ),
]
