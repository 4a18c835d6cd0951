"""One request: its tokens, its blocks, where it stands, and what it has put out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvtier.keys import DigestChain, Extras
from kvtier_connectors.contract import NO_OPTIONS, KVOptions
from kvtier_engine.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FinishReason", "GuardedSampler", "Refusal", "Request", "RequestOutput", "RequestState", "TextStream"]


class RequestState(Enum):
    WAITING = "waiting"
    """Holds no block and no slot. New, or preempted, or about to be restored once more."""
    RESTORING = "restoring"
    """Holds a slot and blocks that a landing writes."""
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the model length."""
    ABORT = "abort"
    """The caller ended it."""
    ERROR = "error"
    """The forward, the sampler or the text stream failed, or the request could not go on; `error` says why."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not admitted, and what must change before it is worth while to look again.

    is_restore: what it lacks blocks for. num_taken: blocks that it would take of the free ones. num_needed: those of
    them that it would fill. step: when that was.
    """

    is_restore: bool
    num_needed: int
    num_taken: int
    step: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request, or several steps whose outputs `LLM` joined.

    new_token_ids: their tokens. token_ids: all output tokens so far. new_text: text that is final by now.
    gpu_hit_tokens, restored_tokens: prompt tokens not computed at the first admission, by where their KV was.
    ttft_s: from arrival to first token, None before it.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    new_text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    gpu_hit_tokens: int
    restored_tokens: int
    ttft_s: float | None
    error: str | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class TextStream:
    """Turns one request's tokens into final text. What it raises ends its request, with FinishReason.ERROR.

    The base class puts out none. `kvtier_engine.llm` has the real one.
    """

    @property
    def stopped(self) -> bool:
        """True once a stop string was met."""
        return False

    def push(self, token: int) -> str:
        """Text that is final after this token."""
        del token
        return ""

    def finish(self) -> str:
        """What was held back."""
        return ""


class GuardedSampler(Sampler):
    """A sampler whose exceptions stay its request's own: `draw` keeps the first in `error`, so that the batch goes on.

    After one, what `draw` returns means nothing.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.params = sampler.params
        self.error: Exception | None = None
        self._sampler = sampler

    def draw(self, logits: Tensor) -> int:
        try:
            return self._sampler.draw(logits)
        except Exception as error:  # noqa: BLE001 - the engine logs it, with the request's id
            self.error = self.error or error
            return 0


class Request:
    """A live request. Owned by the scheduler; nobody else writes it."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        sampler: Sampler,
        extras: Extras,
        block_tokens: int,
        arrival: float,
        *,
        max_tokens: int,
        options: KVOptions = NO_OPTIONS,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.max_tokens = max_tokens
        """Of output, at least 1: what was asked for, a default, or all that there is room for."""
        self.sampler = GuardedSampler(sampler)
        self.arrival = arrival
        self.options = options
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.chain = DigestChain(block_tokens, extras)
        self.chain.extend(prompt)
        self.root = extras.root(block_tokens)
        self.state = RequestState.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0
        """Tokens whose KV stands in `block_table`."""
        self.num_published = 0
        """Leading blocks of `block_table` that are matchable."""
        self.arrival_index = 0
        """Its place among all requests that ever came."""
        self.refusal: Refusal | None = None
        """When it was last tested for admission and found too few blocks; None when it was not refused."""
        self.num_refused = 0
        """Steps in which it stood blocked since it began to wait."""
        self.restore_expired = False
        """Its restore waited for blocks until the bound: it is recomputed, by ordinary admission."""
        self.last_decode_step = 0
        self.was_admitted = False
        self.num_preemptions = 0
        self.gpu_hit_tokens = 0
        self.restored_tokens = 0
        self.first_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.block_tokens = block_tokens

    @property
    def output_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt_tokens :])

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is to be computed."""
        return self.num_uncomputed == 1 and len(self.tokens) > self.num_prompt_tokens

    @property
    def max_reusable_blocks(self) -> int:
        """Full blocks that may come from a cache: at least one token is left to compute, for its logits."""
        return (len(self.tokens) - 1) // self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def tokens_of(self, block_index: int) -> tuple[int, ...]:
        start = block_index * self.block_tokens
        return tuple(self.tokens[start : start + self.block_tokens])

    def append(self, token: int, now: float) -> None:
        """Add an output token. Raises TokenError, with nothing changed, for one that cannot be hashed."""
        self.chain.extend([token])
        self.tokens.append(token)
        if self.first_token_at is None:
            self.first_token_at = now

    def forget_blocks(self) -> list[int]:
        """Give up every block and what was computed; the caller releases them."""
        blocks, self.block_table = self.block_table, []
        self.num_computed = self.num_published = 0
        return blocks
