"""What a request puts out: its text, why it ends, and the record of it."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvtier_engine.request import FinishReason, Request, RequestOutput, TextStream
from kvtier_engine.runner import BatchItem

__all__ = ["Streams", "describe_bad_token", "make_output", "why_finished"]

logger = logging.getLogger("kvtier.engine")


class Streams:
    """Owns the text streams of live requests. A stream is the caller's code, and may raise anything: that ends its
    request, and no other."""

    def __init__(self) -> None:
        self._streams: dict[str, TextStream] = {}

    def open(self, request_id: str, stream: TextStream | None) -> None:
        self._streams[request_id] = TextStream() if stream is None else stream

    def push(self, request: Request, token: int, reason: FinishReason | None) -> tuple[str, FinishReason | None, str]:
        """Put a token in. The text that is final by now, why the request ends (`reason` unless the text is why), and
        what the stream raised."""
        stream, text, error = self._streams[request.request_id], "", ""
        try:
            if reason is not FinishReason.STOP:  # an end token has no text
                text += stream.push(token)
            if reason is None and stream.stopped:
                reason = FinishReason.STOP
            if reason is not None:
                text += stream.finish()
        except Exception as raised:
            logger.exception("the text stream of request %s failed", request.request_id)
            reason, error = FinishReason.ERROR, f"the text stream failed: {raised!r}"
        if reason is not None and self._streams.get(request.request_id) is stream:
            del self._streams[request.request_id]
        return text, reason, error

    def end(self, request_id: str) -> str:
        """The request ended for another reason, and that one is reported: the text that was held back."""
        text = ""
        try:
            text += self._streams.pop(request_id).finish()
        except Exception:
            logger.exception("the text stream of request %s failed at its end", request_id)
        return text


def make_output(request: Request, new: tuple[int, ...], text: str) -> RequestOutput:
    first = request.first_token_at
    return RequestOutput(
        request_id=request.request_id,
        new_token_ids=new,
        token_ids=request.output_tokens,
        new_text=text,
        finish_reason=request.finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        gpu_hit_tokens=request.gpu_hit_tokens,
        restored_tokens=request.restored_tokens,
        ttft_s=None if first is None else first - request.arrival,
        error=request.error,
    )


def why_finished(request: Request, token: int, eos: Collection[int], max_model_len: int) -> FinishReason | None:
    """Why a request ends with this token, which was appended to it; None if it goes on. eos: the model's end tokens."""
    params = request.params
    if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
        return FinishReason.STOP
    num_output = len(request.tokens) - request.num_prompt_tokens
    if num_output == request.max_tokens or len(request.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None


def describe_bad_token(request: Request, item: BatchItem, token: object, vocab_size: int) -> str | None:
    """Why what the runner returned for a request cannot be taken; None when it can."""
    if request.sampler.error is not None:
        return f"sampling failed: {request.sampler.error!r}"
    if item.sampler is None:
        return None if token is None else f"the model sampled {token!r} before the prompt's end"
    if type(token) is not int or not 0 <= token < vocab_size:
        return f"the model sampled {token!r}; its tokens are 0..{vocab_size - 1}"
    return None
