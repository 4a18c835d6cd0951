"""docs/server.md names every metric of the daemon, and only settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.config.sources import setting_fields
from kvtier.server.exposition import COUNTS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "server.md").read_text()
OWN = {"info", "ready", "uptime_seconds", "max_clients", "refused"}


def test_every_metric_has_its_row() -> None:
    section = TEXT.split("\n| metric |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE)
    named = {name: labels for cell, labels in rows for name in re.findall("`(.+?)`", cell)}
    assert set(named) == OWN | {count.name for count in COUNTS}
    for count in COUNTS:
        expected = ["tenant", count.label] if count.label else ["tenant"]
        assert re.findall("`(.+?)`", named[count.name]) == expected, count.name


def test_settings_that_it_names_exist() -> None:
    named = set(re.findall(r"`((?:host|disk|redis|server|daemon)\.[a-z_]+)", TEXT))
    assert named
    assert named <= set(setting_fields())


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([a-z-]+\.md)", TEXT))))
def test_documents_that_it_names_exist(target: str) -> None:
    assert (DOCS / target).is_file()
