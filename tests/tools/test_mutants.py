"""The tool that runs mutants: on a package of a few lines, it tells every way of not being killed from being killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.collecting import ROOT
from tests.tools.mutant_list import Mutant
from tests.tools.mutant_run import matches
from tests.tools.mutants import find_out_of_date, find_untested

TINY = """\
import helper

LIMIT = 3

def is_over(n):
    helper.note(n)
    return n >= LIMIT

def unwatched():
    return 1
"""
HELPER = "def note(n):\n    pass\n"
UNUSED = "VALUE = 1\n"
TESTS = """\
import pytest
import tiny

@pytest.fixture
def limit():
    assert tiny.LIMIT == 3
    return tiny.LIMIT

def test_r1_at_the_limit_it_is_over():
    assert tiny.is_over(3)

def test_r2_before_the_limit_it_is_not():
    assert not tiny.is_over(2)

def test_all():
    assert tiny.is_over(3) and not tiny.is_over(2)

def test_with_a_fixture(limit):
    assert limit
"""
BLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    while True: pass"


def fault(name: str, old: str, new: str, test: str = "*", rules: tuple[int, ...] = (), file: str = "tiny.py") -> Mutant:
    return Mutant(name, rules, f"src/{file}", old, new, (f"tests/test_tiny.py::{test}",))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["src"]\n')
    for name, text in (("tiny", TINY), ("helper", HELPER), ("unused", UNUSED)):
        (tmp_path / "src" / f"{name}.py").write_text(text)
    (tmp_path / "tests" / "test_tiny.py").write_text(TESTS)
    return tmp_path


def run(project: Path, *mutants: Mutant) -> subprocess.CompletedProcess[str]:
    """The tool as `make mutants` runs it, in a process of its own that has imported none of the project."""
    code = (
        "from pathlib import Path\n"
        "from tests.tools.mutant_list import Mutant\n"
        "from tests.tools.mutants import Limits, main\n"
        f"main([], {list(mutants)!r}, Path({str(project)!r}), Limits(test=0.5, run=4.0, control=30.0), ())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def rows(output: str) -> dict[str, str]:
    """Mutant to outcome."""
    found = re.findall(r"^ *[\d.]+ s  \S+(?: \S+)* +(\w+) +(killed|KEPT) +(.+)$", output, re.MULTILINE)
    return {name: f"{outcome} {what}" for name, outcome, what in found}


def test_each_outcome_is_told_from_the_others(project: Path) -> None:
    before = {path: path.read_text() for path in sorted(project.rglob("*.py"))}
    ended = run(
        project,
        fault("strict", "n >= LIMIT", "n > LIMIT", "test_r?_*", rules=(1,)),
        fault("both", "n >= LIMIT", "n < LIMIT", "test_r?_*", rules=(1, 2)),
        fault("imported", "pass", "raise KeyError(n)", "test_all", file="helper.py"),
        fault("endless", "return n >= LIMIT", "while True: pass", "test_all"),
        fault("survivor", "return 1", "return 2"),
        fault("half", "n >= LIMIT", "n > LIMIT", "test_r?_*", rules=(1, 2)),
        fault("misspelt", "n >= LIMIT", "n >= LIMTI", "test_all"),
        fault("unimportable", "LIMIT = 3", "LIMIT = 1 / 0", "test_all"),
        fault("setup", "LIMIT = 3", "LIMIT = 4", "test_with_*"),
        fault("elsewhere", "VALUE = 1", "VALUE = 2", file="unused.py"),
        fault("stuck", "return n >= LIMIT", BLOCKED, "test_all"),
    )
    assert ended.returncode == 1, ended.stderr
    found = rows(ended.stdout)
    test = "tests/test_tiny.py::test_"
    assert found.pop("misspelt").startswith(f"KEPT broken: {test}all: NameError: ")
    assert found.pop("unimportable").startswith("KEPT broken: tests/test_tiny.py: ")
    assert found.pop("setup").startswith(f"KEPT broken: {test}with_a_fixture: AssertionError")
    assert found == {
        "strict": f"killed {test}r1_at_the_limit_it_is_over",
        "both": f"killed {test}r1_at_the_limit_it_is_over",
        "imported": f"killed {test}all",
        "endless": f"killed {test}all (timeout)",
        "survivor": "KEPT survived: no test failed",
        "half": "KEPT survived: no test of R2 failed",
        "elsewhere": "KEPT its tests do not import src/unused.py",
        "stuck": "KEPT broken: the run did not end within 4 s",
    }
    told = [line.partition(":")[0] for line in ended.stderr.splitlines() if ": " in line]
    assert set(told) >= {"survivor", "half", "misspelt", "unimportable", "setup", "elsewhere", "stuck"}
    assert {path: path.read_text() for path in before} == before


def test_when_all_are_killed_it_succeeds(project: Path) -> None:
    ended = run(project, fault("strict", "n >= LIMIT", "n > LIMIT", rules=(1,)))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_tests_that_fail_without_a_mutant_say_nothing(project: Path) -> None:
    (project / "src" / "tiny.py").write_text(TINY.replace("LIMIT = 3", "LIMIT = 2"))
    ended = run(project, fault("strict", "n >= LIMIT", "n > LIMIT", "test_r2_*"))
    assert ended.returncode == 1
    assert "test_r2_before_the_limit_it_is_not fails without any mutant" in ended.stderr
    assert rows(ended.stdout) == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n > LIMIT", "n", "out of date: what it replaces stands 0 times in src/tiny.py"),
        ("LIMIT", "n", "out of date: what it replaces stands 2 times"),
        ("n >= LIMIT", "n >=", "not Python"),
    ],
)
def test_a_mutant_that_cannot_be_put_in_is_an_error(project: Path, old: str, new: str, message: str) -> None:
    (problem,) = find_out_of_date(project, [fault("stale", old, new)])
    assert problem.startswith("stale: ")
    assert message in problem


def test_a_mutant_of_a_file_that_is_gone_is_an_error(project: Path) -> None:
    (problem,) = find_out_of_date(project, [fault("stale", "a", "b", file="gone.py")])
    assert "gone.py" in problem


def test_mutants_have_names_of_their_own(project: Path) -> None:
    twins = [fault("twin", "n >= LIMIT", "n > LIMIT"), fault("twin", "return 1", "return 2")]
    assert find_out_of_date(project, twins) == ["twin: two mutants have this name"] * 2


def test_a_mutant_whose_tests_are_none_or_name_no_rule_of_it_is_an_error() -> None:
    selected = ["tests/test_tiny.py::test_r1_x"]
    assert list(find_untested(fault("a", "", "", "test_r1_*", rules=(1,)), selected)) == []
    assert list(find_untested(fault("a", "", "", "test_gone"), selected)) == [
        "a: tests/test_tiny.py::test_gone means no test"
    ]
    assert list(find_untested(fault("a", "", "", "test_r1_x", rules=(1, 2)), selected)) == [
        "a: none of its tests names R2"
    ]


def test_a_bare_file_means_the_tests_of_the_mutants_rules() -> None:
    ruled = Mutant("a", (1, 2), "a.py", "", "", ("tests/test_a.py",))
    free = Mutant("b", (), "a.py", "", "", ("tests/test_a.py",))
    names = [
        "tests/test_a.py::test_r2_x",
        "tests/test_a.py::test_r3_x",
        "tests/test_a.py::test_x",
        "tests/b.py::test_r1",
    ]
    assert [matches(ruled, "tests/test_a.py", name) for name in names] == [True, False, False, False]
    assert [matches(free, "tests/test_a.py", name) for name in names] == [True, True, True, False]
