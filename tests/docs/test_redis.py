"""docs/redis.md names every number of the tier, and the rights that it needs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvtier.metrics import LowerStats, RedisStats
from kvtier.tiers.redis.replies import COMMANDS

TEXT = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()


def test_every_number_that_only_redis_has_has_its_row() -> None:
    own = {field.name for field in dataclasses.fields(RedisStats)} - {f.name for f in dataclasses.fields(LowerStats)}
    section = TEXT.split("## Watching\n", 1)[1].split("\n## ", 1)[0].split("\n| alert on", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {word for row in rows for word in re.findall("`(.+?)`", row)} == own


def test_the_acl_rule_gives_the_rights_that_are_needed() -> None:
    (rule,) = re.findall(r"^ +ACL SETUSER kvtier (.+)$", TEXT, re.MULTILINE)
    assert re.findall(r"\+\S+", rule) == re.findall(r"\+[a-z|]+", COMMANDS)
