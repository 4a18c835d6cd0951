"""The Redis tier: KV blocks in the memory of other machines. Needs redis-py: pip install 'kvtier[redis]'."""

from kvtier.tiers.redis.snapshot import RedisSnapshot
from kvtier.tiers.redis.tier import RedisTier

__all__ = ["RedisSnapshot", "RedisTier"]
