"""docs/server.md names every number of the tier."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvtier.metrics import LowerStats, ServerStats

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_number_that_only_this_tier_has_has_its_row() -> None:
    own = {field.name for field in dataclasses.fields(ServerStats)} - {f.name for f in dataclasses.fields(LowerStats)}
    section = TEXT.split("An engine counts its own end", 1)[1].split("\n\n", 2)[1]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {word for row in rows for word in re.findall("`(.+?)`", row)} == own
