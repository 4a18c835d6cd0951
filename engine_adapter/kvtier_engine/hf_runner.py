"""A transformers causal LM as the engine's model: its own weights and layers, our paged attention and block pool."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import KVLayout
from kvtier_engine.attention import ATTENTION_NAME, STEP_ARGUMENT, PagedStep, prepare_step, register
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.weights import without_progress_bar

__all__ = ["HFRunner"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class HFRunner(ModelRunner):
    """A model and its pool `[layers, 2, num_blocks, block_tokens, kv_heads, head_dim]`, on the CPU or a CUDA device.

    Owns the model and the pool, and is called by the engine's thread only; other threads may touch blocks of the pool
    that no running `execute` reads or writes. It sets neither thread counts nor any other setting of torch's.
    """

    def __init__(self, model: Any, pool: Tensor, layout: KVLayout, *, max_positions: int) -> None:
        """Use `load`, which checks that the model is one that can be served."""
        self.layout = layout
        self.num_blocks = pool.shape[2]
        self.max_positions = max_positions
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        """Tokens that end a text, from the model's generation config; empty if it names none."""
        self._model = model
        self._pool = pool

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> HFRunner:
        """Load the model in `model_dir` (config.json and safetensors; the network is never asked), and make its pool.

        num_blocks: size of the pool; it takes `num_blocks * layout.block_bytes` bytes of the device's memory.
        dtype: "bfloat16" or "float32", of weights and KV; other weights are converted while loading.

        Raises ConfigError for arguments or files that cannot be used, LayoutError for a model that paged attention
        cannot serve faithfully. May take seconds.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        if type(num_blocks) is not int or num_blocks < 1:
            raise ConfigError(f"num_blocks must be an integer of at least 1, not {num_blocks!r}")
        config = _load_config(Path(model_dir))
        layout = _layout(config, dtype, block_tokens)
        max_positions = _max_positions(config)
        model = _load_model(Path(model_dir), _DTYPES[dtype], _device(device))
        _check_model(model)
        shape = (layout.num_layers, 2, num_blocks, block_tokens, layout.num_kv_heads, layout.head_dim)
        try:
            pool = torch.zeros(shape, dtype=_DTYPES[dtype], device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"a pool of num_blocks = {num_blocks} blocks of {layout.block_bytes} bytes does not fit the memory of "
                f"{device}; lower num_blocks"
            ) from error
        runner = cls(model, pool, layout, max_positions=max_positions)
        runner._probe()
        return runner

    def with_pool(self, num_blocks: int) -> HFRunner:
        """Another runner over the same weights, with a pool of its own."""
        pool = self._pool.new_zeros((*self._pool.shape[:2], num_blocks, *self._pool.shape[3:]))
        return HFRunner(self._model, pool, self.layout, max_positions=self.max_positions)

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        """As `ModelRunner.execute`; LayoutError, before anything is written, for positions or blocks out of range."""
        for item in batch:
            if item.start + len(item.token_ids) > self.max_positions:
                raise LayoutError(f"request {item.request_id}: the model has {self.max_positions} positions")
        with torch.inference_mode():
            logits = self._forward(batch, prepare_step(self._pool, batch))
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()
        rows = iter(logits)
        return [None if item.sampler is None else item.sampler.draw(next(rows)) for item in batch]

    def planes(self) -> list[Tensor]:
        """Contiguous views of the pool, `[num_blocks, block_tokens, kv_heads, head_dim]` each, as in `ModelRunner`."""
        return list(self._pool.flatten(0, 1))

    def _forward(self, batch: Sequence[BatchItem], step: PagedStep) -> Tensor:
        """Logits `[items that sample, vocab]`, after writing the KV of every token of `batch`."""
        tokens = torch.tensor([token for item in batch for token in item.token_ids], device=self._pool.device)
        positions = torch.cat([torch.arange(item.start, item.start + len(item.token_ids)) for item in batch])
        last = [span.stop - 1 for item, span in zip(batch, step.spans, strict=True) if item.sampler is not None]
        output = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.to(self._pool.device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(last, dtype=torch.int64, device=self._pool.device),
            **{STEP_ARGUMENT: step},
        )
        logits: Tensor = output.logits[0]
        return logits

    def _probe(self) -> None:
        """One token through the model: each layer must come to paged attention once, with K/V of the layout's shape."""
        item = BatchItem("probe", [0], 0, [0], None)
        step = prepare_step(self._pool, [item])
        try:
            with torch.inference_mode():
                self._forward([item], step)
                self._pool[:, :, 0].zero_()
        except (AttributeError, KeyError, LayoutError, TypeError) as error:
            raise LayoutError(f"{_name(self._model.config)} cannot be served: {error}") from error
        if step.layers != list(range(self.layout.num_layers)):
            raise LayoutError(
                f"{_name(self._model.config)} cannot be served: of its {self.layout.num_layers} layers, "
                f"{step.layers} came to transformers' attention interface, each of which must once"
            )


def _load_config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"no model in {model_dir}: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config in {model_dir}: {error}") from error
    _check_config(config)
    return config


def _check_config(config: Any) -> None:
    """LayoutError for what the config alone shows cannot be served; `_check_model` and `_probe` find the rest."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Per layer type where layers differ, one flat dict where they do not.
    rope_types = {entry.get("rope_type") for entry in [rope, *rope.values()] if isinstance(entry, dict)}
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    other_types = sorted(set(layer_types) - {"full_attention"})
    if config.is_encoder_decoder:
        problem = "an encoder-decoder keeps KV of two sequences"
    elif getattr(text, "kv_lora_rank", None) is not None:
        problem = "its latent attention (MLA) is not in the engine's pool format"
    elif other_types:
        problem = f"its layers are not all full attention: {', '.join(other_types)}"
    elif getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True):
        problem = f"its attention slides over {text.sliding_window} positions"
    elif rope_types & {"dynamic", "longrope"}:
        problem = "its rotary frequencies change with the length of the batch, so its KV cannot be reused"
    else:
        return
    raise LayoutError(f"{_name(config)} cannot be served: {problem}")


def _layout(config: Any, dtype: str, block_tokens: int) -> KVLayout:
    text = config.get_text_config()
    try:
        num_heads = text.num_attention_heads
        return KVLayout(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            dtype=dtype,
            block_tokens=block_tokens,
        )
    except AttributeError as error:
        raise LayoutError(f"{_name(config)} cannot be served: its config describes no attention ({error})") from error


def _max_positions(config: Any) -> int:
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    if type(value) is not int or value < 1:
        raise LayoutError(f"{_name(config)} cannot be served: its config gives no max_position_embeddings")
    return value


def _device(device: str) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not one that torch knows") from error
    if parsed.type not in ("cpu", "cuda") or (parsed.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            f"device {device!r} is not usable here: the engine runs on cpu, or on cuda where torch has it"
        )
    return parsed


def _load_model(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    register()
    try:
        with without_progress_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        message = "it looks up attention in a table of its own, not through transformers' attention interface"
        raise LayoutError(f"the model in {model_dir} cannot be served: {message}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model in {model_dir}: {error}") from error
    on_device: Any = model.to(device)
    return on_device.eval().requires_grad_(requires_grad=False)


def _check_model(model: Any) -> None:
    problem = None
    if getattr(model, "_is_stateful", False):
        problem = "its layers keep a recurrent state"
    elif "logits_to_keep" not in inspect.signature(model.forward).parameters:
        problem = "its forward cannot limit the logits to chosen tokens (logits_to_keep)"
    if problem is not None:
        raise LayoutError(f"{_name(model.config)} cannot be served: {problem}")


def _eos_token_ids(model: Any) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _name(config: Any) -> str:
    return f"the {config.model_type} model"
