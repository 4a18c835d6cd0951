"""How one request's tokens are drawn, and how many: its parameters, and the sampler that owns its random generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sampler", "SamplingParams", "resolve_max_tokens"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling settings. Raises ConfigError, naming the field and the value, if one is out of range.

    max_tokens: most tokens to generate. None, 0 and below leave it to the engine: its default if it has one, else it
        stops only at an end token, a stop string or the model's last position.
    temperature: 0 takes the likeliest token (greedy); 1 draws from the model's own distribution.
    top_p: draw from the likeliest tokens that together hold this share of the probability; 1 keeps all.
    seed: equal seeds give equal draws from equal logits; None takes a fresh one from the operating system.
    stop: strings that end the text; the text up to the first of them is kept.
    stop_token_ids: tokens that end the text, besides the model's own end tokens.
    ignore_eos: go on past the model's own end tokens (for measuring).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and type(self.max_tokens) is not int:
            raise self._error("max_tokens", "None or an integer")
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise self._error("temperature", "a finite number of at least 0")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise self._error("top_p", "a number above 0 and at most 1")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**64):
            raise self._error("seed", "None or an integer from 0 to 2**64 - 1")
        if not (_is_tuple_of(self.stop, str) and all(self.stop)):
            raise self._error("stop", "a tuple of non-empty strings")
        if not (_is_tuple_of(self.stop_token_ids, int) and all(token >= 0 for token in self.stop_token_ids)):
            raise self._error("stop_token_ids", "a tuple of integers of at least 0")
        if type(self.ignore_eos) is not bool:
            raise self._error("ignore_eos", "True or False")

    def _error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"SamplingParams.{name} must be {expected}, not {getattr(self, name)!r}")


def resolve_max_tokens(asked: int | None, default: int | None, room: int) -> int:
    """Most tokens to generate for a request, at least 1 and at most `room`.

    asked: SamplingParams.max_tokens. default: the engine's, for requests that leave it open; None if it has none. room:
    the model length less the prompt's, at least 1.
    """
    if asked is None or asked <= 0:
        asked = room if default is None else default
    return min(asked, room)


class Sampler:
    """Draws one request's tokens. Owns the request's generator, so its draws do not depend on who shares the batch.

    Used by one thread at a time. Each draw at a temperature above 0 advances the generator by one number; a request
    that is preempted and recomputed keeps its sampler, and so goes on as if it had not been.
    """

    def __init__(self, params: SamplingParams) -> None:
        import torch

        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draw(self, logits: Tensor) -> int:
        """The next token from `logits`, a `[vocab]` tensor of any float type and device; waits for that device.

        Draws happen on the CPU in float64: equal seeds and logits give equal tokens whatever device the model is on.
        """
        if self.params.temperature == 0:
            return int(logits.argmax())
        return self._draw_at_temperature(logits)

    def _draw_at_temperature(self, logits: Tensor) -> int:
        import torch

        scores = logits.detach().to("cpu", torch.float64)
        # The largest score becomes 0 before the division, so that no temperature, however small, overflows.
        probs = torch.softmax((scores - scores.max()) / self.params.temperature, dim=-1)
        order: Tensor | None = None
        if self.params.top_p < 1:
            probs, order = probs.sort(descending=True, stable=True)
            before = probs.cumsum(-1) - probs
            probs = probs[: max(1, int((before < self.params.top_p).sum()))]
        cumulative = probs.cumsum(-1)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * cumulative[-1]
        index = min(int(torch.searchsorted(cumulative, point, right=True)), probs.numel() - 1)
        return index if order is None else int(order[index])


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_tuple_of(value: object, kind: type) -> bool:
    return isinstance(value, tuple) and all(type(element) is kind for element in value)
