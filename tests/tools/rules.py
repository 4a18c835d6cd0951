"""List each rule of docs/rules.md with the tests that name it and the mutants that break it; fail when one has none."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.tools.collecting import ROOT, collect
from tests.tools.mutant_list import MUTANTS, NO_MUTANT, Mutant

TABLE = ROOT / "docs" / "rules.md"


def read_rules(text: str) -> dict[int, str]:
    """Rule to what holds, from every table in the document, in its order."""
    rows = re.findall(r"^\| R(\d+) \| (.+) \|$", text, re.MULTILINE)
    rules = {int(number): claim for number, claim in rows}
    if len(rules) < len(rows):
        raise ValueError("a rule stands twice in the table")
    return rules


def rules_of(test: str) -> set[int]:
    """The rules that a test's name names, as in `test_r41_r45_...`. test: its node id, or its name alone."""
    name = test.partition("[")[0].rpartition("::")[2]
    return {int(number) for number in re.findall(r"_r([1-9]\d*)(?=_|$)", name)} if name.startswith("test_") else set()


class NamedRules:
    """A pytest plugin that gathers, from collected tests, rule to the tests that name it."""

    def __init__(self) -> None:
        self.tests: defaultdict[int, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.add(item.nodeid for item in session.items)

    def add(self, node_ids: Iterable[str]) -> None:
        for test in dict.fromkeys(node_id.partition("[")[0] for node_id in node_ids):
            for rule in sorted(rules_of(test)):
                self.tests[rule].append(test)


def find_problems(
    rules: Mapping[int, str],
    tests: Mapping[int, Sequence[str]],
    mutants: Iterable[Mutant] = MUTANTS,
    reasons: Mapping[int, str] = NO_MUTANT,
) -> list[str]:
    """What is missing, one line each: a rule without a test, or with neither a mutant nor a reason for having none."""
    mutants = list(mutants)
    broken = {rule for mutant in mutants for rule in mutant.rules}
    problems = [f"R{rule} is named by {', '.join(tests[rule])} but is no rule" for rule in tests.keys() - rules.keys()]
    problems += [
        f"R{rule} is broken by mutant {mutant.name!r} but is no rule"
        for mutant in mutants
        for rule in mutant.rules
        if rule not in rules
    ]
    problems += [f"R{rule} has a reason for having no mutant but is no rule" for rule in reasons.keys() - rules.keys()]
    for rule in rules:
        if not tests.get(rule):
            problems.append(f"R{rule} has no test")
        if rule in broken and rule in reasons:
            problems.append(f"R{rule} has a mutant and a reason for having none")
        elif rule not in broken and not reasons.get(rule):
            problems.append(f"R{rule} has no mutant, and no reason is given")
    return problems


def print_rule(rule: int, claim: str, tests: Sequence[str]) -> None:
    print(f"R{rule}  {claim}")
    for line in tests or ["no test"]:
        print(f"       {line}")
    for mutant in MUTANTS:
        if rule in mutant.rules:
            print(f"         mutant: {mutant.name}")
    if rule in NO_MUTANT:
        print(f"         no mutant: {NO_MUTANT[rule]}")


def main() -> None:
    rules = read_rules(TABLE.read_text())
    named = NamedRules()
    collect(named)
    for rule, claim in rules.items():
        print_rule(rule, claim, named.tests.get(rule, []))
    tested = sum(bool(named.tests.get(rule)) for rule in rules)
    print(f"\n{len(rules)} rules, {tested} with tests, {len(MUTANTS)} mutants", flush=True)
    if problems := find_problems(rules, named.tests):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
