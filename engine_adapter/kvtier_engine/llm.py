"""A language model to call: text or tokens in, text out, whole or as it comes, with kvtier beside the block pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.config import Settings
from kvtier.keys import Namespace, Shard
from kvtier.metrics import StatsSnapshot
from kvtier_connectors.contract import NO_OPTIONS, KVOptions
from kvtier_connectors.fingerprint import model_fingerprint
from kvtier_engine.config import EngineConfig
from kvtier_engine.engine import NO_EXTRAS, Engine, StepResult, TextStream
from kvtier_engine.errors import RequestError
from kvtier_engine.request import FinishReason, RequestOutput
from kvtier_engine.sampling import SamplingParams
from kvtier_engine.tokenizer import IncrementalDetokenizer, Tokenizer
from kvtier_engine.verdict import Verdict

if TYPE_CHECKING:
    from kvtier.keys import Extras
    from kvtier_engine.hf_runner import HFRunner

__all__ = ["LLM", "Completion"]

WAIT_S = 1.0  # a copy or a stage that ends wakes the loop, and so does a deadline; it looks again in any case


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. gpu_hit_tokens, restored_tokens: prompt tokens whose KV was in the GPU pool, or restored."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    gpu_hit_tokens: int
    restored_tokens: int
    ttft_s: float | None
    error: str | None


class _DetokenizedStream(TextStream):
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop)

    @property
    def stopped(self) -> bool:
        return self._detokenizer.matched_stop is not None

    def push(self, token: int) -> str:
        return self._detokenizer.push(token)

    def finish(self) -> str:
        return self._detokenizer.finish()


class LLM:
    """Owns an engine over one model directory, and what its requests put out until it is read. Not thread-safe: one
    thread makes every call.

        with LLM(model_dir, num_blocks=1024, settings=load_settings()) as llm:
            print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)

    settings: kvtier's, or None to run without it. Raises ConfigError or LayoutError for a model, a size or a setting
    that cannot work. Not safe across fork. After an exception that is not one of kvtier's (a KeyboardInterrupt, say)
    came out of a call, close it and open another: it may have hit anywhere.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: str = "bfloat16",
        device: str = "cpu",
        config: EngineConfig | None = None,
        settings: Settings | None = None,
    ) -> None:
        from kvtier_engine.hf_runner import HFRunner

        runner = HFRunner.load(model_dir, num_blocks=num_blocks, block_tokens=block_tokens, dtype=dtype, device=device)
        self._start(runner, Tokenizer.load(model_dir), model_fingerprint(model_dir), config, settings)

    @classmethod
    def from_parts(
        cls,
        runner: HFRunner,
        tokenizer: Tokenizer,
        fingerprint: str,
        config: EngineConfig | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Over a model that is loaded already, so that several engines can share its weights."""
        llm = cls.__new__(cls)
        llm._start(runner, tokenizer, fingerprint, config, settings)
        return llm

    def _start(
        self,
        runner: HFRunner,
        tokenizer: Tokenizer,
        fingerprint: str,
        config: EngineConfig | None,
        settings: Settings | None,
    ) -> None:
        namespace = Namespace(fingerprint, revision="", layout=runner.layout, group="all", shard=Shard(0, 1))
        self.tokenizer = tokenizer
        self.engine = Engine(runner, namespace, config or EngineConfig(), settings, eos_token_ids=runner.eos_token_ids)
        self._ids = itertools.count()
        # By request, all that was put out since it was last read: one output, so that many steps take little memory.
        self._unread: dict[str, RequestOutput] = {}
        self._has_reader: set[str] = set()  # requests of `generate` and `stream`, whose outputs `step` leaves alone

    # ---- whole answers -------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, *, options: KVOptions = NO_OPTIONS
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), batched; the answers in the prompts' order.

        Other requests run beside them. Raises a RequestError, with nothing left scheduled of any of the prompts, for
        one that can never run.
        """
        if isinstance(prompts, str):
            raise RequestError("generate takes a list of prompts, not one string: put it in a list")
        ids: list[str] = []
        try:
            for prompt in prompts:
                ids.append(self.add_request(prompt, params, options=options))
                self._has_reader.add(ids[-1])
            for request_id in ids:
                while request_id in self.engine.scheduler:
                    self._advance()
            while self.engine.has_work and not self.engine.num_unfinished:  # copies that still touch the pool
                self._advance()
            return [_completion(self._unread[request_id]) for request_id in ids]
        finally:
            for request_id in ids:
                self._forget(request_id)

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams, *, options: KVOptions = NO_OPTIONS
    ) -> Completion:
        """Answer a conversation (`{"role": ..., "content": ...}` each) by the model's own chat template."""
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('chat takes a list of messages, {"role": ..., "content": ...} each')
        return self.generate([self.tokenizer.encode_chat(messages)], params, options=options)[0]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, *, options: KVOptions = NO_OPTIONS
    ) -> Iterator[RequestOutput]:
        """One prompt's outputs as they come, from the first `next` on. Ending the iteration early aborts the request.

        Other requests run beside it. What came while another call stepped the engine comes as one output.
        """
        request_id = self.add_request(prompt, params, options=options)
        self._has_reader.add(request_id)
        try:
            while request_id in self._unread or request_id in self.engine.scheduler:
                if request_id in self._unread:
                    yield self._unread.pop(request_id)
                else:
                    self._advance()
        finally:
            self._forget(request_id)

    # ---- step by step --------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        extras: Extras = NO_EXTRAS,
        options: KVOptions = NO_OPTIONS,
    ) -> str:
        """Queue a prompt for `step`; its id. Raises as `Engine.add_request`. An id is in use until its last output was
        read."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._unread or name in self._has_reader:
            raise RequestError(f"request id {name!r} is in use; read its last output or choose another")
        stream = _DetokenizedStream(self.tokenizer, params.stop)
        self.engine.add_request(name, tokens, params, extras=extras, stream=stream, options=options)
        return name

    def step(self) -> StepResult:
        """One step of the engine; see `Engine.step`. Its outputs are those of `add_request`'s requests, with what came
        while `generate` or a stream stepped the engine."""
        result = self._step()
        ids = [request_id for request_id in self._unread if request_id not in self._has_reader]
        return replace(result, outputs=tuple(self._unread.pop(request_id) for request_id in ids))

    @property
    def has_work(self) -> bool:
        """Keep calling `step` while this holds: the engine has work, or there are outputs to read."""
        return self.engine.has_work or not self._unread.keys() <= self._has_reader

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state. What it put out since it was last read; None when it is not live and all was
        read."""
        output = self.engine.abort(request_id)
        if output is not None:
            self._keep(output)
        if request_id in self._has_reader:
            return self._unread.get(request_id)
        return self._unread.pop(request_id, None)

    def flush(self, timeout: float) -> int:
        """Store what the pool caches, down to the lowest tier; see `Engine.flush`."""
        return self.engine.flush(timeout)

    def stats(self) -> StatsSnapshot | None:
        """What kvtier's store counts, the disk included; None without kvtier."""
        return self.engine.stats()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what is left and close the engine, which stores what the pool still caches. Idempotent."""
        self.engine.close(timeout)
        self._unread.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self) -> StepResult:
        result = self.engine.step()
        for output in result.outputs:
            self._keep(output)
        return result

    def _advance(self) -> None:
        if self._step().verdict is not Verdict.OK:
            self.engine.wait(WAIT_S)

    def _keep(self, output: RequestOutput) -> None:
        unread = self._unread.get(output.request_id)
        if unread is not None:
            new_tokens, new_text = unread.new_token_ids + output.new_token_ids, unread.new_text + output.new_text
            output = replace(output, new_token_ids=new_tokens, new_text=new_text)
        self._unread[output.request_id] = output

    def _forget(self, request_id: str) -> None:
        """A reader is done with its request."""
        self.engine.abort(request_id)
        self._has_reader.discard(request_id)
        self._unread.pop(request_id, None)


def _completion(output: RequestOutput) -> Completion:
    assert output.finish_reason is not None
    return Completion(
        request_id=output.request_id,
        text=output.new_text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        num_prompt_tokens=output.num_prompt_tokens,
        gpu_hit_tokens=output.gpu_hit_tokens,
        restored_tokens=output.restored_tokens,
        ttft_s=output.ttft_s,
        error=output.error,
    )
