"""SamplingParams are checked at construction; a Sampler's draws depend on its seed and its logits alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_engine.sampling import Sampler, SamplingParams

torch = pytest.importorskip("torch")

PROBABILITIES = [0.05, 0.5, 0.15, 0.3]


def logits(probabilities: list[float] = PROBABILITIES) -> Any:
    return torch.tensor(probabilities).log()


def draws(sampler: Sampler, count: int, scores: Any = None) -> list[int]:
    scores = logits() if scores is None else scores
    return [sampler.draw(scores) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "8"),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", "\n"),
        ("stop", ("",)),
        ("stop", ["x"]),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", [1]),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_setting_is_named_with_its_value(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**settings)
    assert f"SamplingParams.{name} " in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_edges_of_each_range_are_accepted() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_p=1, seed=0, stop=("a",), stop_token_ids=(0,), ignore_eos=True)
    SamplingParams(max_tokens=None, temperature=100, top_p=1e-9, seed=2**64 - 1)
    SamplingParams(max_tokens=0)
    SamplingParams(max_tokens=-1)


def test_importing_the_light_modules_does_not_import_torch() -> None:
    modules = "kvtier_engine.sampling, kvtier_engine.runner, kvtier_engine.weights, kvtier_engine.tokenizer"
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, {modules}; sys.exit(str(found) if (found := {heavy}) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_temperature_0_takes_the_likeliest_token() -> None:
    assert draws(Sampler(SamplingParams(top_p=0.1, seed=3)), 5) == [1] * 5


def test_equal_seeds_give_equal_draws_and_others_do_not() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    first, again = Sampler(params), Sampler(params)
    other = Sampler(SamplingParams(temperature=1.0, seed=8))
    assert draws(first, 50) == draws(again, 50)
    assert draws(first, 50) != draws(other, 50)


def test_without_a_seed_two_samplers_differ() -> None:
    params = SamplingParams(temperature=1.0)
    assert draws(Sampler(params), 50) != draws(Sampler(params), 50)


def test_draws_do_not_depend_on_batch_mates_or_on_the_global_generator() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    alone = draws(Sampler(params), 40)

    sampler, mate = Sampler(params), Sampler(SamplingParams(temperature=2.0, seed=9))
    state = torch.get_rng_state()
    mixed = []
    for _ in range(40):
        torch.rand(3)
        mate.draw(logits())
        mixed.append(sampler.draw(logits()))
    assert mixed == alone
    torch.set_rng_state(state)
    draws(sampler, 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-6, {1}), (0.5, {1}), (0.51, {1, 3}), (0.79, {1, 3}), (0.81, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=1))
    assert set(draws(sampler, 400)) == kept


@pytest.mark.parametrize("top_p", [1.0, 0.999999])
def test_frequencies_follow_the_probabilities(top_p: float) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=5))
    drawn = draws(sampler, 4000)
    for token, probability in enumerate(PROBABILITIES):
        assert drawn.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    cold = draws(Sampler(SamplingParams(temperature=0.25, seed=5)), 1000)
    hot = draws(Sampler(SamplingParams(temperature=4.0, seed=5)), 1000)
    assert cold.count(1) > 800
    assert hot.count(1) < 400


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature: float, dtype: str) -> None:
    scores = (logits() * 1e4).to(getattr(torch, dtype))
    assert draws(Sampler(SamplingParams(temperature=temperature, seed=5)), 5, scores) == [1] * 5


def test_impossible_tokens_are_never_drawn() -> None:
    scores = torch.full((1000,), float("-inf"))
    scores[[3, 500]] = 0.0
    assert set(draws(Sampler(SamplingParams(temperature=1.0, seed=2)), 100, scores)) == {3, 500}
