"""vLLM runs here at all: the real model, in this process, without a connector."""

from __future__ import annotations

from vllm import SamplingParams

from tests.vllm.conftest import LLMs

PROMPT = "The capital of France is"


def test_one_engine_after_another_puts_out_the_same_text(make_llm: LLMs) -> None:
    texts = []
    for _ in range(2):
        llm = make_llm(max_model_len=256, num_gpu_blocks_override=16)
        (answer,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 8
        texts.append(answer.outputs[0].text)
    assert texts[0].startswith(" Paris")
    assert texts[0] == texts[1]
