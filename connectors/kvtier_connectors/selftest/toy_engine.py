"""As much of an engine as the connector needs: a pool of blocks in numpy memory, and a step."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.keys import BlockDigest, Namespace
from kvtier.store import Store
from kvtier_connectors.connector import Connector
from kvtier_connectors.contract import WRITTEN, Match, RequestInfo, RestoreOutcome, StepDemand
from kvtier_kernels import BlockPlanes

__all__ = ["StuckError", "ToyBlocks", "ToyEngine"]

SETTLE_TIMEOUT_S = 10.0  # a job copies 32 MiB
POLL_S = 0.1


class StuckError(KVTierError):
    """Copies did not come to an end in time."""


class ToyBlocks:
    """Owns which blocks are free and in which order, and the pins. A `BlockPoolView`."""

    def __init__(self, num_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._pins: Counter[int] = Counter()
        self.num_blocks = num_blocks
        self.queue_version = 0

    def free_queue(self) -> Iterable[int]:
        return self._queue

    def pin(self, block_id: int, holder: str) -> None:
        del holder
        self._pins[block_id] += 1

    def unpin(self, block_id: int) -> None:
        self._pins[block_id] -= 1

    def take(self, count: int, avoiding: Collection[int] = ()) -> list[int]:
        """The next `count` blocks of the queue that are neither pinned nor to be avoided."""
        ids = list(islice((b for b in self._queue if not self._pins[b] and b not in avoiding), count))
        assert len(ids) == count, "the toy engine's pool is too small for its chains"
        for block_id in ids:
            del self._queue[block_id]
        self.queue_version += 1
        return ids

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Free blocks of one chain: its tail is reused first."""
        self._queue.update(dict.fromkeys(reversed(block_ids)))
        self.queue_version += 1


class ToyEngine:
    """Owns the GPU pool's stand-in, `memory` [num_planes, num_blocks, segment_bytes], a connector beside it, and the
    store it was given.

    step_budget: blocks that a step may take, which is how far ahead of reuse blocks are stored.
    """

    def __init__(self, store: Store, namespace: Namespace, num_blocks: int, step_budget: int) -> None:
        layout = namespace.layout
        self.memory: npt.NDArray[np.uint8] = np.zeros((layout.num_planes, num_blocks, layout.segment_bytes), np.uint8)
        self.blocks = ToyBlocks(num_blocks)
        self.store = store
        planes = BlockPlanes.from_arrays(list(self.memory))
        self.connector = Connector(store.settings, namespace, self.blocks, planes, store=store)
        self._step_budget = step_budget
        self._reused: list[int] = []
        self._num_requests = 0

    def begin_chain(
        self, digests: Sequence[BlockDigest], count: int, avoiding: Collection[int] = (), first_block: int = 0
    ) -> tuple[str, list[int]]:
        """A request, and `count` blocks for a part of its chain; copies that this makes due begin.

        first_block: the blocks before it are taken to be in the engine's own cache.
        """
        self._num_requests += 1
        request_id = f"request {self._num_requests}"
        self.connector.scheduler.start_request(RequestInfo(request_id, digests, num_local_blocks=first_block))
        ids = self.blocks.take(count, avoiding)
        self._reused += ids
        self._step()
        return request_id, ids

    def match(self, request_id: str, first_block: int, count: int) -> Match:
        """What can be restored, once nothing of the request is on its way to host memory any more."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            found = self.connector.scheduler.match(request_id, first_block, count)
            if not found.is_staging:
                return found
            self.connector.scheduler.complete(self.connector.worker.poll(POLL_S))
            self.connector.scheduler.poll_restores()
        raise StuckError(f"blocks did not come to host memory within {SETTLE_TIMEOUT_S:g} s")

    def end_chain(self, request_id: str, first_block: int, block_ids: Sequence[int], num_filled: int) -> None:
        """The first `num_filled` of the blocks hold their KV; the request ends."""
        self.connector.scheduler.publish(request_id, first_block, block_ids[:num_filled])
        self.connector.scheduler.finish_request(request_id)
        self.blocks.give_back(block_ids)
        self.settle()

    def settle(self, waiting: int = 0) -> list[RestoreOutcome]:
        """Step until nothing is being copied. waiting: blocks about to be taken, whose contents are to be stored."""
        outcomes: list[RestoreOutcome] = []
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            in_flight, ended = self._step(waiting, wait=True)
            outcomes += ended
            if not in_flight:
                return outcomes
        raise StuckError(f"copies did not come to an end within {SETTLE_TIMEOUT_S:g} s")

    def close(self) -> None:
        self.connector.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, waiting: int = 0, *, wait: bool = False) -> tuple[int, list[RestoreOutcome]]:
        reused, self._reused = self._reused, []
        scheduler, worker = self.connector.scheduler, self.connector.worker
        plan = scheduler.plan_step(reused, StepDemand(len(reused), self._step_budget, waiting))
        worker.submit(plan, WRITTEN)
        results = worker.poll(SETTLE_TIMEOUT_S if wait and plan.in_flight else 0.0)
        outcomes = scheduler.complete(results)
        return plan.in_flight, [*outcomes, *scheduler.poll_restores().outcomes]
