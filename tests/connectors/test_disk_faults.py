"""A disk that errs, lies, fills up, stalls and comes back: every output is a cold run's, every miss has its reason."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import TierError
from kvtier.testing import FaultyTier
from kvtier.testing.files import Fault
from kvtier_connectors.contract import KVOptions
from kvtier_engine.request import FinishReason
from kvtier_engine.testing.disk import DiskRig, disk_rigs
from kvtier_engine.verdict import Verdict

OpenDisk = Callable[..., DiskRig]

SMALL_DISK = "400KiB"  # some segments of 64 KiB, of seven blocks each


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def open_disk(directory: Path) -> Iterator[OpenDisk]:
    with disk_rigs(directory) as make:
        yield make


def verify_counts(rig: DiskRig) -> None:
    """Every block asked for was a hit of some tier or a miss with a reason."""
    stats = rig.opened.stats()
    assert stats.hit_blocks + sum(stats.misses.values()) == stats.asked_blocks
    assert sum(stats.hits.values()) == stats.hit_blocks


def damage(directory: Path, first_page: int = 1) -> None:
    """Change a byte in every page of every segment, from `first_page` on."""
    for file in directory.glob("segment-*"):
        content = bytearray(file.read_bytes())
        for at in range(first_page * 4096, len(content), 4096):
            content[at + 20] ^= 0xFF
        file.write_bytes(content)


@pytest.fixture(autouse=True)
def forget_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is logged with a traceback holds views of the host pool, which would look like a leak."""
    yield
    caplog.get_records("call").clear()


# ---- one fault at a time ---------------------------------------------------------------------------------------------


@pytest.mark.bug("HS06", "CR12", "CR14")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.READ_ERROR, "tier_error"),
        (Fault.SHORT_READ, None),
        ("file damaged", "damaged"),
        ("file cut", "tier_error"),
    ],
)
def test_a_failed_read_is_a_miss_and_is_not_tried_again(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture, fault: str, reason: str | None
) -> None:
    first = open_disk()
    first.generate(prompt(17))
    first.close()
    rig = open_disk(policy="off")
    if fault == "file damaged":
        damage(directory)
    elif fault == "file cut":
        for file in directory.glob("segment-*"):
            os.truncate(file, 4096)
    else:
        rig.files.inject(Fault(fault))
    output = rig.generate(prompt(17))
    verify_counts(rig)
    stats = rig.opened.stats()
    if reason is None:
        assert (output.restored_tokens, stats.hits, stats.fallbacks) == (16, {"disk": 4}, {})
    else:
        assert (output.restored_tokens, stats.misses, stats.fallbacks) == (0, {reason: 4}, {reason: 1})
        assert sum(record.levelno == logging.WARNING and reason in record.message for record in caplog.records) == 1
        calls = rig.files.calls["read"]
        reads = rig.disk.reads
        rig.flush_gpu()
        assert rig.generate(prompt(17)).restored_tokens == 0
        assert (rig.files.calls["read"], rig.disk.reads) == (calls, reads), "the device is not asked again"
        assert rig.opened.stats().fallbacks == {reason: 1}
    rig.verify_quiet()


@pytest.mark.bug("WR20", "CR14")
def test_the_part_before_a_damaged_block_lands(open_disk: OpenDisk, directory: Path) -> None:
    first = open_disk()
    first.generate(prompt(17))
    first.close()
    rig = open_disk(restore__max_staging=64)  # block by block
    damage(directory, first_page=5)  # the header page, then two pages a block
    assert rig.generate(prompt(17)).restored_tokens == 8
    assert (rig.opened.stats().hits, rig.opened.stats().misses) == ({"disk": 2}, {"damaged": 2})
    assert rig.disk.damaged_blocks == 1
    for restored in (12, 16):  # the one behind was damaged too, and not known to be
        rig.flush_gpu()
        rig.forget_host()
        assert rig.generate(prompt(17)).restored_tokens == restored, "computed again, and so stored again"
    rig.verify_quiet()


@pytest.mark.bug("CR14", "CR12")
@pytest.mark.parametrize(
    "fault",
    [
        Fault.WRITE_ERROR,
        Fault.SHORT_WRITE,
        Fault.TORN_WRITE,
        Fault.LOST_WRITE,
        Fault.FLIP_ON_WRITE,
        Fault.FULL_ON_WRITE,
        Fault.FULL_ON_ALLOCATE,
    ],
)
def test_a_failed_write_is_told_or_found_out_and_never_served(open_disk: OpenDisk, fault: Fault) -> None:
    rig = open_disk()
    rig.files.inject(fault, probability=0.7)
    for start in range(0, 400, 50):
        rig.generate(prompt(17, start))
        rig.settle()
    unstored = rig.flush()
    ledger = rig.disk.ledger
    assert ledger.due == ledger.stored + sum(ledger.dropped.values())
    if fault in (Fault.WRITE_ERROR, Fault.TORN_WRITE, Fault.FULL_ON_WRITE):
        assert unstored
    rig.files.heal()
    rig.clock.advance(600.0)
    rig.verify_quiet()
    rig.close()
    again = open_disk(seed=1)
    for start in range(0, 400, 50):
        again.generate(prompt(17, start))
        verify_counts(again)
    again.verify_quiet()


def test_a_full_disk_takes_no_writes_and_still_serves(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.generate(prompt(17))
    assert rig.flush() == 0
    rig.files.inject(Fault.FULL_ON_WRITE)
    rig.generate(prompt(17, 100))
    assert rig.flush() == 4
    assert list(rig.disk.read_only.values()) != []
    assert rig.disk.ledger.dropped != {}
    rig.files.heal()
    rig.clock.advance(600.0)
    assert rig.flush() == 0, "what found no room is tried again"
    assert rig.disk.blocks == 8
    rig.verify_quiet()


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("seed", range(6))
def test_a_tier_that_raises_anything_costs_hits_and_no_more(open_disk: OpenDisk, seed: int) -> None:
    rng = random.Random(seed)
    rig = open_disk(num_blocks=10, host_blocks=8, disk__size=SMALL_DISK)
    faulty = FaultyTier(rig.lower.device, seed, raise_rate=0.3, error_rate=0.1, damage_rate=0.1)
    rig.put_between(lambda _tier: faulty)
    for turn in range(40):
        rig.add(f"r{turn}", prompt(rng.randint(1, 20), 50 * rng.randrange(5)), rng.randint(1, 3))
        for _ in range(rng.randint(0, 3)):
            rig.step()
            rig.settle()
        rig.clock.advance(rng.choice([0.0, 0.1, 3.0, 70.0]))
        verify_counts(rig)
    rig.run()
    rig.verify_quiet()
    assert not any(output.error for output in rig.finished.values())
    assert faulty.injected, faulty
    assert sum(rig.disk.errors.values()) > 0


# ---- any order of anything -------------------------------------------------------------------------------------------


class DiskMachine(RuleBasedStateMachine):
    """Prompts share prefixes, pools and disk are tiny, the device does what it likes, and now and then all is closed,
    or dies, and opens again over the same directory."""

    @initialize(
        num_blocks=st.integers(3, 12),
        host_blocks=st.integers(2, 12),
        policy=st.sampled_from(["on_evict", "on_evict", "write_through", "off"]),
        overrides=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 4),
                "restore__max_staging": st.sampled_from([64, 200, "1MiB"]),
                "restore__max_inflight_blocks": st.sampled_from([1, 3, 64]),
                "store__max_inflight_blocks": st.sampled_from([1, 64]),
                "disk__min_uses": st.sampled_from([1, 1, 2]),
                "disk__codec": st.sampled_from(["raw", "lz4"]),
                "num_threads": st.sampled_from([1, 2, 4]),
            }
        ),
        seed=st.integers(0, 1 << 16),
    )
    def begin(self, num_blocks: int, host_blocks: int, policy: str, overrides: dict[str, object], seed: int) -> None:
        self.directory = tempfile.mkdtemp()
        self.seed = seed
        self.tier_faults = 0.0
        self.num_talks = 0
        self.kwargs = {
            "num_blocks": num_blocks,
            "host_blocks": host_blocks,
            "policy": policy,
            "block_tokens": 2,
            "max_batch_tokens": 12,
            "disk__size": SMALL_DISK,
            **overrides,
        }
        self.open()

    def open(self) -> None:
        self.seed += 1
        self.rig = DiskRig(Path(self.directory) / "disk", seed=self.seed, **self.kwargs)  # type: ignore[arg-type]
        self.wrap()

    def wrap(self) -> None:
        seed, rate = self.seed, self.tier_faults
        if not rate:
            self.rig.put_between(lambda tier: tier)
            return
        self.rig.put_between(
            lambda tier: FaultyTier(tier, seed, raise_rate=rate / 3, error_rate=rate, damage_rate=rate)
        )

    # ---- requests and steps

    @rule(
        name=st.sampled_from("abcdef"),
        head=st.integers(0, 2),
        length=st.integers(1, 23),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 6),
        options=st.sampled_from(
            [KVOptions()] * 5
            + [
                KVOptions(restore=False),
                KVOptions(store=False),
                KVOptions(max_wait_s=0),
                KVOptions(max_wait_s=0.5),
                KVOptions(max_restore_tokens=5),
            ]
        ),
    )
    def add(self, name: str, head: int, length: int, tail: list[int], max_tokens: int, options: KVOptions) -> None:
        room = self.rig.engine.max_model_len - 1 - len(tail)
        tokens = [head] * max(0, min(length, room)) + tail
        if not tokens or len(tokens) > room + len(tail):
            return
        if name in self.rig.engine.scheduler:
            self.rig.abort(name)  # and its id is used again at once
        self.rig.add(name, tokens, max_tokens, options=options)

    @rule(count=st.integers(1, 6), copies=st.integers(0, 3), disk_jobs=st.integers(0, 3), seed=st.integers(0, 1 << 16))
    def step(self, count: int, copies: int, disk_jobs: int, seed: int) -> None:
        """Steps, with some copies, reads and writes between, in any order."""
        rng = random.Random(seed)
        for _ in range(count):
            self.one_step()
            for executor, number in ((self.rig.copies, copies), (self.rig.disk_jobs, disk_jobs)):
                for _ in range(number):
                    if len(executor):
                        executor.run_next(rng.randrange(len(executor)))

    @rule(starts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 23)), min_size=1, max_size=6))
    def converse(self, starts: list[tuple[int, int]]) -> None:
        """Prompts one after the other, each to its end; time passes where they wait."""
        for head, length in starts:
            self.num_talks += 1
            name = f"talk {self.num_talks}"
            room = self.rig.engine.max_model_len - 1
            self.rig.add(name, ([head] * length)[:room], 2)
            for _ in range(500):
                if name not in self.rig.engine.scheduler:
                    break
                if self.one_step() is Verdict.WAIT:
                    self.rig.clock.advance(0.3)
                self.rig.settle()
            assert name in self.rig.finished

    def one_step(self) -> Verdict:
        result = self.rig.step()
        for output in result.outputs:
            assert output.finish_reason is not FinishReason.ERROR, output.error
        return result.verdict

    @precondition(lambda self: self.rig.engine.num_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(request.request_id for request in self.rig.engine.scheduler.requests())
        self.rig.abort(data.draw(st.sampled_from(live)))

    @rule(seconds=st.sampled_from([0.1, 0.4, 2.0, 6.0, 100.0, -50.0]))
    def pass_time(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    # ---- the device

    @rule(fault=st.sampled_from([fault for fault in Fault if fault not in (Fault.SLOW, Fault.NO_DIRECT)]))
    def inject(self, fault: Fault) -> None:
        self.rig.files.inject(fault, probability=0.3, times=5)

    @rule(rate=st.sampled_from([0.0, 0.3]))
    def fail_above(self, rate: float) -> None:
        self.tier_faults = rate
        self.wrap()

    @rule()
    def stall(self) -> None:
        self.rig.disk_jobs.shut()

    @rule()
    def let_go(self) -> None:
        self.rig.disk_jobs.release()

    @rule()
    def heal(self) -> None:
        self.rig.files.heal()

    # ---- the whole

    @rule()
    def flush(self) -> None:
        self.rig.disk_jobs.release()
        self.rig.flush()

    @precondition(lambda self: not self.rig.engine.num_unfinished)
    @rule()
    def reset(self) -> None:
        with contextlib.suppress(TierError):  # the device would not let it be written down, and that is said
            self.rig.reset()
        assert self.rig.opened.stats().host_blocks == 0

    @rule(how=st.sampled_from(["close", "abandon"]))
    def reopen(self, how: str) -> None:
        getattr(self.rig, how)()
        self.open()

    @invariant()
    def everything_agrees(self) -> None:
        self.rig.engine.check_integrity()
        verify_counts(self.rig)
        stats = self.rig.opened.stats()
        assert stats.disk is not None
        assert stats.disk.used_bytes <= stats.disk.capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.rig.files.heal()
            self.rig.disk_jobs.release()
            self.rig.run()
            self.rig.verify_quiet()
            assert self.rig.engine.connector is not None
            assert not self.rig.engine.connector.scheduler._requests
        finally:
            self.rig.close()
            shutil.rmtree(self.directory)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=80, stateful_step_count=40)
TestDiskMachine.pytestmark = [pytest.mark.bug("HS01", "LK08", "CR12", "CR14")]  # type: ignore[attr-defined]
