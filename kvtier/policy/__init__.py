"""In which order resident blocks give way: one contract, one module each, and policies by name."""

from kvtier.policy.base import NO_PARENT, EvictionPolicy, PolicyFactory
from kvtier.policy.guarded import GuardedPolicy
from kvtier.policy.lru import TailsFirstLRU
from kvtier.policy.named import BUILT_IN, POLICY_GROUP, policy_factory
from kvtier.policy.s3fifo import S3FIFO

__all__ = [
    "BUILT_IN",
    "NO_PARENT",
    "POLICY_GROUP",
    "S3FIFO",
    "EvictionPolicy",
    "GuardedPolicy",
    "PolicyFactory",
    "TailsFirstLRU",
    "policy_factory",
]
