"""Every rule has a test that names it and a mutant that such a test kills, or a reason for having none."""

from __future__ import annotations

import pytest

from tests.tools.mutant_list import GUARDS, MUTANTS, Mutant
from tests.tools.rules import TABLE, NamedRules, find_problems, read_rules, rules_of

RULES = {1: "one holds", 2: "two hold"}
TESTS = {1: ["tests/test_a.py::test_r1_is"], 2: ["tests/test_a.py::test_r2_is"]}


def mutant(*rules: int) -> Mutant:
    return Mutant("fault", rules, "a.py", "old", "new", ("tests/test_a.py",))


def test_the_table_has_each_rule_once_and_in_order() -> None:
    assert list(read_rules(TABLE.read_text())) == list(range(1, 83))


def test_a_rule_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        read_rules("| R1 | holds |\n| R1 | holds too |\n")


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("tests/test_a.py::test_r48_the_bound_is_kept", {48}),
        ("tests/test_a.py::test_r41_r45_no_turn_is_lost[r7-2]", {41, 45}),
        ("test_invariant_7_r21_a_prompt", {21}),
        ("tests/test_r3.py::TestR4::test_r5", {5}),
        ("test_for2_rank_r0_or_r1x", set()),
        ("tests/test_a.py::helper_r1_is_no_test", set()),
    ],
)
def test_names_name_rules(name: str, rules: set[int]) -> None:
    assert rules_of(name) == rules


def test_a_test_counts_once_for_all_its_parameters() -> None:
    named = NamedRules()
    named.add(["tests/test_a.py::test_r1_r2_is[1]", "tests/test_a.py::test_r1_r2_is[2]", "tests/test_a.py::test_else"])
    assert named.tests == {1: ["tests/test_a.py::test_r1_r2_is"], 2: ["tests/test_a.py::test_r1_r2_is"]}


def test_nothing_is_missing_where_each_rule_has_a_test_and_a_mutant_or_a_reason() -> None:
    assert find_problems(RULES, TESTS, [mutant(1, 2)], {}) == []
    assert find_problems(RULES, TESTS, [mutant(1)], {2: "is a statement about documents"}) == []


def test_what_is_missing_is_named() -> None:
    assert find_problems(RULES, {1: TESTS[1]}, [mutant(2)], {}) == [
        "R1 has no mutant, and no reason is given",
        "R2 has no test",
    ]
    assert find_problems(RULES, TESTS, [mutant(1)], {2: ""}) == ["R2 has no mutant, and no reason is given"]


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_has_a_mutant_of_its_name(guard: str) -> None:
    assert any(mutant.name.startswith(f"{guard}: ") for mutant in MUTANTS)


def test_what_is_out_of_date_is_named() -> None:
    assert find_problems(RULES, TESTS | {3: ["test_r3_x"]}, [mutant(1, 2, 4)], {2: "none", 5: "none"}) == [
        "R3 is named by test_r3_x but is no rule",
        "R4 is broken by mutant 'fault' but is no rule",
        "R5 has a reason for having no mutant but is no rule",
        "R2 has a mutant and a reason for having none",
    ]


def test_every_mutant_stands_in_a_file_of_the_packages() -> None:
    tops = {mutant.file.partition("/")[0] for mutant in MUTANTS}
    assert tops <= {"kvtier", "connectors", "engine_adapter", "kernels"}


def test_every_rule_has_a_test_and_a_mutant(request: pytest.FixtureRequest) -> None:
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    assert terminal is not None
    is_whole = request.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not terminal.stats.get("deselected")
    if not is_whole:
        pytest.skip("only a run of all tests has those of every rule; make rules collects them")
    named = NamedRules()
    named.add(item.nodeid for item in request.session.items)
    problems = "\n".join(find_problems(read_rules(TABLE.read_text()), named.tests))
    assert not problems, problems
