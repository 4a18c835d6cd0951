"""Engine-facing side of kvtier: the connector contract and its implementation."""

from kvtier_connectors.connector import Connector, FlushResult
from kvtier_connectors.contract import (
    WRITTEN,
    BlockPoolView,
    ConnectorScheduler,
    ConnectorWorker,
    CopyDirection,
    CopyJob,
    CopyResult,
    KVOptions,
    Match,
    RequestInfo,
    RestoreOutcome,
    StepDemand,
    TransferPlan,
    WriteFence,
)
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.worker import KVTierWorker

__all__ = [
    "WRITTEN",
    "BlockPoolView",
    "Connector",
    "ConnectorScheduler",
    "ConnectorWorker",
    "CopyDirection",
    "CopyJob",
    "CopyResult",
    "FlushResult",
    "KVOptions",
    "KVTierScheduler",
    "KVTierWorker",
    "Match",
    "RequestInfo",
    "RestoreOutcome",
    "StepDemand",
    "TransferPlan",
    "WriteFence",
]
