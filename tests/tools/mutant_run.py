"""One run of pytest over a mutated source file, or over none: what a child process of tests/tools/mutants.py does.

The fault is put in as the module is imported, and stands in no file and no cache. Nothing of the packages may be
imported before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import pytest

from tests.tools.mutant_list import Mutant
from tests.tools.rules import rules_of

PROFILE = "mutants"
NO_KILL = (NameError, ImportError, SyntaxError)
"""What code that was never right raises, whatever it does wrong: says nothing about the test."""


@dataclass(slots=True)
class Report:
    """What came of a run. Told through a file, since the process may end anywhere."""

    selected: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Test that failed by itself, in their order, and the end of what it said."""
    broken: list[str] = field(default_factory=list)
    """What failed without saying anything about the code: imports, set-ups, names that do not exist."""
    is_imported: bool = False
    is_complete: bool = False

    def killed_rules(self) -> set[int]:
        return {rule for test in self.failed for rule in rules_of(test)}


def matches(mutant: Mutant, spec: str, test: str) -> bool:
    """Whether one of the mutant's `tests` means this test, named by its node id without parameters."""
    file, _, name = test.partition("::")
    spec_file, _, pattern = spec.partition("::")
    if file != spec_file:
        return False
    if pattern:
        return fnmatchcase(name, pattern)
    return not mutant.rules or not rules_of(test).isdisjoint(mutant.rules)


class MutatedLoader(SourceFileLoader):
    """Loads the one module whose source is mutated; nothing of it is cached."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(path.stem, str(path))
        self._source = source
        self.is_loaded = False

    def get_code(self, fullname: str) -> CodeType:
        self.is_loaded = True
        code: CodeType = compile(self._source, self.path, "exec", dont_inherit=True)
        return code


class MutationFinder(MetaPathFinder):
    """Finds the module whose file the loader has another source for; all others are found as ever."""

    def __init__(self, loader: MutatedLoader) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] != Path(self._loader.path).stem:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin != self._loader.path:
            return None
        return spec_from_file_location(
            fullname, self._loader.path, loader=self._loader, submodule_search_locations=spec.submodule_search_locations
        )


class Probe:
    """A pytest plugin: selects the tests of the mutants, and ends the process once its mutant is killed."""

    def __init__(self, mutants: Sequence[Mutant], mutated: MutatedLoader | None, answer: Path) -> None:
        self._mutants = mutants
        self._mutated = mutated
        self._answer = answer
        self.report = Report()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self._is_chosen(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.report.selected = list(dict.fromkeys(map(test_of, chosen)))

    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[Any],
        report: pytest.CollectReport | pytest.TestReport,
    ) -> None:
        assert call.excinfo is not None
        said = f"{call.excinfo.typename}: {call.excinfo.value}".strip()
        is_run = isinstance(report, pytest.TestReport) and report.when != "setup"
        if not is_run or any(isinstance(error, NO_KILL) for error in leaves(call.excinfo.value)):
            self.report.broken.append(f"{node.nodeid}: {said}")
            return
        self.report.failed.setdefault(test_of(node), said)
        if self._is_killed():
            self.end()

    def end(self) -> NoReturn:
        """Write the answer and be gone: what a mutant left open is nobody's concern."""
        self.report.is_imported = self._mutated is not None and self._mutated.is_loaded
        self.report.is_complete = True
        self._answer.write_text(json.dumps(asdict(self.report)))
        sys.stdout.flush()
        os._exit(0)

    def _is_chosen(self, item: pytest.Item) -> bool:
        test = test_of(item)
        return any(matches(mutant, spec, test) for mutant in self._mutants for spec in mutant.tests)

    def _is_killed(self) -> bool:
        if self._mutated is None:
            return False
        return set(self._mutants[0].rules) <= self.report.killed_rules()


def test_of(node: pytest.Item | pytest.Collector) -> str:
    return node.nodeid.partition("[")[0]


def leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]


def run_child(root: Path, mutants: Sequence[Mutant], is_mutated: bool, folder: Path, timeout_s: float) -> None:
    """Run the mutants' tests, with the fault of the first put in if so asked. Does not return.

    folder: an empty one, which gets `answer.json` and `output.txt`.
    """
    os.setpgid(0, 0)  # so that what the tests started can be ended with this process
    with (folder / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(root)
    os.environ["HYPOTHESIS_PROFILE"] = PROFILE
    sys.pycache_prefix = str(folder.parent / "compiled")  # what one run compiled the next need not, whatever is set
    sys.dont_write_bytecode = False
    mutated = None
    if is_mutated:
        path = root / mutants[0].file
        mutated = MutatedLoader(path, mutants[0].source(path.read_text()))
        sys.meta_path.insert(0, MutationFinder(mutated))
    probe = Probe(mutants, mutated, folder / "answer.json")
    files = list(dict.fromkeys(str(root / spec.partition("::")[0]) for mutant in mutants for spec in mutant.tests))
    code = pytest.main([*files, *options(root, folder, timeout_s)], plugins=[probe])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not probe.report.broken:
        probe.report.broken.append(f"pytest ended with {code!r}")
    probe.end()


def options(root: Path, folder: Path, timeout_s: float) -> list[str]:
    return [
        f"--rootdir={root}",
        f"--basetemp={folder / 'tmp'}",
        f"--timeout={timeout_s}",
        "--override-ini=faulthandler_timeout=0",
        "--hypothesis-seed=0",
        "--quiet",
        "-pno:cacheprovider",
        "-pno:anyio",  # of no use here, and slow to import
        "-Wignore::pytest.PytestAssertRewriteWarning",
    ]
