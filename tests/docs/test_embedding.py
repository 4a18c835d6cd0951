"""docs/embedding.md's engine runs as it is printed there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOC = Path(__file__).parents[2] / "docs" / "embedding.md"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    return re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)


def test_the_engine_restores_what_it_computed(
    code: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "toy.py"
    script.write_text("\n".join(code[:2]).replace("engine.kv.close()", ""))
    scope: dict[str, Any] = runpy.run_path(str(script))
    engine = scope["engine"]
    try:
        assert capsys.readouterr().out.startswith("(0, 0) (0, 6)")
        assert all(local + landed == 6 for local, landed in scope["again"].values())
        tokens = scope["prompts"]["c"]
        chain = scope["DigestChain"](scope["TOKENS"], scope["EXTRAS"])
        chain.extend(tokens)
        for index, digest in enumerate(chain.digests):
            block = engine.pool[:, engine.cached[digest]]
            assert np.array_equal(block[0, :, 0], tokens[index * 4 : index * 4 + 4])
            assert np.array_equal(block, np.broadcast_to(block[0, :, :1], block.shape))
        engine.kv.scheduler.check_integrity()
    finally:
        engine.kv.close()


def test_the_next_engine_restores_from_disk(
    code: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "toy.py"
    script.write_text("\n".join(code))
    scope: dict[str, Any] = runpy.run_path(str(script))
    assert capsys.readouterr().out.splitlines()[-1] == "(0, 6) {'disk': 6}"
    assert not Path(scope["directory"]).exists()


def test_the_engine_is_short(code: list[str]) -> None:
    engine_class = code[0][code[0].index("class ToyEngine") :]
    lines = [line for line in engine_class.splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(lines) <= 60


def test_the_contract_has_fifteen_methods_and_each_is_explained() -> None:
    from kvtier_connectors.contract import ConnectorScheduler, ConnectorWorker

    names = [n for half in (ConnectorScheduler, ConnectorWorker) for n in half.__abstractmethods__]
    assert len(names) == 15
    text = DOC.read_text()
    assert all(f".{name}(" in text for name in names), "docs/embedding.md leaves a method out"
