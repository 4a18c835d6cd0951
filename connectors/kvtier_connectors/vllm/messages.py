"""What the two halves tell each other through vLLM, once a step. Ids and verdicts only; vLLM pickles them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier_connectors.contract import CopyJob, CopyResult

__all__ = ["HostAddress", "Landed", "StepPlan", "StepReport"]


@dataclass(frozen=True)
class HostAddress:
    """Where the host pool is: an open memfd of the process that has the scheduler half. run: as HostMemory's; 0: the
    engine's own, which stays, as that of a kvtier-server does not."""

    pid: int
    fd: int
    num_bytes: int
    run: int = 0


@dataclass(frozen=True)
class Landed:
    """A request whose copies have all ended. lost: its destination blocks that do not hold their bytes."""

    request_id: str
    lost: tuple[int, ...]


@dataclass
class StepPlan(KVConnectorMetadata):
    """To the workers. serial: counts plans. is_idle: the step computes nothing."""

    serial: int
    host: HostAddress | None
    """What these and later jobs' offsets are of; None: as they were told last."""
    jobs: tuple[CopyJob, ...]
    fence: tuple[int, ...]
    """Jobs that read what this step's forward writes."""
    landed: tuple[Landed, ...]
    is_idle: bool = False


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """From the workers. serial: of the plan whose step has ended."""

    serial: int
    results: list[CopyResult]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Of all workers of a step."""
        assert isinstance(other, StepReport)
        return StepReport(min(self.serial, other.serial), self.results + other.results)
