"""kvtier-server's benchmark on sizes too small to say anything of speed: what it prints, and that it is measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.errors import KVTierError
from kvtier_connectors.bench import server_figures
from kvtier_connectors.bench.good import GOOD
from kvtier_connectors.bench.server_figures import ServerSizes
from kvtier_connectors.bench.server_rig import Clients, Server, Work

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = ServerSizes(moved_bytes=16 * MIB, lookup_blocks=500, pings=20, started_bytes=256 * MIB)
MOVES = [f"{way}.c{number}" for number in (1, 4) for way in ("store", "restore")]
FIGURES = [
    *(
        f"server.{way}{suffix}.{move}.c{number}"
        for suffix in ("", ".unchecked")
        for number in (1, 4)
        for way in ("unix", "place")
        for move in ("store", "restore")
    ),
    *(f"server.tcp.{move}" for move in MOVES),
    "server.lookup",
    "server.ping",
    "server.start",
]


class SmallPool(ServerSizes):
    """Room for a slab of each client's layout, however little is moved."""

    @property
    def pool_bytes(self) -> int:
        return 256 * MIB


def test_every_figure_is_printed_and_no_process_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallPool(**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__})
    monkeypatch.setattr(server_figures, "ServerSizes", lambda: small)
    with pytest.raises(SystemExit) as exited:
        main(["bench", "server", "--shape", "smollm2", "--json", "--runs", "1"])
    assert exited.value.code == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == FIGURES
    for line in lines:
        assert line["figure"] in GOOD
        assert math.isfinite(line["value"])
        assert line["value"] > 0
        assert line["limit"] > 0
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_bytes_that_come_back_wrong_end_the_benchmark(tmp_path: Path) -> None:
    with Server(256 * MIB) as server, Clients(1, 64 << 10, 8, url=server.unix_url) as clients:
        clients.seconds(Work("server", "store"))
        clients.check("server")
        clients.seconds(Work("server", "renew"))
        with pytest.raises(KVTierError, match="a process of the benchmark ended"):
            clients.check("server")
