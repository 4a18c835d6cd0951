"""Run the tests of every mutant on mutated code, and fail unless each of them makes a test fail.

First the tests run on the code as it is, and must pass. Each run is a forked child of this process, which has imported
pytest and what is slow to import, and nothing of the packages; see tests/tools/mutant_run.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.tools.collecting import ROOT
from tests.tools.mutant_list import MUTANTS, Mutant
from tests.tools.mutant_run import PROFILE, Report, matches, run_child
from tests.tools.rules import rules_of

NUM_WORKERS = 2
SLOW_IMPORTS = (
    "hypothesis.stateful",
    "numpy",
    "torch",
    "pydantic.main",
    "pydantic.config",
    "prometheus_client",
    "lz4.frame",
    "xxhash",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. test: for one test on mutated code. run: for all tests of a mutant; what has not ended then has not
    killed it, since a test must end by itself. control: for all tests of one file."""

    test: float = 20.0
    run: float = 90.0
    control: float = 300.0


@dataclass(frozen=True, slots=True)
class Run:
    """A child's work: these mutants' tests, with the fault of the only one put in or with none.

    timeout_s, test_timeout_s: what all of it may take, and one test.
    """

    mutants: tuple[Mutant, ...]
    is_mutated: bool
    timeout_s: float
    test_timeout_s: float


@dataclass(slots=True)
class Child:
    run: Run
    process: ForkProcess
    folder: Path
    begun_at: float


@dataclass(frozen=True, slots=True)
class Ended:
    run: Run
    report: Report
    output: str
    seconds: float


def preload(names: Iterable[str]) -> None:
    """Import what children need, and give hypothesis a profile: few examples, always the same, none kept."""
    from hypothesis import HealthCheck, Phase, settings

    for name in names:
        with contextlib.suppress(ImportError):  # of an extra: whose tests are skipped without it
            importlib.import_module(name)
    settings.register_profile(
        PROFILE,
        deadline=None,
        database=None,
        derandomize=True,
        max_examples=25,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def run_all(root: Path, runs: Iterable[Run]) -> Iterator[Ended]:
    """Each run's end, in the order in which they end; NUM_WORKERS at a time."""
    waiting = list(reversed(list(runs)))
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as top:
        try:
            while waiting or children:
                while waiting and len(children) < NUM_WORKERS:
                    children.append(begin(root, waiting.pop(), Path(tempfile.mkdtemp(dir=top))))
                wait([child.process.sentinel for child in children], timeout=0.5)
                for child in [child for child in children if is_over(child)]:
                    children.remove(child)
                    yield end(child)
        finally:
            for child in children:
                kill(child)


def begin(root: Path, run: Run, folder: Path) -> Child:
    arguments = (root, run.mutants, run.is_mutated, folder, run.test_timeout_s)
    process = multiprocessing.get_context("fork").Process(target=run_child, args=arguments)
    process.start()
    return Child(run, process, folder, time.monotonic())


def is_over(child: Child) -> bool:
    return not child.process.is_alive() or time.monotonic() - child.begun_at > child.run.timeout_s


def kill(child: Child) -> None:
    """It and all that its tests started."""
    assert child.process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.kill()
    child.process.join()


def end(child: Child) -> Ended:
    was_alive = child.process.is_alive()
    kill(child)
    seconds = time.monotonic() - child.begun_at
    answer = child.folder / "answer.json"
    report = Report(**json.loads(answer.read_text())) if answer.exists() else Report()
    if not report.is_complete:
        how = f"did not end within {child.run.timeout_s:g} s" if was_alive else f"ended with {child.process.exitcode}"
        report.broken.append(f"the run {how}")
    output = "".join(path.read_text(errors="replace") for path in child.folder.glob("output.txt"))
    shutil.rmtree(child.folder, ignore_errors=True)
    return Ended(child.run, report, output, seconds)


# ---- what it means -----------------------------------------------------------------------------------------------


def find_out_of_date(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    problems = []
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        if names.count(mutant.name) > 1:
            problems.append(f"{mutant.name}: two mutants have this name")
        try:
            mutant.source((root / mutant.file).read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{mutant.name}: {error}")
    return problems


def control_runs(mutants: Sequence[Mutant], limit_s: float) -> list[Run]:
    """The tests of all mutants, each once: a run for each of their files."""
    files = dict.fromkeys(spec.partition("::")[0] for mutant in mutants for spec in mutant.tests)
    return [Run(tuple(of_file(mutants, f)), is_mutated=False, timeout_s=limit_s, test_timeout_s=limit_s) for f in files]


def of_file(mutants: Sequence[Mutant], file: str) -> Iterator[Mutant]:
    for mutant in mutants:
        if specs := tuple(spec for spec in mutant.tests if spec.partition("::")[0] == file):
            yield replace(mutant, tests=specs)


def find_control_problems(mutants: Sequence[Mutant], ends: Sequence[Ended]) -> list[str]:
    """Why the tests say nothing about mutants: they fail without one, or do not exist."""
    problems = [f"{test} fails without any mutant: {said}" for e in ends for test, said in e.report.failed.items()]
    problems += [f"{e.output[-2000:]}{broken}" for e in ends for broken in e.report.broken]
    if problems:
        return problems
    selected = [test for e in ends for test in e.report.selected]
    return [problem for mutant in mutants for problem in find_untested(mutant, selected)]


def find_untested(mutant: Mutant, selected: Sequence[str]) -> Iterator[str]:
    named: set[int] = set()
    for spec in mutant.tests:
        tests = [test for test in selected if matches(mutant, spec, test)]
        if not tests:
            yield f"{mutant.name}: {spec} means no test"
        named = named.union(*map(rules_of, tests))
    for rule in sorted(set(mutant.rules) - named):
        yield f"{mutant.name}: none of its tests names R{rule}"


def verdict(ended: Ended) -> str | None:
    """None if the mutant was killed, else what is wrong."""
    (mutant,) = ended.run.mutants
    report = ended.report
    left = sorted(set(mutant.rules) - report.killed_rules())
    if report.failed and not left:
        return None
    if report.broken:
        return f"broken: {report.broken[0]}"
    if not report.is_imported:
        return f"its tests do not import {mutant.file}"
    survived = " and ".join(f"no test of R{rule}" for rule in left) or "no test"
    return f"survived: {survived} failed"


def row(ended: Ended) -> str:
    (mutant,) = ended.run.mutants
    rules = " ".join(f"R{rule}" for rule in mutant.rules) or "-"
    wrong = verdict(ended)
    test, said = next(iter(ended.report.failed.items()), ("", ""))
    note = " (timeout)" if "pytest-timeout" in said else ""
    outcome = f"KEPT    {wrong}" if wrong else f"killed  {test}{note}"
    return f"{ended.seconds:5.1f} s  {rules:<12} {mutant.name:<56} {outcome}"


def check(mutants: Sequence[Mutant], root: Path, limits: Limits, show: Callable[[Ended], None]) -> list[str]:
    """What is wrong with these mutants or with the tests that should kill them; empty when all are killed."""
    if problems := find_out_of_date(root, mutants):
        return problems
    if problems := find_control_problems(mutants, list(run_all(root, control_runs(mutants, limits.control)))):
        return problems
    runs = [Run((m,), is_mutated=True, timeout_s=limits.run, test_timeout_s=limits.test) for m in mutants]
    for ended in run_all(root, runs):
        show(ended)
        if wrong := verdict(ended):
            problems.append(f"{ended.run.mutants[0].name}: {wrong}")
    return problems


def show_all(ended: Ended) -> None:
    print(row(ended))
    for test, said in ended.report.failed.items():
        print(f"    {test}: {said}")
    if verdict(ended):
        print(ended.output[-4000:], flush=True)


def main(
    arguments: Sequence[str] | None = None,
    mutants: Sequence[Mutant] = MUTANTS,
    root: Path = ROOT,
    limits: Limits = Limits(),
    slow_imports: Sequence[str] = SLOW_IMPORTS,
) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants", description="make tests prove themselves")
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what failing tests said")
    options = parser.parse_args(arguments)
    chosen = [m for m in mutants if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        sys.exit(f"no mutant's name contains {' or '.join(options.words)}")
    begun_at = time.monotonic()
    preload(slow_imports)
    problems = check(chosen, root, limits, show_all if options.verbose else lambda ended: print(row(ended), flush=True))
    print(f"\n{len(chosen)} mutants in {time.monotonic() - begun_at:.0f} s", flush=True)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy and torch are imported, and before the first fork
    main()
