"""Several workers, one verdict: a copy counts when every rank has done it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_connectors.contract import CopyFailure, CopyResult, RestoreOutcome
from kvtier_connectors.ranks import RankResults
from kvtier_engine.testing.rig import ConnectorRig

OpenRig = Callable[..., ConnectorRig]
PROMPT = list(range(12))


def told(
    job_id: int, verdicts: str, *, rank: int, failure: CopyFailure | None = None, seconds: float = 0.0
) -> CopyResult:
    """verdicts: a 1 for each block that is copied, a 0 for each that is not."""
    return CopyResult(job_id, tuple(verdict == "1" for verdict in verdicts), failure, seconds, rank)


def landing(open_rig: OpenRig, num_ranks: int = 2) -> tuple[ConnectorRig, int, list[int]]:
    """A rig of several ranks whose three blocks are being restored; the job, and the blocks that it writes."""
    rig = open_rig(num_ranks=num_ranks)
    rig.finish("before", rig.compute("before", PROMPT))
    (store,) = rig.plan(rig.pool.num_blocks, submit=False).jobs
    for rank in range(num_ranks):
        assert rig.ledger.stored == 0, "not before each has told"
        rig.collect([told(store.job_id, "111", rank=rank)])
    assert rig.ledger.stored == 3
    rig.pool.reset_cache()
    rig.start("a", PROMPT)
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    assert rig.scheduler.admit("a", 0, 3, blocks) == 3
    (job,) = rig.plan(submit=False).jobs
    return rig, job.job_id, blocks


def test_r63_a_block_that_one_rank_did_not_copy_is_not_copied(open_rig: OpenRig) -> None:
    rig, job, blocks = landing(open_rig)
    assert rig.collect([told(job, "111", rank=1)]) == []
    assert rig.pins() == sorted(blocks), "the other rank still writes them"
    assert rig.collect([told(job, "101", rank=0)]) == [RestoreOutcome("a", 0, 1, will_retry=True)]
    assert rig.pins() == []


def test_r63_one_rank_that_fails_is_enough(open_rig: OpenRig) -> None:
    rig, job, _ = landing(open_rig, 3)
    results = [told(job, "111", rank=rank) for rank in (0, 1)]
    assert rig.collect([*results, told(job, "", rank=2, failure=CopyFailure.RAISED)]) == [
        RestoreOutcome("a", 0, 0, will_retry=True)
    ]


def test_r71_pages_are_free_only_after_every_rank_ended(open_rig: OpenRig) -> None:
    rig, job, blocks = landing(open_rig)
    rig.finish("a", blocks)
    rig.collect([told(job, "111", rank=0)])
    assert rig.pins() == sorted(blocks)
    assert rig.collect([told(job, "111", rank=1)]) == []
    assert rig.pins() == []
    assert rig.pool.num_free == rig.pool.num_blocks
    assert rig.store.stats().leases == 0


@pytest.mark.parametrize("rank", [0, 2, -1, True, None, "0", 1.0])
def test_r73_a_rank_that_is_unknown_or_has_told_is_ignored(open_rig: OpenRig, rank: Any) -> None:
    rig, job, blocks = landing(open_rig)
    rig.collect([told(job, "111", rank=0)])
    assert rig.collect([told(job, "000", rank=rank)]) == []
    assert rig.stats.stale_results == 1
    assert rig.pins() == sorted(blocks)
    assert rig.collect([told(job, "111", rank=1)]) == [RestoreOutcome("a", 0, 3)]
    assert rig.collect([told(job, "111", rank=1)]) == []
    assert rig.stats.stale_results == 2


def test_r81_a_source_is_pinned_until_every_rank_has_told(open_rig: OpenRig) -> None:
    rig = open_rig(num_ranks=2)
    blocks = rig.compute("a", PROMPT)
    rig.finish("a", blocks)
    (job,) = rig.plan(rig.pool.num_blocks, submit=False).jobs
    assert rig.pool.holders() == {"store": 3}
    rig.collect([told(job.job_id, "111", rank=1)])
    assert rig.pins() == sorted(blocks)
    rig.collect([told(job.job_id, "110", rank=0)])
    assert rig.pins() == []
    assert rig.ledger.stored == 2


def test_closing_ends_the_copies_that_no_rank_was_told_of(open_rig: OpenRig) -> None:
    rig, job, blocks = landing(open_rig)
    rig.collect([told(job, "111", rank=rank) for rank in (0, 1)])
    rig.finish("a", blocks)
    rig.start("b", PROMPT)
    again = rig.pool.allocate(3)
    assert again is not None
    assert rig.scheduler.admit("b", 0, 3, again) == 3
    rig.scheduler.close()
    assert rig.pins() == []
    assert rig.store.stats().leases == 0


def test_the_slowest_rank_is_the_copys_time_and_garbage_is_no_verdict() -> None:
    ranks = RankResults(3)
    assert ranks.take(told(1, "11", rank=0, seconds=0.5)) is None
    assert ranks.take(CopyResult(1, None, rank=1)) is None  # type: ignore[arg-type]
    joined = ranks.take(told(1, "11", rank=2, seconds=2.0))
    assert joined == CopyResult(1, (), None, 2.0)
    with pytest.raises(ConfigError):
        RankResults(0)
