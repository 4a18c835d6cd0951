"""What a prompt must be before anything of it is scheduled."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np

from kvtier_connectors.contract import KVOptions
from kvtier_engine.errors import BadTokenError, EmptyPromptError, PromptTooLongError, RequestError
from kvtier_engine.sampling import SamplingParams

__all__ = ["check_prompt", "check_request"]


def check_request(request_id: object, params: object, options: object) -> None:
    """Raises RequestError for what no request can be made of."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"a request id must be a string with something in it, not {request_id!r}")
    if not isinstance(params, SamplingParams):
        raise RequestError(f"request {request_id!r}: params must be a SamplingParams, not {params!r}")
    if not isinstance(options, KVOptions):
        raise RequestError(f"request {request_id!r}: options must be a KVOptions, not {options!r}")


def check_prompt(request_id: str, prompt: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Raises the RequestError of a prompt that can never run: empty, too long, or not of tokens."""
    if isinstance(prompt, str) or not isinstance(prompt, Sized):
        raise BadTokenError(f"request {request_id!r}: a prompt is a sequence of token ids, not {type(prompt).__name__}")
    if not len(prompt):
        raise EmptyPromptError(f"request {request_id!r} has an empty prompt")
    if len(prompt) > max_model_len:
        raise PromptTooLongError(
            f"request {request_id!r} has a prompt of {len(prompt)} tokens, which is longer than the maximum model "
            f"length of {max_model_len}; shorten it, or raise max_model_len or num_blocks"
        )
    if len(prompt) == max_model_len:
        raise PromptTooLongError(
            f"request {request_id!r} has a prompt of {len(prompt)} tokens, which plus the number of requested output "
            f"tokens (at least 1) is longer than the maximum model length of {max_model_len}; shorten it, or raise "
            f"max_model_len or num_blocks"
        )
    # A pass in C each; only a prompt with something else in it is looked at token by token.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    last = vocab_size - 1
    bad = next((token for token in prompt if not _is_integer(token) or not 0 <= token <= last), None)
    if bad is not None:
        raise BadTokenError(f"request {request_id!r} has token {bad!r}; this model's are 0..{last}")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
