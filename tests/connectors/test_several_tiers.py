"""Blocks that two tiers hold, the first of which is sick, slow or wrong or gives nothing back: the other has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.index import BlockState
from kvtier.keys import BlockDigest, make_key
from kvtier.lower import LowerTier
from kvtier.opened import OpenedTier, TierLimits
from kvtier.restore import RestoreDecision
from kvtier.testing import RemoteDictTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier
from kvtier.tiers.wrapper import TierWrapper
from kvtier_connectors.contract import StepDemand, StepWork
from kvtier_engine.testing.disk import DiskRig, SteppedExecutor

OpenBoth = Callable[..., "BothRig"]


def prompt(size: int = 17, start: int = 0) -> list[int]:
    return list(range(start, start + size))


class Failing(TierWrapper):
    """A tier whose first `times` reads end as told."""

    def __init__(self, tier: Tier, how: ReadOutcome | type[Exception], times: int = 1000) -> None:
        super().__init__(tier)
        self.how = how
        self.times = times
        self.num_reads = 0

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        self.num_reads += 1
        if self.num_reads > self.times:
            return super().read(requests)
        if not isinstance(self.how, ReadOutcome):
            raise self.how("no")
        return [self.how] * len(requests)


class BothRig(DiskRig):
    """As a `DiskRig`, with a remote tier behind the disk, whose jobs run on `remote_jobs`."""

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.remote_jobs = SteppedExecutor()
        self.remote_tier = RemoteDictTier()
        super().__init__(path, **kwargs)
        limits = TierLimits(writers=2, timeout_s=1.0, max_cooldown_s=5.0)
        self.opened._below.add(OpenedTier(self.remote_tier, limits), self.remote_jobs)

    @property
    def remote(self) -> LowerTier:
        return self.opened.tier("remote")

    def settle(self) -> None:
        super().settle()
        while self.remote_jobs.run_all():
            super().settle()

    def _run_inline(self) -> None:
        self.remote_jobs.inline = True
        super()._run_inline()

    def _run_when_told(self) -> None:
        self.remote_jobs.inline = False
        super()._run_when_told()

    def close(self) -> None:
        self.remote_jobs.release()
        super().close()


@pytest.fixture
def open_both(tmp_path: Path) -> Iterator[OpenBoth]:
    """Opens an engine over a disk and a remote tier, four blocks of each of three prompts in both and nowhere else."""
    with ExitStack() as stack:

        def make(*, is_known: bool = True, **kwargs: Any) -> BothRig:
            """is_known: whether this process knows that the remote tier has them."""
            rig = BothRig(tmp_path / "disk", **kwargs)
            stack.callback(rig.close)
            for start in (0, 100, 200):
                rig.generate(prompt(start=start))
                rig.forget_host()
            rig.flush_gpu()
            rig.forget_host()
            if not is_known:
                assert rig.remote._known is not None
                rig.remote._known.clear()
            return rig

        yield make


@pytest.fixture(autouse=True)
def forget_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is logged with a traceback holds views of the host pool, which would look like a leak."""
    yield
    caplog.get_records("call").clear()


def hits(rig: BothRig) -> dict[str, int]:
    stats = rig.opened.stats()
    assert stats.hit_blocks + sum(stats.misses.values()) == stats.asked_blocks
    return dict(stats.hits)


def decision_of(rig: BothRig) -> RestoreDecision:
    assert rig.engine.connector is not None
    return rig.engine.connector.scheduler._restores.decision


def drive(rig: BothRig, request_id: str, tick_s: float) -> None:
    """Step until it ends, whatever hangs meanwhile."""
    for _ in range(200):
        rig.step()
        rig.executor.run_all()
        rig.remote_jobs.run_all()
        rig.disk_jobs.run_all()
        if request_id in rig.finished:
            return
        rig.clock.advance(tick_s)
    raise AssertionError(f"{request_id} does not end")


KNOWN = pytest.mark.parametrize("is_known", [False, True], ids=["asked", "known"])


@KNOWN
def test_a_tier_whose_breaker_is_open_is_passed_by(open_both: OpenBoth, *, is_known: bool) -> None:
    rig = open_both(is_known=is_known)
    rig.lower._guard.breaker.trip()
    assert rig.generate(prompt()).restored_tokens == 16
    assert hits(rig) == {"remote": 4}
    rig.verify_quiet()


@KNOWN
@pytest.mark.parametrize("how", [ReadOutcome.ERROR, ReadOutcome.MISS, ReadOutcome.DAMAGED, OSError])
def test_what_one_tier_fails_to_read_the_next_attempt_has_from_another(
    open_both: OpenBoth, how: ReadOutcome | type[Exception], *, is_known: bool
) -> None:
    rig = open_both(is_known=is_known, restore__max_attempts=2)
    failing: list[Failing] = []

    def wrap(tier: Tier) -> Tier:
        failing.append(Failing(tier, how))
        return failing[0]

    rig.put_between(wrap)
    assert rig.generate(prompt()).restored_tokens == 16
    assert hits(rig) == {"remote": 4}
    assert failing[0].num_reads == 1, "it still seems to hold them, and is not asked twice"
    assert rig.opened.stats().fallbacks == {}
    rig.verify_quiet()


def test_what_only_the_tier_that_failed_holds_is_tried_there_again(open_both: OpenBoth) -> None:
    rig = open_both()
    keys = list(rig.remote_tier._blocks)
    rig.remote_tier.remove(keys)
    assert rig.remote._known is not None
    rig.remote._known.clear()
    rig.put_between(lambda tier: Failing(tier, OSError, times=1))
    assert rig.generate(prompt()).restored_tokens == 16
    assert hits(rig) == {"disk": 4}
    rig.verify_quiet()


@KNOWN
def test_a_tier_that_gives_nothing_back_is_passed_by(open_both: OpenBoth, *, is_known: bool) -> None:
    rig = open_both(is_known=is_known, restore__max_staging=64, restore__max_attempts=1)
    compute_takes(rig, 1000.0)
    stager = rig.opened.stager
    rig.disk_jobs.shut()
    for number in range(2):  # blocks on their way that nobody waits for any more
        rig.add(f"gone {number}", prompt(start=100 * (number + 1)))
        rig.step()
        rig.remote_jobs.run_all()
        rig.step()
        rig.disk_jobs.run_all()
        rig.abort(f"gone {number}")
    rig.clock.advance(1.0)
    assert stager._queue.is_lost(rig.lower)
    assert rig.lower.is_available, "nobody has found it sick yet"
    rig.add("a", prompt())
    drive(rig, "a", 0.001)
    assert hits(rig)["remote"] == 4
    rig.disk_jobs.release()
    rig.run()
    rig.verify_quiet()


@KNOWN
@pytest.mark.parametrize("after_s", [0.0, 1.0, 100.0])
def test_while_reads_of_the_disk_hang_the_other_tier_serves(
    open_both: OpenBoth, after_s: float, *, is_known: bool
) -> None:
    rig = open_both(is_known=is_known)
    compute_takes(rig, 1.0)
    rig.disk_jobs.shut()
    rig.add("first", prompt())
    drive(rig, "first", 0.1)
    assert hits(rig) == {}, "as long as nobody knows, it is waited for, and computed"
    rig.clock.advance(5.0)
    rig.flush_gpu()
    host = rig.opened.host
    for space, digest, _, state in list(host._index.items()):  # not what the read that hangs has set aside
        if state is BlockState.COMMITTED:
            host.remove([make_key(space, BlockDigest(digest))])
    rig.clock.advance(after_s)  # the breaker lets one call through by then
    before = rig.clock.now()
    rig.add("a", prompt())
    drive(rig, "a", 0.01)
    assert rig.clock.now() - before < 0.1
    assert hits(rig) == {"remote": 4}
    rig.disk_jobs.release()
    rig.run()
    rig.verify_quiet()


@KNOWN
@pytest.mark.parametrize("why", ["rate", "queue"])
def test_what_is_too_slow_from_one_tier_comes_from_another(open_both: OpenBoth, why: str, *, is_known: bool) -> None:
    rig = open_both(is_known=is_known)
    compute_takes(rig, 1.0)
    decision = decision_of(rig)
    decision.observe_restore("disk", 256, 0, 100.0 if why == "rate" else 0.1)
    decision.observe_restore("remote", 1 << 20, 0, 0.01)
    if why == "queue":
        queued_bytes = rig.opened.stager.queued_bytes
        rig.opened.stager.queued_bytes = lambda source: queued_bytes(source) + (1 << 20 if source is rig.lower else 0)  # type: ignore[method-assign]
    assert rig.generate(prompt()).restored_tokens == 16
    assert hits(rig) == {"remote": 4}
    rig.verify_quiet()


def test_where_every_tier_is_too_slow_nobody_is_asked_and_it_is_computed(open_both: OpenBoth) -> None:
    rig = open_both(is_known=False)
    compute_takes(rig, 1.0)
    decision = decision_of(rig)
    decision.observe_restore("disk", 256, 0, 100.0)
    decision.observe_restore("remote", 256, 0, 100.0)
    asked = rig.remote_tier.num_asked
    rig.add("a", prompt())
    assert rig.step().num_tokens == 17, "the step it came in"
    rig.run()
    assert rig.remote_tier.num_asked == asked
    assert hits(rig) == {}
    rig.verify_quiet()


def compute_takes(rig: BothRig, seconds: float) -> None:
    """Let a prompt of 17 tokens take so long."""
    assert rig.engine.connector is not None
    rig.engine.connector.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(17, 0.0, seconds, 0)))
