"""What one request asks of kvtier."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvtier.errors import ConfigError

__all__ = ["NO_OPTIONS", "KVOptions"]

MAX_TENANT_BYTES = 64


@dataclass(frozen=True, slots=True)
class KVOptions:
    """What one request asks of kvtier. Raises ConfigError for values that mean nothing.

    restore: False opts out: nothing is restored for it and no hit rate counts it.
    store: False keeps the blocks that it fills out of every tier. One that another request had computed, or computes
        later, is stored for that request.
    max_wait_s: seconds it waits at most for blocks to come to host memory; None is `restore.max_wait_s`, 0 takes only
        what is there.
    max_restore_tokens: the most of its prompt that is restored; None is all of it.
    priority: who goes first, of the staged too: lower before higher. 0 where the engine does not schedule by it.
    tenant: whose blocks it fills are, for `host.quotas`; no name is whoever has none.
    ttl_s: seconds for which the blocks that it fills are worth keeping in tiers that have lifetimes; None: as those
        are set.
    """

    restore: bool = True
    store: bool = True
    max_wait_s: float | None = None
    max_restore_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("restore", "store"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"KVOptions.{name} must be True or False, not {getattr(self, name)!r}")
        wait, tokens = self.max_wait_s, self.max_restore_tokens
        if wait is not None and (isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < inf):
            raise ConfigError(f"KVOptions.max_wait_s must be seconds from 0 on, or None, not {wait!r}")
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            raise ConfigError(f"KVOptions.max_restore_tokens must be an integer from 0 on, or None, not {tokens!r}")
        if type(self.priority) is not int:
            raise ConfigError(f"KVOptions.priority must be an integer, not {self.priority!r}")
        if not isinstance(self.tenant, str) or len(self.tenant.encode("utf-8", "replace")) > MAX_TENANT_BYTES:
            raise ConfigError(
                f"KVOptions.tenant must be text of at most {MAX_TENANT_BYTES} bytes, not {self.tenant!r:.200}"
            )
        ttl = self.ttl_s
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 1 <= ttl < inf):
            raise ConfigError(f"KVOptions.ttl_s must be seconds from 1 on, or None, not {ttl!r}")


NO_OPTIONS = KVOptions()
