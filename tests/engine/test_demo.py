"""`kvtier demo` on a small random model: what it reports, that damage is noticed, and that nothing is left behind."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import BlockDigest
from kvtier.metrics import LedgerSnapshot
from kvtier.testing.redis_servers import RedisServer
from kvtier_engine.demo.check import KVCheck
from kvtier_engine.demo.directory import check_room, file_system, fresh_directory
from kvtier_engine.demo.process import ReturningError, ReturningProcess
from kvtier_engine.demo.protocol import Start, Turn
from kvtier_engine.demo.result import DemoResult, DiskResult, RedisResult
from tests.redis_servers.needed import needs_redis_server

START = Start("no-model", num_blocks=8, config={}, overrides={}, warm_up_tokens=0)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers under the real tokenizer and chat template: the demo's whole path in seconds."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtier_engine.weights import ensure_default_model

    real = ensure_default_model(lambda text: None)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (real / name).exists():
            shutil.copy(real / name, directory)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(directory)
    return directory


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    environment, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    command = [sys.executable, "-m", "kvtier", "demo", *arguments]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def run_demo(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    with start_demo(*arguments) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()  # so that it removes its directory and ends its own process
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


@pytest.mark.model
def test_the_json_object_is_all_of_stdout(tiny_model: Path, tmp_path: Path) -> None:
    done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--disk", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == {
        "model",
        "prompt_tokens",
        "ttft_s",
        "restored_tokens",
        "memcpy_share",
        "kv_bit_equal",
        "tokens_equal",
        "ledger",
        "disk",
    }
    assert result["kv_bit_equal"] is True
    assert result["tokens_equal"] is True
    assert set(result["ttft_s"]) == {"recompute", "gpu_hit", "host", "disk"}
    assert result["restored_tokens"]["host"] >= 5 * 1300
    assert result["restored_tokens"]["disk"] > result["restored_tokens"]["host"], "third turns are longer than second"
    assert min(result["memcpy_share"].values()) > 0
    ledger = result["ledger"]
    assert ledger["due"] == ledger["stored"] + sum(ledger["dropped"].values()) + ledger["pending"]
    assert ledger["stored"] > 0
    disk = result["disk"]
    assert Path(disk["directory"]).parent == tmp_path
    assert disk["file_system"] != "unknown"
    assert disk["mode"] in ("direct", "buffered")
    assert disk["blocks_written"] == disk["recovered_blocks"] >= result["restored_tokens"]["disk"] // 16
    assert disk["bytes_written"] > 0
    assert (disk["unstored_blocks"], disk["damaged_blocks"]) == (0, 0)
    assert list(tmp_path.iterdir()) == []
    assert "returns; restored" in done.stderr
    assert "returns to the new process" in done.stderr


@needs_redis_server
@pytest.mark.model
def test_with_a_redis_server_the_new_process_restores_from_there(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(password="as it is") as server:
        monkeypatch.setenv("KVTIER_REDIS__PASSWORD", "as it is")
        done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--redis", server.url)
        assert done.returncode == 0, done.stderr
        assert server.command("DBSIZE") == 0, "nothing is left of it"
    result: dict[str, Any] = json.loads(done.stdout)
    assert "disk" not in result
    assert result["kv_bit_equal"] is True
    assert result["tokens_equal"] is True
    assert set(result["ttft_s"]) == {"recompute", "gpu_hit", "host", "redis"}
    # How many turns are worth restoring depends on what computing takes here, with so small a model.
    assert result["restored_tokens"]["redis"] > 0
    redis = result["redis"]
    assert redis["url"] == server.url
    assert redis["prefix"].startswith("kvtier-demo-")
    assert redis["blocks_written"] >= result["restored_tokens"]["redis"] // 16
    assert redis["bytes_written"] > 0
    assert (redis["unstored_blocks"], redis["damaged_blocks"]) == (0, 0)
    assert "as it is" not in done.stdout + done.stderr


@pytest.mark.slow
def test_with_a_kvtier_server_the_new_process_restores_from_there(tiny_model: Path) -> None:
    done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--server")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kv_bit_equal"], result["tokens_equal"]) == (True, True)
    assert set(result["ttft_s"]) == {"recompute", "gpu_hit", "host", "server"}
    # How many turns are worth restoring depends on what computing takes here, with so small a model.
    assert result["restored_tokens"]["server"] > 0
    server = result["server"]
    assert server["blocks_written"] >= result["restored_tokens"]["server"] // 16
    assert (server["unstored_blocks"], server["damaged_blocks"]) == (0, 0)
    socket = Path(server["url"].removeprefix("kvtier+unix://"))
    assert not socket.parent.exists(), "the server, and its directory with it, are gone"


@needs_redis_server
def test_a_redis_server_that_does_not_answer_is_one_clear_line() -> None:
    with RedisServer() as server:
        server.kill()
        done = run_demo("--redis", server.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--redis {server.url}: the server cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
    both = run_demo("--redis", "redis://127.0.0.1:1", "--disk", "here")
    assert both.returncode == 2
    assert "--disk, --redis and --server: name one of them" in both.stderr
    corrupt = run_demo("--server", "--corrupt")
    assert corrupt.returncode == 2
    assert "--corrupt damages host memory of the engine's own" in corrupt.stderr


@pytest.mark.model
def test_a_flipped_byte_is_noticed(tiny_model: Path) -> None:
    done = run_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--corrupt")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["kv_bit_equal"] is False
    assert "FAILED" in done.stderr


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_model_restores_from_host_memory_and_from_disk(real_model_dir: Path, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # it may take longer than other tests on a busy machine
    done = run_demo("--model", str(real_model_dir), "--sessions", "5", "--json", "--disk", str(tmp_path), timeout=380)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["restored_tokens"]["disk"] > result["restored_tokens"]["host"] >= 5 * 1300
    assert max(result["ttft_s"]["host"], result["ttft_s"]["disk"]) < result["ttft_s"]["recompute"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    done = run_demo("--model", str(tmp_path), "--disk", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_every_way_and_where_the_disk_was(capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier_engine.demo.command import _print_table

    result = DemoResult(
        model="tiny",
        prompt_tokens=1475,
        ttft_s={"recompute": 2.0, "gpu_hit": 0.1, "host": 0.2, "disk": 0.3},
        restored_tokens={"host": 16, "disk": 32},
        memcpy_share={"store": 0.5, "restore": 0.7},
        num_blocks_compared=3,
        kv_bit_equal=True,
        tokens_equal=False,
        ledger=LedgerSnapshot(1, 1, {}, 0),
        below=DiskResult("/somewhere", "nfs4", "buffered", 3, 3_000_000, 0, 3, 0),
    )
    _print_table(result)
    text = capsys.readouterr().out
    assert "restored from disk, in a new process" in text
    assert "0.300 s" in text
    assert "15%" in text
    assert "equal to KV as it was computed: yes (3 blocks" in text
    assert "evicts nothing: NO" in text
    assert "3 blocks, 3 MB, in /somewhere, since removed (nfs4, no direct I/O there" in text
    below = RedisResult("redis://there:1", "kvtier-demo-x", 3, 3_000_000, 0, 0)
    _print_table(replace(result, ttft_s={**result.ttft_s, "redis": 0.4}, below=below))
    text = capsys.readouterr().out
    assert "restored from Redis, in a new process" in text
    assert "restored from disk" not in text
    assert "0.400 s" in text
    assert "3 blocks, 3 MB, at redis://there:1, under keys that began with kvtier-demo-x, since removed" in text


# ---- nothing is left behind --------------------------------------------------------------------------------------


def child_of(process: subprocess.Popen[str]) -> int:
    """The demo's one child, once it has told of it."""
    assert process.stderr is not None
    for line in process.stderr:
        if "a new process" in line:
            break
    tasks = Path(f"/proc/{process.pid}/task")
    (child,) = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    return child


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.model
@pytest.mark.parametrize("victim", ["the new process", "the demo"])
def test_a_killed_process_takes_all_with_it(tiny_model: Path, tmp_path: Path, victim: str) -> None:
    with start_demo("--model", str(tiny_model), "--sessions", "5", "--json", "--disk", str(tmp_path)) as process:
        try:
            child = child_of(process)
            assert len(list(tmp_path.iterdir())) == 1
            if victim == "the demo":
                process.terminate()
            else:
                os.kill(child, signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=60)
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == (128 + signal.SIGTERM if victim == "the demo" else 1)
    assert stdout == ""
    assert "Traceback" not in stderr
    if victim != "the demo":
        assert stderr.count("FAILED: the process of the third turns died (exit code -9)") == 1
    assert not is_alive(child)
    assert list(tmp_path.iterdir()) == []


def test_the_directory_goes_with_an_exception_and_signals_are_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with fresh_directory(tmp_path) as directory:
            (directory / "segment").write_bytes(b"kv")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_place_that_takes_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk .*missing"), fresh_directory(tmp_path / "missing"):
        pass


def test_memory_that_looks_like_a_disk_is_told() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/sys/kernel")) == "sysfs"


def test_too_little_room_is_said_before_anything_is_stored(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(ConfigError, match="--disk"):
        check_room(tmp_path, 1 << 62)


# ---- the process of the third turns ------------------------------------------------------------------------------


def script(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys, time\n{code}"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.stderr.write('out of luck'); sys.exit(3)", r"died \(exit code 3\)[^\0]*out of luck"),
        ("sys.stderr.write('x' * 100_000 + 'the end'); sys.exit(3)", r"exit code 3[^\0]*x{1000}the end$"),
        ("input(); print('hello', flush=True); time.sleep(60)", "answered b'hello'.*it was killed"),
        ("input(); print('{}', flush=True)", "answered b'{}'"),
        ("input(); print('{\"recovered_blocks\": 1}', flush=True); sys.exit(4)", r"exit code 4"),
    ],
)
def test_a_process_that_fails_is_one_error_with_the_end_of_its_stderr(code: str, message: str) -> None:
    with pytest.raises(ReturningError, match=message), ReturningProcess(START, script(code)) as process:
        process.wait_ready()
    assert not is_alive(process.pid)


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_engine.demo.process.START_S", 0.2)
    command = script("time.sleep(60)")
    with (
        pytest.raises(ReturningError, match=r"within 0.2 s \(it was killed"),
        ReturningProcess(START, command) as process,
    ):
        process.wait_ready()
    assert not is_alive(process.pid)


def test_an_exception_kills_the_process() -> None:
    with pytest.raises(KeyboardInterrupt), ReturningProcess(START, script("time.sleep(60)")) as process:
        raise KeyboardInterrupt
    assert not is_alive(process.pid)


def test_the_real_one_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    start = Start(str(tmp_path), num_blocks=8, config={}, overrides={"host": {"size": "64MiB"}}, warm_up_tokens=0)
    with (
        pytest.raises(ReturningError, match=f"exit code 1.*\n.*{tmp_path}") as caught,
        ReturningProcess(start) as process,
    ):
        process.wait_ready()
    assert "Traceback" not in str(caught.value)


def test_messages_come_out_as_they_went_in() -> None:
    turn = Turn((1, 2), 0.5, 16, 32, {"disk": 2}, {}, 0, {"ab": "cd"}, None)
    assert Turn.from_line(turn.to_line()) == turn
    assert turn.kv == {BlockDigest(b"\xab"): b"\xcd"}
    assert Start.from_line(START.to_line()) == START


# ---- the comparison ----------------------------------------------------------------------------------------------


def make_check() -> KVCheck:
    """Two blocks known, one of which came back from host memory to another place, both from disk."""
    check = KVCheck(before={BlockDigest(b"a"): (0, b"A"), BlockDigest(b"b"): (1, b"B")})
    check.compare("host", 1, {BlockDigest(b"a"): b"A"})
    check.note_places({BlockDigest(b"a"): 7})
    check.compare("disk", 2, {BlockDigest(b"a"): b"A", BlockDigest(b"b"): b"B"})
    return check


def test_equal_needs_every_kind_compared_and_a_move() -> None:
    assert make_check().holds_for("host", "disk")
    assert not make_check().holds_for("host", "disk", "redis")
    never_moved = make_check()
    never_moved.moved = 0
    assert not never_moved.holds_for("host", "disk")


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param({BlockDigest(b"b"): b"A"}, id="different"),
        pytest.param({BlockDigest(b"c"): b"C"}, id="never seen"),
        pytest.param({}, id="not compared"),
    ],
)
def test_one_wrong_block_is_enough(kv: dict[BlockDigest, bytes]) -> None:
    check = make_check()
    check.compare("disk", 1, kv)
    assert not check.holds_for("host", "disk")


# ---- damage on disk ----------------------------------------------------------------------------------------------


def flip_a_byte_of(content: bytes, directory: Path) -> None:
    """In the one segment file that holds a block with this content."""
    (found,) = [(path, at) for path in directory.glob("segment-*.kvt") if (at := path.read_bytes().find(content)) >= 0]
    path, at = found
    with path.open("r+b") as file:
        file.seek(at + len(content) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.model
@pytest.mark.parametrize("damaged", [0, 5])
def test_damage_on_disk_is_a_miss(tiny_model: Path, tmp_path: Path, damaged: int) -> None:
    """The blocks before it are restored, the rest is recomputed, and the tokens are those of an engine that had the
    former in its pool and never saw the latter."""
    from dataclasses import asdict

    from kvtier.config import load_settings
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.demo.sessions import ANSWER, make_sessions
    from kvtier_engine.llm import LLM

    size = 16
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=512, max_model_len=640)
    overrides = {
        "host": {"size": "64MiB"},
        "disk": {"path": [str(tmp_path)], "size": "64MiB", "min_free": "1MiB"},
    }
    check = KVCheck()
    with LLM(tiny_model, num_blocks=64, config=config, settings=load_settings(overrides=overrides)) as llm:
        (session,) = make_sessions(1, llm.tokenizer, 300)
        session.ask(0)
        first_prompt = llm.tokenizer.encode_chat(session.messages)
        answer = llm.chat(session.messages, ANSWER)
        check.remember(llm, [*first_prompt, *answer.token_ids])
        session.answer(answer.text)
        session.ask(1)
        prompt = llm.tokenizer.encode_chat(session.messages)
        cached = llm.engine.cached_blocks(prompt)
        content = b"".join(llm.engine.block_bytes(cached[damaged][1]))
    flip_a_byte_of(content, tmp_path)

    # Warmed up with one token, the engine takes computing for far slower than it is: however busy the machine, no
    # restore is given up for it.
    with ReturningProcess(Start(str(tiny_model), 64, asdict(config), overrides, warm_up_tokens=1)) as process:
        assert process.wait_ready().recovered_blocks >= len(cached)
        turn = process.ask(session.messages)
    assert turn.damaged_blocks == 1
    assert turn.hits == ({"disk": damaged} if damaged else {})
    assert turn.misses["damaged"] >= len(cached) - damaged
    assert turn.restored_tokens == damaged * size
    check.compare("disk", damaged, turn.kv)
    assert check.compared["disk"] == damaged
    assert check.different == 0

    with LLM(tiny_model, num_blocks=64, config=config) as reference:
        kept = first_prompt[: damaged * size]
        reference.generate([[*kept, *reversed(first_prompt[len(kept) :])]], ANSWER)  # as long as the first prompt was
        (expected,) = reference.generate([prompt], ANSWER)
    assert expected.gpu_hit_tokens == damaged * size
    assert turn.token_ids == expected.token_ids
