"""Does a step's cost depend on how many requests wait?

Measures whole steps of a real engine with kvtier and its disk tier (events, restores, admission, planning copies; the
model itself costs nothing): one request decodes, a number of *waiting* requests are blocked for lack of blocks though
slots are free, and a number of restores are *active*: their blocks are on their way from a disk that does not answer.
Each figure is a step's time beside that of another number of requests, measured in turn in the same process.

    python -m benchmarks.scheduler_step [--json] [--runs 9]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from benchmarks import command
from kvtier_connectors.bench.figures import Figure, measure_pairs
from kvtier_engine import BatchItem, SamplingParams
from kvtier_engine.testing.disk import DiskRig
from kvtier_engine.testing.fake_model import FakeRunner

BLOCK_TOKENS = 16
NUM_BLOCKS = 128
STORED_BLOCKS = 2
STEPS = 100

BARS = {
    "step.waiting_500": ("500 blocked, 1 active, beside 1 of each", 2.0),
    "step.waiting_10000": ("10,000 blocked, 1 active, beside 500", 1.2),
    "step.active_64": ("1 blocked, 64 active, beside 1 of each", None),
}


class QuickRunner(FakeRunner):
    """The fake model, until it is told to cost nothing."""

    is_quick = False

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        if not self.is_quick:
            return super().execute(batch)
        return [None if item.sampler is None else 1 for item in batch]


class Scene:
    """An engine with one request that decodes, `num_waiting` that are blocked, and `num_active` restores under way."""

    def __init__(self, path: Path, num_waiting: int, num_active: int) -> None:
        self.runner = QuickRunner(NUM_BLOCKS, BLOCK_TOKENS)
        self.rig = DiskRig(
            path,
            NUM_BLOCKS,
            1024,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=8,
            max_batch_tokens=2048,
            runner=self.runner,
        )
        for index in range(num_active):
            self.rig.generate(self._stored_prompt(index))
        self.rig.flush_gpu()
        self.rig.forget_host()
        self.runner.is_quick = True
        engine, forever = self.rig.engine, SamplingParams(max_tokens=None)
        engine.add_request("running", [7] * (10 * BLOCK_TOKENS), forever)
        engine.step()
        for index in range(num_active):
            engine.add_request(f"restore {index}", [*self._stored_prompt(index), 9], forever)
        for index in range(num_waiting):
            engine.add_request(f"blocked {index}", [index + 10, *[8] * (NUM_BLOCKS * BLOCK_TOKENS - 100)], forever)
        for _ in range(20):
            engine.step()
        stats = engine.scheduler.stats()
        found = (stats.running, stats.waiting_for_place, stats.waiting_for_stage)
        if found != (1, num_waiting, num_active):
            raise SystemExit(f"the scene is not as meant: running, blocked, active are {found}")

    def step(self) -> float:
        """Seconds a step takes, over many."""
        step = self.rig.engine.step
        begun_at = perf_counter()
        for _ in range(STEPS):
            step()
        return (perf_counter() - begun_at) / STEPS

    def close(self) -> None:
        self.rig.close()

    @staticmethod
    def _stored_prompt(index: int) -> list[int]:
        return [20_000 + index] * (STORED_BLOCKS * BLOCK_TOKENS)


def measure(figure: str, scene: tuple[int, int], base: tuple[int, int], runs: int) -> Figure:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        scenes = [Scene(Path(first), *scene), Scene(Path(second), *base)]
        try:
            return measure_pairs(figure, "16-token blocks", "s", scenes[0].step, scenes[1].step, runs)
        finally:
            for each in scenes:
                each.close()


def measure_all(runs: int) -> list[Figure]:
    return [
        measure("step.waiting_500", (500, 1), (1, 1), runs),
        measure("step.waiting_10000", (10_000, 1), (500, 1), runs),
        measure("step.active_64", (1, 64), (1, 1), runs),
    ]


if __name__ == "__main__":
    command.run("scheduler_step", __doc__, measure_all, BARS, runs=9, unit="us")
