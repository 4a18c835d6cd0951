"""Paged attention against a dense reference that knows nothing of blocks, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import LayoutError
from kvtier_engine.runner import BatchItem

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, BLOCK_TOKENS, KV_HEADS, HEADS, DIM = 2, 24, 4, 2, 6, 8
SCALING = 0.3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}

BATCHES = {
    "first chunk": [(0, 9)],
    "one token": [(0, 1)],
    "chunk with a past": [(5, 7)],
    "chunk that starts a block": [(8, 5)],
    "decode": [(13, 1)],
    "decode at a block's first slot": [(12, 1)],
    "all kinds at once": [(5, 7), (0, 9), (13, 1), (3, 2), (0, 1), (16, 1)],
}


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, layer_idx: int | None = 1) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def make_items(shape: list[tuple[int, int]]) -> list[BatchItem]:
    """Items of (start, tokens), on block tables in no order; one block more than needed, as a scheduler may reserve."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    items = []
    for index, (start, count) in enumerate(shape):
        needed = -(-(start + count) // BLOCK_TOKENS) + 1
        table, free = free[:needed], free[needed:]
        items.append(BatchItem(str(index), [0] * count, start, table, None))
    return items


def random_step(items: list[BatchItem], dtype: Any, device: str) -> tuple[Any, Any, Any, Any]:
    """Pool with old content everywhere, and this step's query, key and value, strided as models pass them."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens = sum(len(item.token_ids) for item in items)
    pool = rand(LAYERS, 2, BLOCKS, BLOCK_TOKENS, KV_HEADS, DIM)
    return pool, *(rand(1, tokens, heads, DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS))


def slot_of(item: BatchItem, position: int) -> tuple[int, int]:
    return item.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS


def dense_attention(item: BatchItem, query: Any, keys: Any, values: Any) -> Any:
    """`[tokens, HEADS, DIM]` in float64, one token and head at a time, from planes `[BLOCKS, BLOCK_TOKENS, ...]`."""
    rows = []
    for index in range(len(item.token_ids)):
        slots = [slot_of(item, position) for position in range(item.start + index + 1)]
        key = torch.stack([keys[slot] for slot in slots]).double()
        value = torch.stack([values[slot] for slot in slots]).double()
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = torch.softmax(key[:, group] @ query[0, head, index].double() * SCALING, 0)
            heads.append(weights @ value[:, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_attention_and_writes_only_its_slots(name: str, dtype: Any, device: str) -> None:
    from kvtier_engine.attention import paged_attention, prepare_step

    items = make_items(BATCHES[name])
    pool, query, key, value = random_step(items, dtype, device)
    expected_pool = pool.clone()
    token = 0
    for item in items:
        for position in range(item.start, item.start + len(item.token_ids)):
            expected_pool[1, 0][slot_of(item, position)] = key[0, :, token]
            expected_pool[1, 1][slot_of(item, position)] = value[0, :, token]
            token += 1

    step = prepare_step(pool, items)
    output, weights = paged_attention(Layer(), query, key, value, None, scaling=SCALING, kvtier_step=step)

    assert weights is None
    assert output.shape == (1, token, HEADS, DIM)
    assert torch.equal(pool, expected_pool)
    assert step.layers == [1]
    for item, span in zip(items, step.spans, strict=True):
        expected = dense_attention(item, query[:, :, span.start : span.stop], pool[1, 0], pool[1, 1])
        difference = (output[0, span.start : span.stop].double() - expected).abs().max()
        assert difference < TOLERANCE[dtype], f"item {item.request_id}"


def test_an_item_gets_the_same_bits_alone_and_in_a_batch() -> None:
    from kvtier_engine.attention import paged_attention, prepare_step

    items = make_items(BATCHES["all kinds at once"])
    pool, query, key, value = random_step(items, torch.float32, "cpu")
    step = prepare_step(pool, items)
    batched, _ = paged_attention(Layer(), query, key, value, None, scaling=SCALING, kvtier_step=step)
    for item, span in zip(items, step.spans, strict=True):
        part = slice(span.start, span.stop)
        alone, _ = paged_attention(
            Layer(), query[:, :, part], key[:, :, part], value[:, :, part], None, scaling=SCALING,
            kvtier_step=prepare_step(pool, [item]),
        )  # fmt: skip
        assert torch.equal(alone, batched[:, part])


def test_only_chunks_with_a_past_carry_a_mask() -> None:
    from kvtier_engine.attention import prepare_step

    items = make_items([(0, 9), (5, 7), (13, 1)])
    pool, *_ = random_step(items, torch.float32, "cpu")
    masks = [span.mask for span in prepare_step(pool, items).spans]
    assert masks[0] is None
    assert masks[2] is None
    assert masks[1] is not None
    assert masks[1].shape == (7, 12)
    assert masks[1].eq(0).sum(1).tolist() == [6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("start", "count", "table"),
    [(0, 9, [1, 2]), (8, 1, [1, 2]), (0, 0, [1]), (0, 4, [BLOCKS]), (0, 4, [-1]), (0, 1, [])],
)
def test_a_block_table_that_does_not_fit_is_refused(start: int, count: int, table: list[int]) -> None:
    from kvtier_engine.attention import prepare_step

    pool = torch.zeros(LAYERS, 2, BLOCKS, BLOCK_TOKENS, KV_HEADS, DIM)
    with pytest.raises(LayoutError, match="request r: "):
        prepare_step(pool, [BatchItem("r", [0] * count, start, table, None)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 4}, "a sliding window"),
        ({"softcap": 30.0}, "soft-capped"),
        ({"s_aux": torch.zeros(HEADS)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "a position bias"),
        ({"is_causal": False}, "without causality"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1)}, "a mask|an attention mask"),
    ],
)
def test_what_would_change_the_output_is_refused_and_nothing_is_written(options: dict[str, Any], message: str) -> None:
    from kvtier_engine.attention import paged_attention, prepare_step

    items = make_items([(0, 3)])
    pool, query, key, value = random_step(items, torch.float32, "cpu")
    before = pool.clone()
    mask = options.pop("attention_mask", None)
    with pytest.raises(LayoutError, match=message):
        paged_attention(Layer(), query, key, value, mask, kvtier_step=prepare_step(pool, items), **options)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("layer_idx", [None, -1, LAYERS])
def test_a_layer_that_the_pool_does_not_have_is_refused(layer_idx: int | None) -> None:
    from kvtier_engine.attention import paged_attention, prepare_step

    items = make_items([(0, 3)])
    pool, query, key, value = random_step(items, torch.float32, "cpu")
    with pytest.raises(LayoutError, match="layer_idx"):
        paged_attention(Layer(layer_idx), query, key, value, None, kvtier_step=prepare_step(pool, items))


@pytest.mark.parametrize("change", ["heads", "key dim", "value dim", "tokens"])
def test_keys_and_values_of_another_shape_are_refused(change: str) -> None:
    from kvtier_engine.attention import paged_attention, prepare_step

    items = make_items([(0, 3)])
    pool, query, key, value = random_step(items, torch.float32, "cpu")
    step = prepare_step(pool, items)
    match change:
        case "heads":
            key, value = key[:, :1], value[:, :1]
        case "key dim":
            key = key[..., :4]
        case "value dim":
            value = value[..., :4]
        case _:
            query, key, value = query[:, :, :2], key[:, :, :2], value[:, :, :2]
    with pytest.raises(LayoutError, match="the pool holds"):
        paged_attention(Layer(), query, key, value, None, kvtier_step=step)
