"""List each row of docs/field-bugs.md with the tests that cite it; fail when a row that must have one has none."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import NamedTuple

import pytest

from tests.tools.collecting import ROOT, collect

TABLE = ROOT / "docs" / "field-bugs.md"
PARTS = {
    "ranks": "several ranks of one engine",
}


class Row(NamedTuple):
    id: str
    kit: str
    covers: str
    source: str
    symptom: str
    right: str
    scenario: str


class CitedBugs:
    """A pytest plugin that gathers, from collected tests, bug id to the tests marked with it."""

    def __init__(self) -> None:
        self.tests: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            test = item.nodeid.partition("[")[0]
            for bug in dict.fromkeys(bug for marker in item.iter_markers("bug") for bug in marker.args):
                if test not in self.tests[bug]:
                    self.tests[bug].append(test)


def read_rows(text: str) -> list[Row]:
    """The rows of every table in the document, in its order."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-Z]{2}\d\d", cells[0]):
            rows.append(Row(*cells))
    return rows


def main() -> None:
    rows = read_rows(TABLE.read_text())
    cited = CitedBugs()
    collect(cited)
    tests = cited.tests
    problems = [
        f"{bug} is cited by {', '.join(tests[bug])} but is no row" for bug in tests.keys() - {r.id for r in rows}
    ]
    for row in rows:
        print(f"{row.id}  {row.kit:<5}  {row.symptom}")
        for test in tests.get(row.id, []):
            print(f"         {test}")
        if row.id in tests:
            continue
        if row.covers == "now":
            problems.append(f"{row.id} has no test: {row.scenario}")
            print("         no test")
        else:
            print(f"         later: {PARTS[row.covers]}")
    print(f"\n{len(rows)} rows, {sum(row.id in tests for row in rows)} with tests", flush=True)
    if problems:
        sys.exit("\n".join(sorted(problems)))


if __name__ == "__main__":
    main()
