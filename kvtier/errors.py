"""The exceptions kvtier raises for a caller's mistakes; a cache miss is a value, never one of these."""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConfigError",
    "ForkedError",
    "FrameError",
    "IntegrityError",
    "KVTierError",
    "LayoutError",
    "LeaseError",
    "ProtocolError",
    "TierError",
    "TokenError",
]


class KVTierError(Exception):
    """Root of every exception that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """A setting is unknown, malformed, or contradicts another or the machine; the message names it and the way out."""


class LayoutError(KVTierError, ValueError):
    """A KV layout or pool shape that kvtier cannot store, or that is not the one a store was opened for."""


class TokenError(KVTierError, ValueError):
    """Tokens or chain extras that cannot be hashed: out of range, or not integers."""


class LeaseError(KVTierError, RuntimeError):
    """A lease or reservation was used after it ended, or ended twice."""


class ClosedError(KVTierError, RuntimeError):
    """The object was used after `close()`."""


class ForkedError(KVTierError, RuntimeError):
    """A store opened before a fork was used in the child; open one in the child instead."""


class IntegrityError(KVTierError, AssertionError):
    """`check_integrity()` found a broken invariant of ours: a bug in kvtier, or memory scribbled over."""


class FrameError(KVTierError, ValueError):
    """Bytes that are no frame, or a damaged one: a miss, wherever a tier meets them."""


class ProtocolError(KVTierError, ValueError):
    """What came on a connection between a client and kvtier-server is none of their messages, or not at its time; the
    text says what came instead. The connection is of no use any more."""


class TierError(KVTierError, RuntimeError):
    """A tier below the host could not do what may not fail in silence, such as remembering a reset."""
