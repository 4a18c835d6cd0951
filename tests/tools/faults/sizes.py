"""Sizes and what is refused: section C of docs/rules.md."""

from __future__ import annotations

from tests.tools.mutation import Mutant

CAPACITY = "engine_adapter/kvtier_engine/capacity.py"
CONFIG = "engine_adapter/kvtier_engine/config.py"
INTAKE = "engine_adapter/kvtier_engine/intake.py"
SAMPLING = "engine_adapter/kvtier_engine/sampling.py"

SIZING_TESTS = "tests/engine/test_sizing.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="a length that exactly fits is refused",
        rules=(30,),
        file=CONFIG,
        old="    if num_needed > num_blocks:\n",
        new="    if num_needed >= num_blocks:\n",
        tests=(f"{SIZING_TESTS}::test_r30_*",),
    ),
    Mutant(
        name="a length may need a block more than there are",
        rules=(30,),
        file=CONFIG,
        old="    if num_needed > num_blocks:\n",
        new="    if num_needed > num_blocks + 1:\n",
        tests=(f"{SIZING_TESTS}::test_r30_*",),
    ),
    Mutant(
        name="a pool that holds nothing names a length",
        rules=(30,),
        file=CONFIG,
        old=' if estimate > 0 else ""',
        new="",
        tests=(f"{SIZING_TESTS}::test_r30_*",),
    ),
    Mutant(
        name="a length that fits is cut with a line in the log",
        rules=(31,),
        file=CONFIG,
        old="    if pool_tokens >= derived:\n",
        new="    if pool_tokens > derived:\n",
        tests=(f"{SIZING_TESTS}::test_r31_*",),
    ),
    Mutant(
        name="a length that does not fit is kept",
        rules=(31,),
        file=CONFIG,
        old="    return pool_tokens\n",
        new="    return derived\n",
        tests=(f"{SIZING_TESTS}::test_r31_*",),
    ),
    Mutant(
        name="a pool that holds no request is accepted",
        rules=(31,),
        file=CONFIG,
        old="    if pool_tokens < 2:\n",
        new="    if pool_tokens < 0:\n",
        tests=(f"{SIZING_TESTS}::test_r31_*",),
    ),
    Mutant(
        name="a prompt may be as long as the model",
        rules=(32,),
        file=INTAKE,
        old="    if len(prompt) == max_model_len:\n",
        new="    if len(prompt) == max_model_len + 1:\n",
        tests=(f"{SIZING_TESTS}::test_r32_*",),
    ),
    Mutant(
        name="an empty prompt is let in",
        rules=(32,),
        file=INTAKE,
        old="    if not len(prompt):\n",
        new="    if len(prompt) < 0:\n",
        tests=(f"{SIZING_TESTS}::test_r32_*",),
    ),
    Mutant(
        name="-1 is a number of tokens",
        rules=(33,),
        file=SAMPLING,
        old="    if asked is None or asked <= 0:\n",
        new="    if asked is None or asked == 0:\n",
        tests=(f"{SIZING_TESTS}::test_r33_*",),
    ),
    Mutant(
        name="a default goes before what was asked for",
        rules=(33,),
        file=SAMPLING,
        old="    if asked is None or asked <= 0:\n",
        new="    if asked is None or asked <= 0 or default is not None:\n",
        tests=(f"{SIZING_TESTS}::test_r33_*",),
    ),
    Mutant(
        name="who reaches the length was stopped",
        rules=(34,),
        file="engine_adapter/kvtier_engine/outputs.py",
        old="        return FinishReason.LENGTH\n",
        new="        return FinishReason.STOP\n",
        tests=(f"{SIZING_TESTS}::test_r34_*",),
    ),
    Mutant(
        name="a request needs a token more than it has",
        rules=(35,),
        file=CAPACITY,
        old="request.blocks_for(len(request.tokens) + 1)",
        new="request.blocks_for(len(request.tokens) + 2)",
        tests=(f"{SIZING_TESTS}::test_r35_whatever_*",),
    ),
]
