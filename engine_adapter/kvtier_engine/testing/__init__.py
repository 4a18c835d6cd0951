"""For people who write connectors: a model whose output depends on every block it reads, at no cost."""

from kvtier_engine.testing.fake_model import FakeRunner, FakeSampler, expected_tokens

__all__ = ["FakeRunner", "FakeSampler", "expected_tokens"]
