"""Policies by name: the built-in ones, and those of other packages by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvtier.errors import ConfigError
from kvtier.policy.base import PolicyFactory
from kvtier.policy.lru import TailsFirstLRU
from kvtier.policy.s3fifo import S3FIFO

__all__ = ["BUILT_IN", "POLICY_GROUP", "policy_factory"]

POLICY_GROUP = "kvtier.eviction_policies"
BUILT_IN: dict[str, PolicyFactory] = {"lru": TailsFirstLRU, "s3fifo": S3FIFO}


def policy_factory(name: str) -> PolicyFactory:
    """What makes policies of this name: a built-in one's class, or what an entry point of `POLICY_GROUP` names.

    Raises ConfigError, which lists the names there are, for one that is none, is there twice, or cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=POLICY_GROUP)
    named = [point for point in found if point.name == name]
    if len(named) != 1:
        known = ", ".join([*BUILT_IN, *sorted({point.name for point in found} - BUILT_IN.keys())])
        what = (
            f"is named by {len(named)} packages: remove all but one" if named else f"is no policy: use one of {known}"
        )
        raise ConfigError(f"host.policy = {name!r} {what}")
    try:
        factory = named[0].load()
    except Exception as error:
        raise ConfigError(f"host.policy = {name!r}: {named[0].value} cannot be imported: {error!r}") from error
    if not callable(factory):
        raise ConfigError(f"host.policy = {name!r}: {named[0].value} is no callable that makes a policy")
    made: PolicyFactory = factory
    return made
