"""docs/structure.md names every module, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvtier": ROOT / "kvtier",
    "kvtier_connectors": ROOT / "connectors" / "kvtier_connectors",
    "kvtier_kernels": ROOT / "kernels" / "kvtier_kernels",
    "kvtier_engine": ROOT / "engine_adapter" / "kvtier_engine",
}


def modules_of(package: Path) -> set[str]:
    files = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    return files | folders


@pytest.mark.parametrize("name", PACKAGES)
def test_every_module_has_its_line(name: str) -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (own,) = [part for part in section if part.startswith(f"{name}:")]
    named = {
        word.split("/")[0]
        for row in re.findall(r"^\| (`.*?) \|", own, re.MULTILINE)
        for word in re.findall("`(.+?)`", row)
    }
    assert named == modules_of(PACKAGES[name])
