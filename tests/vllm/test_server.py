"""The plug-in in vLLM's OpenAI server, as it is started: engine, workers and front end in processes of their own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.disk.directory import Directory
from kvtier.tiers.disk.files import Files
from kvtier.tiers.disk.recovery import read_footer, survey

pytestmark = pytest.mark.timeout(300)  # whichever test comes first waits for the server too

BLOCK = 32
NUM_TALKS = 6
MAX_TOKENS = 8
START_S, STOP_S, SOON_S = 90.0, 30.0, 5.0
TRANSFER = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier_connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SETTINGS = """
[host]
size = "256MiB"
[disk]
path = ["{disk}"]
size = "1GiB"
min_free = 1
"""
BENCHMARK = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server process and what it is asked."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, directory: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.directory = directory

    def end_of_log(self) -> str:
        return self.log.read_text()[-4000:]

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.end_of_log()
            try:
                self.fetch("/health")
            except OSError:  # not there yet, or not ready
                time.sleep(0.1)
            else:
                return
        pytest.fail(f"not healthy after {START_S:g} s: {self.end_of_log()}")

    def fetch(self, path: str, body: object = None) -> str:
        """What it answers to GET, or to POST if there is a body. Raises OSError for all but a success."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with DIRECT.open(request, timeout=60.0) as response:
            return str(response.read().decode())

    def complete(self, tokens: list[int], max_tokens: int) -> Any:
        """The answer to a prompt: `text`, and the `token_ids` it stands for."""
        body = {
            "model": "smollm2",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = json.loads(self.fetch("/v1/completions", body))["choices"]
        assert choice["finish_reason"] == "length"
        return choice

    def counter(self, name: str) -> float:
        """Of vLLM's metrics, all labels together."""
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.fetch("/metrics"), re.MULTILINE)
        assert found, f"no {name} in the metrics"
        return sum(map(float, found))


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(each for child in children for each in family(child))]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def holds_pool(pid: int) -> bool:
    """Whether a process has a host pool of kvtier's mapped."""
    return "memfd:kvtier-pool" in Path(f"/proc/{pid}/maps").read_text()


def unsealed_segments(directory: Path) -> list[str]:
    """Files of a disk tier that whoever wrote them did not finish. Raises ConfigError while a process has them."""
    files, unsealed = Files(), []
    opened = Directory(directory, files, create=False)
    try:
        segments = survey(opened, files).segments
        assert segments
        for segment in segments:
            descriptor = files.open(segment.file.name, os.O_RDONLY, opened.fd)
            try:
                if read_footer(descriptor, segment.header, files) is None:
                    unsealed.append(segment.file.name)
            finally:
                files.close(descriptor)
    finally:
        opened.close()
    return unsealed


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    config = directory / "kvtier.toml"
    config.write_text(SETTINGS.format(disk=directory / "disk"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model_dir), "--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager"]
    command += ["--num-gpu-blocks-override", "33", "--block-size", str(BLOCK), "--max-model-len", "960"]
    command += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 30)]
    command += ["--kv-transfer-config", json.dumps(TRANSFER)]
    # Without it vLLM kills the engine at once, and what waits to be written to the disk is lost.
    command += ["--shutdown-timeout", "20"]
    log = directory / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment | {"KVTIER_CONFIG": str(config)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log, directory)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        for pid in family(process.pid) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def in_turn(server: Server, prompts: list[list[int]], max_tokens: int, at_once: int) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda tokens: server.complete(tokens, max_tokens), prompts))


def test_the_second_round_of_many_talks_comes_from_kvtier(server: Server) -> None:
    """Their prompts are thrice the pool, so vLLM's own prefix cache has few of them when they return."""
    chance = random.Random(7)
    first = [[chance.randrange(100, 30_000) for _ in range(chance.randrange(380, 450))] for _ in range(NUM_TALKS)]
    answers = in_turn(server, first, MAX_TOKENS, 3)
    before = server.counter("vllm:external_prefix_cache_hits_total")
    assert before == 0
    second = [
        [*tokens, *answer["token_ids"], *(chance.randrange(100, 30_000) for _ in range(40))]
        for tokens, answer in zip(first, answers, strict=True)
    ]
    answers = in_turn(server, second, MAX_TOKENS, 3)
    restored = server.counter("vllm:external_prefix_cache_hits_total")
    assert restored >= sum(len(tokens) // BLOCK * BLOCK for tokens in first) / 2
    for tokens, answer in zip(second, answers, strict=True):
        local = server.counter("vllm:prefix_cache_hits_total")
        assert server.complete(tokens, MAX_TOKENS)["token_ids"] == answer["token_ids"]
        again = server.complete(tokens, MAX_TOKENS)
        assert again["token_ids"] == answer["token_ids"]
        assert server.counter("vllm:prefix_cache_hits_total") - local >= (len(tokens) - 1) // BLOCK * BLOCK, (
            "a local hit"
        )


def test_vllms_own_benchmark_completes_all_requests(server: Server, model_dir: Path) -> None:
    result = server.directory / "result.json"
    arguments = ["--backend", "openai", "--base-url", server.url, "--model", "smollm2", "--tokenizer", str(model_dir)]
    arguments += [
        "--dataset-name",
        "random",
        "--num-prompts",
        "8",
        "--random-input-len",
        "300",
        "--random-output-len",
        "8",
    ]
    arguments += ["--seed", "3", "--temperature", "0", "--disable-tqdm", "--save-result"]
    arguments += ["--result-dir", str(server.directory), "--result-filename", result.name]
    done = subprocess.run(
        [sys.executable, "-c", BENCHMARK, *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (8, 64)


def test_a_server_that_is_told_to_end_ends_and_leaves_nothing(server: Server) -> None:
    """Last in this file: it ends the server that all of it asks."""
    pids = family(server.process.pid)
    holders = [pid for pid in pids if holds_pool(pid)]
    assert len(holders) == 2, "the engine, which has the store, and its worker"
    assert server.process.pid not in holders
    server.process.send_signal(signal.SIGTERM)
    try:
        assert server.process.wait(STOP_S) == 0
    except subprocess.TimeoutExpired:
        pytest.fail(f"runs on {STOP_S:g} s after SIGTERM: {server.end_of_log()}")
    deadline = time.monotonic() + SOON_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], "and with them, what they had mapped"
    assert unsealed_segments(server.directory / "disk") == []
    log = server.log.read_text()
    assert re.findall(r'File ".*/kvtier(?:_\w+)?/.*', log) == [], "no traceback of ours; vLLM has some when it ends"
    assert "vLLM goes on without it" not in log
