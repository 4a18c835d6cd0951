"""For people who write connectors, and schedulers over one: a model whose output depends on every block it reads, a
connector that does what the test says, and witnesses of what happened.

* `FakeRunner`, `FakeSampler`: a model at no cost; `expected_tokens` is its oracle, `linear_cost` lets time pass.
* `PageWriteLog`: who wrote which block when, and which of them must not have.
* `ScriptedConnector`: tiers that hold what they are told, and work that ends when it is told.
* `Recorder`: verdicts, outputs and log lines, step by step.
* `fingerprint`, `difference`, `unchanged`: proof that a question changed nothing.
"""

from kvtier_engine.testing.fake_model import FakeRunner, FakeSampler, block_contents, expected_tokens, linear_cost
from kvtier_engine.testing.fingerprint import Fingerprint, difference, fingerprint, unchanged
from kvtier_engine.testing.pages import PageWrite, PageWriteLog
from kvtier_engine.testing.recorder import LogLine, Recorder, StepRecord
from kvtier_engine.testing.scripted import ScriptedConnector
from kvtier_engine.testing.tasks import IgnoredDelivery, Task, TaskKind

__all__ = [
    "FakeRunner",
    "FakeSampler",
    "block_contents",
    "expected_tokens",
    "linear_cost",
    "PageWrite",
    "PageWriteLog",
    "ScriptedConnector",
    "IgnoredDelivery",
    "Task",
    "TaskKind",
    "LogLine",
    "Recorder",
    "StepRecord",
    "Fingerprint",
    "difference",
    "fingerprint",
    "unchanged",
]
