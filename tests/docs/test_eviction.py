"""docs/eviction.md: its table is the benchmark's, its example a policy that works; the traces are what they say."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import eviction_policies
from benchmarks.eviction_policies import PARTS, POLICIES, Kept, Tier, optimum, replay
from benchmarks.traces import TRACES, Trace
from kvtier.config import Settings
from kvtier.policy import BUILT_IN, POLICY_GROUP, EvictionPolicy, TailsFirstLRU
from kvtier.testing.policy_conformance import PolicyConformance

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/eviction.md").read_text()
DATA = ROOT / "benchmarks/data"


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_names_its_command() -> None:
    assert f"    python -m {eviction_policies.__name__}\n" in TEXT
    assert f"python -m {eviction_policies.__name__} " in str(eviction_policies.__doc__)
    assert "$(BIN)/python -m benchmarks.eviction_policies\n" in (ROOT / "Makefile").read_text()


def test_the_table_has_every_cell() -> None:
    for name in TRACES:
        _, found, rest = TEXT.partition(f"\n**{name}**: ")
        assert found
        rows = re.findall(r"^\| (\d+)% \| (.*) \|$", rest.split("\n\n**")[0], re.MULTILINE)
        assert [int(part) for part, _ in rows] == [round(100 * part) for part in PARTS]
        assert all(len(cells.split(" | ")) == len(POLICIES) + 1 for _, cells in rows)


def test_the_table_is_what_the_benchmark_finds() -> None:
    """One line of it, which takes a second."""
    trace = TRACES["synthetic"]()
    num_slots = round(0.02 * trace.num_unique)
    kept = [replay(trace, num_slots, make()) for make in POLICIES.values()] + [optimum(trace, num_slots)]
    cells = " | ".join(f"{each.hits / len(trace.ids):.1%} ({each.written / len(trace.ids):.1%})" for each in kept)
    assert f"| 2% | {cells} |" in TEXT.partition("**synthetic**")[2]


def test_the_default_is_the_one_that_was_chosen() -> None:
    default = Settings().host.policy
    assert default in BUILT_IN
    assert f'`host.policy = "{default}"`, the default' in TEXT
    assert f"**{default} is the default.**" in TEXT
    assert all(f'`host.policy = "{name}"`' in TEXT for name in BUILT_IN)


# ---- the example -----------------------------------------------------------------------------------------------------


def example() -> type[TailsFirstLRU]:
    """What the text defines."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "policies.py"
        script.write_text(code("python")[0])
        scope = runpy.run_path(str(script))
    made: type[TailsFirstLRU] = scope["TailsFirstFIFO"]
    assert issubclass(made, TailsFirstLRU)
    return made


class TestTheExample(PolicyConformance):
    policy_class = example()

    def make_policy(self) -> EvictionPolicy:
        return self.policy_class()


def test_the_example_is_first_in_first_out() -> None:
    policy = example()()
    for slot in range(4):
        policy.insert(slot, 1 if slot == 3 else -1, slot)
    policy.touch([0])
    gone = []
    while (victim := policy.victim(lambda slot: True)) is not None:
        policy.remove(victim)
        gone.append(victim)
    assert gone == [0, 2, 3, 1]


def test_the_group_and_the_conformance_suite_are_named() -> None:
    assert f'[project.entry-points."{POLICY_GROUP}"]' in code("toml")[0]
    assert PolicyConformance.__module__ in code("python")[1]


# ---- the traces ------------------------------------------------------------------------------------------------------


def test_the_traces_are_those_that_are_described() -> None:
    text = (DATA / "README.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| `([0-9a-f]{64})` \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == {path.name for path in DATA.glob("*.gz")}
    for name, size, digest in rows:
        content = (DATA / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (int(size), digest)
    for name in ("conversation", "synthetic"):
        unpacked = gzip.decompress((DATA / f"mooncake_{name}.jsonl.gz").read_bytes())
        assert f"{name} `{hashlib.sha256(unpacked).hexdigest()}`" in text.replace("\n", " ")
    assert "Apache License 2.0" in text


def test_a_block_stands_for_its_whole_prefix() -> None:
    trace = TRACES["synthetic"]()
    before: dict[int, int] = {}
    for prompt in trace.prompts():
        for above, block in zip([-1, *prompt], prompt, strict=False):
            assert before.setdefault(block, above) == above
    assert (len(trace.ends), trace.num_unique) == (3993, 40148)


# ---- the replay ------------------------------------------------------------------------------------------------------


def small_trace(seed: int) -> Trace:
    """Six prompts over a tree of seven blocks."""
    rng = random.Random(seed)
    paths = [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5], [4, 5, 6]]
    return Trace("small", (rng.choice(paths) for _ in range(6)))


def best_of_all(trace: Trace, num_slots: int) -> int:
    """The most hits, tried out: after each use of a block any of what is resident may stay, the block itself or not."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in trace.prompts():
        runs = {(resident, True): hits for resident, hits in states.items()}
        for block in prompt:
            runs = step(runs, block, num_slots)
        states = {}
        for (resident, _), hits in runs.items():
            states[resident] = max(hits, states.get(resident, 0))
    return max(states.values())


Runs = dict[tuple[frozenset[int], bool], int]


def step(runs: Runs, block: int, num_slots: int) -> Runs:
    after: Runs = {}
    for (resident, is_leading), hits in runs.items():
        is_hit = is_leading and block in resident
        for kept in subsets(resident | {block}, num_slots):
            found = (kept, is_hit)
            after[found] = max(hits + is_hit, after.get(found, 0))
    return after


def subsets(blocks: frozenset[int], size: int) -> Iterator[frozenset[int]]:
    if len(blocks) <= size:
        yield blocks
    else:
        for block in blocks:
            yield from subsets(blocks - {block}, size)


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_the_most_that_any_choice_reaches(seed: int) -> None:
    trace = small_trace(seed)
    for num_slots in (1, 2, 3):
        best = optimum(trace, num_slots)
        assert best.hits == best_of_all(trace, num_slots)
        assert all(replay(trace, num_slots, make()).hits <= best.hits for make in POLICIES.values())


def test_only_the_leading_run_counts_and_no_prompt_evicts_its_own_blocks() -> None:
    tier = Tier(3, 10, TailsFirstLRU())
    tier.serve([0, 1, 2, 3])
    assert (tier.hits, tier.written) == (0, 3)
    tier.serve([0, 1, 2, 3])
    assert (tier.hits, tier.written) == (3, 3)
    tier.serve([4])
    tier.serve([0, 1, 2])
    assert (tier.hits, tier.written) == (5, 5), "4 took 2's place, and 2 took 4's"


def test_a_tier_that_holds_all_writes_each_block_once() -> None:
    trace = small_trace(1)
    for make in POLICIES.values():
        assert replay(trace, 10, make()) == Kept(len(trace.ids) - trace.num_unique, trace.num_unique)
