"""A small real paged-attention engine that proves kvtier on a real model and can be read in an evening.

`kvtier_engine.llm.LLM` is the way in; it needs the `engine` extra. Importing this package needs neither torch nor it.
"""

from kvtier_engine.config import EngineConfig
from kvtier_engine.errors import EmptyPromptError, PromptTooLongError, RequestError
from kvtier_engine.request import FinishReason, RequestOutput
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.sampling import SamplingParams

__all__ = [
    "BatchItem",
    "EmptyPromptError",
    "EngineConfig",
    "FinishReason",
    "ModelRunner",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
