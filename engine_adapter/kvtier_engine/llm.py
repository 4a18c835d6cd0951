"""A language model to call: text or tokens in, text out, whole or as it comes, with kvtier beside the block pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.config import Settings
from kvtier.keys import Namespace, Shard
from kvtier_engine.config import EngineConfig
from kvtier_engine.engine import NO_EXTRAS, Engine, StepResult, TextStream
from kvtier_engine.request import FinishReason, RequestOutput
from kvtier_engine.sampling import SamplingParams
from kvtier_engine.scheduler import Verdict
from kvtier_engine.tokenizer import IncrementalDetokenizer, Tokenizer
from kvtier_engine.weights import model_fingerprint

if TYPE_CHECKING:
    from kvtier.keys import Extras
    from kvtier_engine.hf_runner import HFRunner

__all__ = ["LLM", "Completion"]

WAIT_S = 0.1  # for one copy; the loop looks again in any case


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
    """Owns an engine over one model directory. Not thread-safe: one thread makes every call.

        with LLM(model_dir, num_blocks=1024, settings=load_settings()) as llm:
            print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)

    settings: kvtier's, or None to run without it. Raises ConfigError or LayoutError for a model, a size or a setting
    that cannot work.
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

    # ---- whole answers -------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, *, restore: bool = True
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), batched; the answers in the prompts' order.

        Raises a RequestError, with nothing scheduled of that prompt or a later one, for a prompt that can never run.
        """
        ids = []
        try:
            for prompt in prompts:
                ids.append(self.add_request(prompt, params, restore=restore))  # noqa: PERF401 - ids are undone below
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        texts = dict.fromkeys(ids, "")
        last: dict[str, RequestOutput] = {}
        for output in self._run():
            if output.request_id in texts:
                texts[output.request_id] += output.new_text
                last[output.request_id] = output
        return [_completion(last[request_id], texts[request_id]) for request_id in ids]

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Completion:
        """Answer a conversation (`{"role": ..., "content": ...}` each) by the model's own chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], params)[0]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[RequestOutput]:
        """One prompt's outputs as they come. Ending the iteration early aborts the request."""
        request_id = self.add_request(prompt, params)
        try:
            for output in self._run():
                if output.request_id == request_id:
                    yield output
                    if output.finished:
                        return
        finally:
            self.abort(request_id)

    # ---- step by step --------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        extras: Extras = NO_EXTRAS,
        restore: bool = True,
    ) -> str:
        """Queue a prompt; its id. Raises as `Engine.add_request`."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        stream = _DetokenizedStream(self.tokenizer, params.stop)
        self.engine.add_request(name, tokens, params, extras=extras, stream=stream, restore=restore)
        return name

    def step(self) -> StepResult:
        """One step of the engine; see `Engine.step`."""
        return self.engine.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state."""
        return self.engine.abort(request_id)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Iterator[RequestOutput]:
        """Step until nothing is unfinished and no copy is under way."""
        while self.engine.has_work:
            result = self.engine.step()
            yield from result.outputs
            if result.verdict is not Verdict.OK:
                self.engine.wait(WAIT_S)


def _completion(output: RequestOutput, text: str) -> Completion:
    assert output.finish_reason is not None
    return Completion(
        request_id=output.request_id,
        text=text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        num_prompt_tokens=output.num_prompt_tokens,
        gpu_hit_tokens=output.gpu_hit_tokens,
        restored_tokens=output.restored_tokens,
        ttft_s=output.ttft_s,
        error=output.error,
    )
