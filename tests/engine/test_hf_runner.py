"""The paged runner against plain transformers: real weights, small random ones, and models it must refuse."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import KVLayout
from kvtier_engine.runner import BatchItem
from kvtier_engine.sampling import Sampler, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from kvtier_engine.hf_runner import HFRunner

TEXT = (
    "The lighthouse stood at the end of a long pier, and every evening the keeper climbed its stairs with a lamp and a "
    "book. He wrote down the ships that passed: their names, their flags, the hour, and the direction of the wind. "
    "One night a ship without a name came in from the north. The keeper"
)
STEPS = 20
ODD_CHUNKS = (1, 7, 16, 2, 23)


class RecordingSampler(Sampler):
    """Greedy; keeps the logits it was shown."""

    def __init__(self) -> None:
        super().__init__(SamplingParams())
        self.rows: list[Any] = []

    def draw(self, logits: Any) -> int:
        self.rows.append(logits.clone())
        return super().draw(logits)


class Request:
    """A prompt fed in chunks (the last size repeats), then token by token; keeps the logits at each chunk's end."""

    def __init__(self, prompt: Sequence[int], table: Sequence[int], chunks: Sequence[int] = (10**6,)) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.logits: dict[int, Any] = {}
        self._table = list(table)
        self._sizes: Iterable[int] = chain(chunks, repeat(chunks[-1]))
        self._start = 0
        self._sampler = RecordingSampler()

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def item(self) -> BatchItem:
        count = min(next(iter(self._sizes)), len(self.tokens) - self._start)
        return BatchItem("r", self.tokens[self._start : self._start + count], self._start, self._table, self._sampler)

    def take(self, item: BatchItem, token: int | None) -> None:
        assert token is not None
        self._start += len(item.token_ids)
        self.logits[self._start - 1] = self._sampler.rows.pop()
        if self._start == len(self.tokens):
            self.tokens.append(token)


def generate(runner: HFRunner, request: Request, mates: Sequence[Request] = (), steps: int = STEPS) -> Request:
    while len(request.generated) < steps:
        batch = [(each, each.item()) for each in (*mates, request)]
        tokens = runner.execute([item for _, item in batch])
        for (each, item), token in zip(batch, tokens, strict=True):
            each.take(item, token)
    return request


def plain_logits(model: Any, tokens: Sequence[int]) -> Any:
    """`[tokens, vocab]` from an ordinary forward of transformers, with its own attention and no cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def verify_equals_plain(request: Request, model: Any, *, atol: float) -> None:
    """Every recorded row is the plain forward's, and every token its likeliest one: then the greedy texts are equal."""
    expected = plain_logits(model, request.tokens)
    for position, row in request.logits.items():
        torch.testing.assert_close(row, expected[position], atol=atol, rtol=0)
    last = request.prompt_tokens - 1
    assert request.generated == expected[last:-1].argmax(-1).tolist()


def load_plain(model_dir: Path, dtype: str) -> Any:
    from kvtier_engine.weights import without_progress_bar

    with without_progress_bar():
        return transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()


@pytest.fixture(scope="session")
def plain_float32(real_model_dir: Path) -> Any:
    return load_plain(real_model_dir, "float32")


@pytest.fixture(scope="session")
def plain_bfloat16(real_model_dir: Path) -> Any:
    return load_plain(real_model_dir, "bfloat16")


@pytest.fixture(scope="session")
def prompt(real_model_dir: Path) -> list[int]:
    from kvtier_engine.tokenizer import Tokenizer

    return Tokenizer.load(real_model_dir).encode(TEXT)


def mates_of(prompt: Sequence[int], *, shift: int = 0) -> list[Request]:
    """Two other requests in other blocks: one feeds small chunks while the other already generates."""
    return [
        Request(prompt[5 + shift : 55 + shift], range(40, 50), (13,)),
        Request(prompt[1 + shift : 31 + shift], range(50, 60), (4, 9)),
    ]


WAYS: dict[str, Callable[[Sequence[int]], tuple[Request, list[Request]]]] = {
    "one chunk": lambda prompt: (Request(prompt, range(10)), []),
    "odd chunks": lambda prompt: (Request(prompt, range(10), ODD_CHUNKS), []),
    "reversed blocks with gaps": lambda prompt: (Request(prompt, range(30, 10, -2), ODD_CHUNKS), []),
    "batched with two others": lambda prompt: (Request(prompt, range(30, 10, -2), ODD_CHUNKS), mates_of(prompt)),
}


@pytest.mark.model
@pytest.mark.parametrize("way", WAYS)
def test_float32_gives_the_logits_and_the_text_of_plain_transformers(
    way: str, runner_float32: HFRunner, plain_float32: Any, prompt: list[int]
) -> None:
    request, mates = WAYS[way](prompt)
    generate(runner_float32, request, mates)
    for each in (request, *mates):
        verify_equals_plain(each, plain_float32, atol=1e-3)


@pytest.mark.model
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_as_near_to_plain_transformers_as_its_rounding_allows(
    way: str, runner_bfloat16: HFRunner, plain_bfloat16: Any, prompt: list[int]
) -> None:
    """Logits reach 34, where bfloat16 has steps of a quarter; 30 layers of them leave differences up to 0.8."""
    request, mates = WAYS[way](prompt)
    generate(runner_bfloat16, request, mates)
    expected = plain_logits(plain_bfloat16, request.tokens)
    for position, row in request.logits.items():
        torch.testing.assert_close(row, expected[position], atol=1.5, rtol=0)
    for position, token in enumerate(request.generated, start=request.prompt_tokens - 1):
        assert expected[position].max() - expected[position, token] <= 1.5


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_mates_say_changes_no_bit(dtype: str, prompt: list[int], request: pytest.FixtureRequest) -> None:
    """The number of mates may: matrix products are then of other shapes, and some processors round those otherwise."""
    runner: HFRunner = request.getfixturevalue(f"runner_{dtype}")
    first = generate(runner, Request(prompt, range(10)), mates_of(prompt), steps=5)
    second = generate(runner, Request(prompt, range(20, 30)), mates_of(prompt, shift=9), steps=5)
    assert first.generated == second.generated
    assert all(torch.equal(row, second.logits[position]) for position, row in first.logits.items())


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_moved_through_the_planes_give_the_same_bits(
    dtype: str, prompt: list[int], request: pytest.FixtureRequest
) -> None:
    """What a restore does: the bytes go elsewhere, other bytes take their place, and the text goes on unchanged."""
    runner: HFRunner = request.getfixturevalue(f"runner_{dtype}")
    stayed = generate(runner, Request(prompt, range(10)), steps=5)
    moved = generate(runner, Request(prompt, range(10)), steps=1)
    for plane in runner.planes():
        plane[20:30] = plane[:10].clone()
        plane[:10] = 7.0
    moved._table = list(range(20, 30))
    generate(runner, moved, steps=5)
    assert moved.generated == stayed.generated
    assert all(torch.equal(row, moved.logits[position]) for position, row in stayed.logits.items())


@pytest.mark.model
def test_a_wrong_block_id_changes_the_output(runner_float32: HFRunner, prompt: list[int]) -> None:
    right = generate(runner_float32, Request(prompt, range(10)), steps=2)
    generate(runner_float32, Request(prompt[::-1], range(20, 30)), steps=1)
    wrong = generate(runner_float32, Request(prompt, range(10)), steps=1)
    wrong._table[2] = 22
    generate(runner_float32, wrong, steps=2)
    position = len(prompt)
    assert torch.equal(right.logits[position - 1], wrong.logits[position - 1])
    assert (right.logits[position] - wrong.logits[position]).abs().max() > 0.1


@pytest.mark.model
def test_the_real_model_is_described(runner_bfloat16: HFRunner) -> None:
    assert runner_bfloat16.layout == KVLayout(30, 3, 64, "bfloat16", 16)
    assert (runner_bfloat16.num_blocks, runner_bfloat16.max_positions, runner_bfloat16.vocab_size) == (64, 8192, 49152)
    assert runner_bfloat16.eos_token_ids == {2}


# Small random models. One of each family that differs in what reaches the attention: grouped heads, norms on the
# heads, partial rotary, learned positions.

SMALL: dict[str, Any] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 12},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None},
}


@pytest.fixture
def small_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small random model of a type; keywords go to its config."""

    def write(model_type: str, **settings: Any) -> Path:
        from kvtier_engine.weights import without_progress_bar

        torch.manual_seed(0)
        defaults: dict[str, Any] = {
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        defaults |= {"intermediate_size": 64, "max_position_embeddings": 96, "initializer_range": 0.2}
        defaults |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = transformers.AutoConfig.for_model(model_type, **{**defaults, **settings})
        with without_progress_bar():
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return write


def load_small(model_dir: Path, **settings: Any) -> HFRunner:
    from kvtier_engine.hf_runner import HFRunner

    return HFRunner.load(model_dir, **{"num_blocks": 64, "block_tokens": 4, "dtype": "float32", **settings})


@pytest.mark.parametrize("model_type", SMALL)
def test_small_models_equal_plain_transformers(model_type: str, small_model: Callable[..., Path]) -> None:
    model_dir = small_model(model_type, **SMALL[model_type])
    prompt = torch.randint(3, 128, (31,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request(prompt, range(30, 0, -2), (5, 1, 9))
    mates = [Request(prompt[3:20], range(40, 52), (7,)), Request(prompt[::-1], range(1, 31, 2), (4,))]
    generate(load_small(model_dir), request, mates, steps=12)
    for each in (request, *mates):
        verify_equals_plain(each, load_plain(model_dir, "float32"), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_pool_is_zero_and_its_planes_have_the_layout(dtype: str, small_model: Callable[..., Path]) -> None:
    runner = load_small(small_model("llama", num_key_value_heads=2), dtype=dtype)
    planes = runner.planes()
    assert len(planes) == runner.layout.num_planes == 6
    for plane in planes:
        assert plane.shape == (64, 4, 2, 8)
        assert plane.is_contiguous()
        assert plane[0].numel() * plane.element_size() == runner.layout.segment_bytes
        assert not plane.any()
    assert [plane.data_ptr() for plane in planes] == [plane.data_ptr() for plane in runner.planes()]


def test_items_without_a_sampler_get_none_and_their_kv_all_the_same(small_model: Callable[..., Path]) -> None:
    runner = load_small(small_model("llama"))
    sampler = RecordingSampler()
    items = [BatchItem("a", [5, 6, 7], 0, [3], None), BatchItem("b", [8], 0, [9], sampler)]
    first, second = runner.execute(items)
    assert first is None
    assert second == sampler.rows[0].argmax()
    assert runner.execute(items[:1]) == [None]
    assert all(plane[3, :3].any(-1).all() and not plane[3, 3].any() for plane in runner.planes())


@pytest.mark.parametrize(("start", "count", "table"), [(0, 5, [1]), (0, 1, [64]), (94, 3, list(range(25)))])
def test_an_item_that_does_not_fit_changes_nothing(
    start: int, count: int, table: list[int], small_model: Callable[..., Path]
) -> None:
    runner = load_small(small_model("llama"))
    with pytest.raises(LayoutError, match="request late"):
        runner.execute([BatchItem("fine", [5], 0, [2], None), BatchItem("late", [5] * count, start, table, None)])
    assert not any(plane.any() for plane in runner.planes())


def test_loading_asks_no_network(small_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_small(small_model("llama"))


# What must be refused, by the config alone where it tells, else by the probe.

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sliding window": ("mistral", {"sliding_window": 8}, "mistral .* slides over 8"),
    "some layers sliding": ("gemma3_text", {"head_dim": 8, "sliding_window": 8}, "sliding_attention"),
    "soft cap": ("gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 3, "sliding_window": None}, "softcap"),
    "latent attention": ("deepseek_v3", {}, "MLA"),
    "no attention": ("mamba", {}, "mamba .* attention"),
    "recurrent and attention layers": ("qwen3_next", {"head_dim": 8}, "linear_attention"),
    "recurrence beside attention": ("falcon_h1", {"head_dim": 8}, "falcon_h1 "),
    "not through the interface": ("bloom", {"n_layer": 3, "n_head": 4}, "bloom "),
    "changing rotary": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary"),
    "sinks": ("gpt_oss", {"head_dim": 8, "layer_types": ["full_attention"] * 3, "sliding_window": None}, "sinks"),
    "step not handed on": ("stablelm", {}, "stablelm .* keyword arguments"),
    "two calls a layer": ("diffllama", {}, r"diffllama .* \[0, 0, 1, 1, 2, 2\]"),
    "own table of attention classes": ("falcon", {}, "attention interface"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(case: str, small_model: Callable[..., Path]) -> None:
    model_type, settings, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        load_small(small_model(model_type, **settings))


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(LayoutError, match=r"t5 .* encoder-decoder"):
        load_small(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"num_blocks": 0}, "num_blocks .* 0"),
        ({"block_tokens": 0}, "block_tokens .* 0"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "meta"}, "device 'meta'"),
    ],
)
def test_bad_arguments_are_named(settings: dict[str, Any], message: str, small_model: Callable[..., Path]) -> None:
    with pytest.raises((ConfigError, LayoutError), match=message):
        load_small(small_model("llama"), **settings)


def test_a_directory_without_a_model_is_named(tmp_path: Path, small_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=f"no model in {tmp_path}"):
        load_small(tmp_path)
    small_model("llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_small(tmp_path)


def test_weights_cut_short_are_one_clear_error(real_model_dir: Path, tmp_path: Path) -> None:
    from kvtier_engine.hf_runner import HFRunner

    for path in real_model_dir.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes()[:1000])
        elif path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="cannot load the model"):
        HFRunner.load(tmp_path, num_blocks=1)


def test_a_pool_beyond_the_memory_is_one_clear_error(real_model_dir: Path) -> None:
    from kvtier_engine.hf_runner import HFRunner

    with pytest.raises(ConfigError, match="num_blocks = 1000000000"):
        HFRunner.load(real_model_dir, num_blocks=10**9)
