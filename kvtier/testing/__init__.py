"""For people who write tiers and connectors: the conformance suite, a dictionary tier, faults on order, clock and
executors under control.

`kvtier.testing.conformance` needs pytest and is imported by name.
"""

from kvtier.testing.clock import FakeClock
from kvtier.testing.executor import InlineExecutor, ManualExecutor
from kvtier.testing.faults import FaultyTier
from kvtier.testing.tier import DictTier, RemoteDictTier

__all__ = ["DictTier", "FakeClock", "FaultyTier", "InlineExecutor", "ManualExecutor", "RemoteDictTier"]
