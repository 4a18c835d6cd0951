"""Mutants: small deliberate faults in the code, each of which must make a test fail.

To add one, append a `Mutant` to the list of its subject in tests/tools/faults:

    Mutant(
        name="expiry: the bound is passed unseen",
        rules=(48,),
        file="kvtier/restore.py",
        old="if elapsed >= bound:",
        new="if elapsed > bound:",
        tests=("tests/core/test_restore.py::test_r48_*",),
    )

* `name` says what goes wrong, after the guard that is taken out if it is one of `GUARDS`.
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

from tests.tools.faults import (
    admin,
    blocks,
    eviction,
    in_place,
    lifetime,
    matches,
    pools,
    progress,
    protocol,
    remote,
    restores,
    server,
    sizes,
    staging,
    turns,
)
from tests.tools.mutation import Mutant

__all__ = ["GUARDS", "MUTANTS", "NO_MUTANT", "Mutant"]

MUTANTS: list[Mutant] = [
    *progress.MUTANTS,
    *blocks.MUTANTS,
    *sizes.MUTANTS,
    *restores.MUTANTS,
    *lifetime.MUTANTS,
    *staging.MUTANTS,
    *remote.MUTANTS,
    *turns.MUTANTS,
    *matches.MUTANTS,
    *eviction.MUTANTS,
    *pools.MUTANTS,
    *in_place.MUTANTS,
    *protocol.MUTANTS,
    *admin.MUTANTS,
    *server.MUTANTS,
]

GUARDS = (
    "at least one token",
    "deferred free",
    "epoch check",
    "escape preemption",
    "expiry",
    "fence",
    "first-decode reservation",
    "head patience",
    "hold-back",
    "pin",
    "poll every step",
    "publish after write",
    "purity of probes",
    "single warning",
)
"""What keeps an engine from stalling or from using the wrong bytes: each has a mutant `guard: what goes wrong`."""

NO_MUTANT: dict[int, str] = {
    6: "its test runs the engine in another process, with asserts off, which the fault does not reach",
}
"""Rules that no fault can be put in for, and why."""
