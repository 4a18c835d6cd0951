"""The plug-in in a whole vLLM with the real model, under faults: answers stay right, and nothing is left of them."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvtier.opened import open_disk
from kvtier.testing.files import Fault, FaultyFiles
from kvtier_connectors.contract import CopyDirection
from tests.vllm.conftest import LLMs
from tests.vllm.llm_drive import MAX_TOKENS, SOON_S, Answer, Drive, FailingCopies, check_same, expect, verify_quiet
from tests.vllm.test_plugin_llm import with_kvtier

BLOCK = 32
NUM_FULL = 6
PROMPTS = [[100 + (7 * index + 977 * number) % 30_000 for index in range(NUM_FULL * BLOCK + 9)] for number in range(4)]
SMALL: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 12, "max_model_len": 320}

MakeLLM = Callable[..., Any]


# ---- copies that fail ------------------------------------------------------------------------------------------------


def push_out(drive: Drive) -> None:
    """Have other prompts take the whole pool."""
    for tokens in PROMPTS[1:3]:
        drive.ask(tokens, 1)


def always(lost: set[int]) -> Callable[[int], set[int]]:
    """These blocks of every job."""
    return lambda _: lost


def test_whatever_part_of_a_load_fails_the_answer_is_right(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**SMALL, kv_transfer_config=with_kvtier())
    drive = Drive(llm)
    drive.ask(PROMPTS[0])
    hit = expect(drive.ask(PROMPTS[0]))
    assert hit.num_cached == NUM_FULL * BLOCK
    for lost in ({0}, {NUM_FULL // 2}, {NUM_FULL - 1}, set(range(NUM_FULL))):
        push_out(drive)
        with monkeypatch.context() as patch:
            failing = FailingCopies(drive, patch, always(lost))
            check_same(drive.ask(PROMPTS[0]), hit)
            assert failing.num_failed == {CopyDirection.RESTORE: len(lost)}
        again = drive.ask(PROMPTS[0])
        assert again.num_cached == NUM_FULL * BLOCK
        check_same(again, hit)
        verify_quiet(llm)


# ---- a disk that fails -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """A directory with the KV of all prompts, and their answers."""
    directory = tmp_path_factory.mktemp("filled")
    llms = LLMs(model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tqdm.std.tqdm.monitor_interval", 0)
        try:
            drive = Drive(llms(**SMALL, kv_transfer_config=with_disk(directory)))
            answers = [expect(drive.ask(tokens)) for tokens in PROMPTS]
            verify_quiet(drive.llm)
        finally:
            llms.close()
    return directory, answers


def with_disk(directory: Path, **settings: Any) -> Any:
    disk = {"disk.path": [str(directory)], "disk.size": "1GiB", "disk.min_free": 1}
    return with_kvtier(**disk, **{"store.policy": "write_through"} | settings)


@pytest.fixture
def files(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFiles]:
    """Those of every disk tier that is opened after this; whoever is stalled is let go before the engine ends."""
    faulty = FaultyFiles(1)
    monkeypatch.setattr("kvtier.below.open_disk", lambda settings, clock, _: open_disk(settings, clock, faulty))
    yield faulty
    faulty.heal()


@pytest.fixture
def from_disk(filled: tuple[Path, list[Answer]], make_llm: MakeLLM, tmp_path: Path, files: FaultyFiles) -> Drive:
    """An engine that finds all prompts' KV on its disk, and nothing elsewhere."""
    shutil.copytree(filled[0], tmp_path / "disk")
    return Drive(make_llm(**SMALL, kv_transfer_config=with_disk(tmp_path / "disk", **{"restore.max_wait_s": 1})))


@pytest.fixture
def expected(filled: tuple[Path, list[Answer]]) -> list[Answer]:
    return filled[1]


def test_a_disk_that_does_not_answer_is_not_waited_for(
    from_disk: Drive, files: FaultyFiles, expected: list[Answer]
) -> None:
    check_same(from_disk.ask(PROMPTS[1]), expected[1])
    assert from_disk.stats.hits == {"disk": NUM_FULL}
    files.hold("read")
    found = from_disk.ask(PROMPTS[0])
    assert found.num_cached == 0
    check_same(found, expected[0])
    assert from_disk.stats.misses == {"timeout": NUM_FULL}
    files.release("read")
    verify_quiet(from_disk.llm)
    for tokens, right in zip(PROMPTS, expected, strict=True):
        check_same(from_disk.ask(tokens), right)
    verify_quiet(from_disk.llm)


def test_a_disk_whose_reads_fail_costs_misses(from_disk: Drive, files: FaultyFiles, expected: list[Answer]) -> None:
    files.inject(Fault.READ_ERROR)
    for tokens, right in zip(PROMPTS[:2], expected, strict=False):
        found = from_disk.ask(tokens)
        assert found.num_cached == 0
        check_same(found, right)
    assert from_disk.stats.misses.get("tier_error", 0) >= NUM_FULL
    assert files.counts[Fault.READ_ERROR] > 0
    files.heal()
    check_same(from_disk.ask(PROMPTS[1]), expected[1])
    verify_quiet(from_disk.llm)


def test_a_disk_whose_files_were_damaged_between_two_engines_costs_misses(
    filled: tuple[Path, list[Answer]], make_llm: MakeLLM, tmp_path: Path, expected: list[Answer]
) -> None:
    shutil.copytree(filled[0], tmp_path / "disk")
    for path in (tmp_path / "disk").glob("*.kvt"):
        with path.open("r+b") as file:
            for at in range(700_000, path.stat().st_size - 2_000_000, 1_400_000):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
    drive = Drive(make_llm(**SMALL, kv_transfer_config=with_disk(tmp_path / "disk")))
    for tokens, right in zip(PROMPTS, expected, strict=True):
        check_same(drive.ask(tokens), right)
    assert drive.stats.misses["damaged"] > 0
    disk = drive.stats.disk
    assert disk is not None
    assert disk.damaged_blocks >= len(PROMPTS)
    verify_quiet(drive.llm)


# ---- requests that go away -------------------------------------------------------------------------------------------


def test_who_is_aborted_while_the_disk_reads_for_it_leaves_nothing(
    from_disk: Drive, files: FaultyFiles, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, told = from_disk.core.scheduler.connector, []
    ask = connector.get_num_new_matched_tokens

    def note(request: Any, num_computed_tokens: int) -> Any:
        told.append(ask(request, num_computed_tokens))
        return told[-1]

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", note)
    files.hold("read")
    from_disk.add("goes away", PROMPTS[0])
    files.wait_stalled()
    from_disk.step()
    assert (from_disk.status("goes away"), told[-1]) == ("WAITING", (None, False))
    from_disk.abort("goes away")
    from_disk.step()
    files.release("read")
    verify_quiet(from_disk.llm)
    for tokens, right in zip(PROMPTS[:2], expected, strict=False):
        found = from_disk.ask(tokens)
        assert found.num_cached == NUM_FULL * BLOCK
        check_same(found, right)
    verify_quiet(from_disk.llm)


@pytest.mark.parametrize("is_copying", [True, False])
def test_who_is_aborted_while_its_blocks_land_leaves_nothing(
    is_copying: bool, from_disk: Drive, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies under way, as far as anybody was told, or with all of them over, perhaps, and vLLM not told yet."""
    worker = get_kv_transfer_group().worker_side
    report, held = worker.report, []

    def withhold() -> Any:
        told = report()
        held.extend(told.results)
        told.results = []
        if from_disk.status("goes away") == "FINISHED_ABORTED" or not is_copying:
            told.results, held[:] = [*held], []
        return told

    monkeypatch.setattr(worker, "report", withhold)
    from_disk.add("goes away", PROMPTS[0])
    deadline = time.monotonic() + SOON_S
    while from_disk.status("goes away") != "WAITING_FOR_REMOTE_KVS":
        assert time.monotonic() < deadline
        from_disk.step()
    if is_copying:
        assert from_disk.side._loads
    from_disk.abort("goes away")
    verify_quiet(from_disk.llm)
    check_same(from_disk.ask(PROMPTS[0]), expected[0])
    verify_quiet(from_disk.llm)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def answers_without(make_llm: MakeLLM, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """What vLLM puts out in a pool for all of them, without kvtier."""
    drive = Drive(make_llm(**SMALL | {"num_gpu_blocks_override": 400, "max_num_seqs": 12}))
    for number, tokens in enumerate(prompts):
        drive.add(str(number), tokens, max_tokens)
    drive.run(100.0)
    assert drive.num_preemptions == 0
    return [expect(drive.answers[str(number)]) for number in range(len(prompts))]


def test_requests_that_preempt_one_another_put_out_what_they_would_alone(make_llm: MakeLLM) -> None:
    num_tokens = 50
    prompts = [PROMPTS[number % 2][: 2 * BLOCK] + PROMPTS[2][number : number + 24] for number in range(12)]
    expected = answers_without(make_llm, prompts, num_tokens)
    drive = Drive(
        make_llm(**SMALL | {"num_gpu_blocks_override": 14, "max_num_seqs": 12}, kv_transfer_config=with_kvtier())
    )
    for number, tokens in enumerate(prompts):
        drive.add(str(number), tokens, num_tokens)
    drive.run(100.0)
    for number, right in enumerate(expected):
        found = drive.answers[str(number)]
        assert len(found.tokens) == num_tokens
        check_same(found, right)
    assert drive.num_preemptions >= 8
    assert drive.side.kv.stats().landed_blocks > 0
    verify_quiet(drive.llm)


def test_salts_share_nothing(make_llm: MakeLLM) -> None:
    drive = Drive(make_llm(**SMALL, kv_transfer_config=with_kvtier()))
    first = drive.ask(PROMPTS[0], salt="one")
    push_out(drive)
    other = drive.ask(PROMPTS[0], salt="two")
    assert (other.num_cached, drive.stats.hits) == (0, {})
    check_same(other, expect(first))
    push_out(drive)
    again = drive.ask(PROMPTS[0], salt="one")
    assert again.num_cached == NUM_FULL * BLOCK, "and with its salt it is there"
    check_same(again, first)
    verify_quiet(drive.llm)


def test_any_traffic_under_faults_puts_out_what_vllm_does_alone(
    make_llm: MakeLLM, files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share prefixes and return, in a pool for two or three, above a host pool and a disk that are small
    too, while copies, reads and writes fail and clients go away."""
    seed = 20261130
    print(f"seed {seed}")
    chance = random.Random(seed)
    bases = [[chance.randrange(100, 30_000) for _ in range(8 * BLOCK)] for _ in range(4)]
    prompts = []
    for _ in range(40):
        shared = chance.choice(bases)[: chance.choice([BLOCK, 2 * BLOCK, 100, 6 * BLOCK, 8 * BLOCK])]
        prompts.append(shared + [chance.randrange(100, 30_000) for _ in range(chance.randrange(1, 44))])
    expected = answers_without(make_llm, prompts, MAX_TOKENS)
    settings = {"host.size": "48MiB", "host.slab": "2MiB", "disk.timeout_s": 1.0, "restore.max_wait_s": 1.0}
    drive = Drive(
        make_llm(**SMALL | {"num_gpu_blocks_override": 20}, kv_transfer_config=with_disk(tmp_path, **settings))
    )
    for fault in (Fault.READ_ERROR, Fault.FLIP_ON_READ, Fault.WRITE_ERROR):
        files.inject(fault, skip=3, times=1)
        files.inject(fault, probability=0.05)

    def some(num_blocks: int) -> set[int]:
        return {index for index in range(num_blocks) if chance.random() < 0.3} if chance.random() < 0.1 else set()

    failing = FailingCopies(drive, monkeypatch, some, stores=True)
    asked: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(200):
        name = str(number)
        asked[name] = chance.randrange(len(prompts))
        drive.add(name, prompts[asked[name]], chance.randrange(1, MAX_TOKENS + 1))
        for _ in range(chance.randrange(4)):
            drive.step()
        if chance.random() < 0.1:
            victim = chance.choice([*asked][-8:])
            if victim not in drive.answers:
                aborted.add(victim)
                drive.abort(victim)
        while len(drive.core.scheduler.requests) > 8:
            drive.step()
    drive.run(100.0)
    assert drive.answers.keys() | aborted == asked.keys()
    for name, found in drive.answers.items():
        check_same(found, expected[asked[name]])
    print(f"{len(aborted)} aborted, {dict(failing.num_failed)} copies failed, {files}, {drive.stats}")
    assert aborted
    assert min(failing.num_failed.values()) > 0
    assert min(files.counts[fault] for fault in (Fault.READ_ERROR, Fault.FLIP_ON_READ, Fault.WRITE_ERROR)) > 0
    assert min(drive.stats.hits.values()) > 0
    files.heal()
    verify_quiet(drive.llm)
