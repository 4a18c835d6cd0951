"""What no source file of ours may hold: ways to run data as code, notes to self, too many lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvtier", "connectors", "engine_adapter", "kernels")
MAX_LINES = 400

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
UNSAFE_BUILTINS = {"eval", "exec", "__import__"}
# A call that may unpickle, and the argument with the value that keeps it from doing so.
UNPICKLERS = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}


def sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def unsafe_uses(tree: ast.AST) -> Iterator[str]:
    """Every use in a syntax tree of something that can run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Call):
            yield from unsafe_call(node)


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in UNSAFE_BUILTINS or name.rpartition(".")[2] in UNSAFE_METHODS:
        yield name
    elif name in UNPICKLERS:
        keyword, safe = UNPICKLERS[name]
        given = [argument.value for argument in call.keywords if argument.arg == keyword]
        if not given or not isinstance(given[0], ast.Constant) or given[0].value is not safe:
            yield f"{name} without {keyword}={safe}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "x = eval('1')",
        "exec(code)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "socket.recv_pyobj()",
    ],
)
def test_the_check_sees(code: str) -> None:
    assert list(unsafe_uses(ast.parse(code)))


def test_nothing_runs_data_as_code() -> None:
    found = {
        str(path.relative_to(ROOT)): uses
        for path in sources(*PACKAGES, "tests", "benchmarks")
        if (uses := list(unsafe_uses(ast.parse(path.read_text()))))
    }
    assert found == {}


def test_only_the_configuration_reads_the_environment() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sources("kvtier", "connectors", "kernels")
        if path.parent.name != "config" and re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    ]
    assert found == []


def test_no_file_is_longer_than_a_reader_can_keep_in_mind() -> None:
    counted = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES)}
    assert {name: lines for name, lines in counted.items() if lines > MAX_LINES} == {}


def test_no_notes_to_self() -> None:
    note = re.compile(r"\b(TODO|FIXME|XXX)\b")
    paths = [path for path in sources(*PACKAGES, "tests", "benchmarks") if path != Path(__file__)]
    assert [str(path.relative_to(ROOT)) for path in paths if note.search(path.read_text())] == []
