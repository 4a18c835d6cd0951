"""Conformance cases that every back end passes, with bytes exact.

A test parametrises over `pool_shapes()`, `SLOT_ORDERS` and `BAD_CALLS`; the `verify_*` functions raise AssertionError.
Expected bytes come from slicing the arrays that the pool was made of.
"""

from kvtier_kernels.testing.moves import (
    SLOT_ORDERS,
    host_for,
    id_lists,
    slot_offsets,
    verify_gather,
    verify_round_trip,
    verify_scatter,
)
from kvtier_kernels.testing.pools import LAYOUTS, Pool, PoolShape, View, pool_shapes
from kvtier_kernels.testing.refusals import BAD_CALLS, BadCall, verify_refused

__all__ = [
    "BAD_CALLS",
    "LAYOUTS",
    "SLOT_ORDERS",
    "BadCall",
    "Pool",
    "PoolShape",
    "View",
    "host_for",
    "id_lists",
    "pool_shapes",
    "slot_offsets",
    "verify_gather",
    "verify_refused",
    "verify_round_trip",
    "verify_scatter",
]
