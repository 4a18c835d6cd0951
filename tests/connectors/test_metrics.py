"""What a scrape shows of a connector."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.config import RestoreSettings
from kvtier.families import Snapshot, StatsCollector, families
from kvtier.metrics import LedgerSnapshot, StatsSnapshot
from kvtier.reasons import DropReason
from kvtier.restore import RestoreDecision
from kvtier.testing import FakeClock
from kvtier_connectors.counts import ConnectorStats
from kvtier_engine.testing.disk import disk_rigs
from kvtier_engine.verdict import SchedulerStats


def test_the_ledger_is_exported_by_reason() -> None:
    ledger = LedgerSnapshot(due=9, stored=4, dropped={DropReason.HOST_FULL: 2, DropReason.ORPHAN: 1}, pending=2)
    stats = ConnectorStats(
        ledger=ledger,
        restore=RestoreDecision(RestoreSettings(), 4, 64, FakeClock(), lambda _: None).status(),
        landed_blocks=7,
        failed_landings=1,
        readmissions=3,
        stale_results=0,
        live_requests=5,
        in_flight_blocks=6,
    )
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["kvtier_restore_capacity_expired_total",] == 0
    assert {name: value for name, value in samples.items() if not name[0].startswith("kvtier_restore_")} == {
        ("kvtier_ledger_due_total",): 9,
        ("kvtier_ledger_stored_total",): 4,
        ("kvtier_ledger_dropped_total", "host_full"): 2,
        ("kvtier_ledger_dropped_total", "orphan"): 1,
        ("kvtier_ledger_pending",): 2,
        ("kvtier_landed_blocks_total",): 7,
        ("kvtier_failed_landings_total",): 1,
        ("kvtier_readmissions_total",): 3,
        ("kvtier_stale_results_total",): 0,
        ("kvtier_live_requests",): 5,
        ("kvtier_in_flight_blocks",): 6,
    }


def test_two_engines_share_a_registry_by_labels() -> None:
    ledger = LedgerSnapshot(due=1, stored=1, dropped={DropReason.ORPHAN: 2}, pending=0)
    registry = CollectorRegistry()
    for engine in ("0", "1"):
        registry.register(StatsCollector(lambda: ledger, labels={"engine": engine}))
    text = generate_latest(registry).decode()
    assert 'kvtier_due_total{engine="0"} 1.0' in text
    assert 'kvtier_due_total{engine="1"} 1.0' in text
    assert 'kvtier_dropped_total{engine="1",reason="orphan"} 2.0' in text


def test_a_store_and_its_connector_share_a_registry_without_a_name_twice(tmp_path: Path) -> None:
    with disk_rigs(tmp_path / "disk") as open_disk:
        rig = open_disk()
        rig.generate(list(range(17)))
        assert rig.flush() == 0
        assert rig.engine.connector is not None
        registry = CollectorRegistry()
        registry.register(StatsCollector(rig.opened.stats))
        registry.register(StatsCollector(rig.engine.connector.scheduler.stats))
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        names = [family.name for family in families]
        assert len(set(names)) == len(names)
        assert {"kvtier_ledger_stored", "kvtier_disk_ledger_stored", "kvtier_disk_available"} <= set(names)
        samples = {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}
        assert samples["kvtier_disk_ledger_stored_total"] == samples["kvtier_ledger_stored_total"] == 4


@pytest.mark.parametrize("kind", [StatsSnapshot, ConnectorStats, SchedulerStats])
def test_every_metric_has_a_help_that_says_more_than_its_name(kind: type[Snapshot]) -> None:
    told = list(families(kind, "kvtier"))
    assert len(told) > 10
    for family in told:
        words = family.help.rpartition(": ")[2]
        assert len(words.split()) >= 3, family
        assert words.replace(" ", "_") not in family.name, family
        assert "_" not in words.replace("restore.capacity_bound_s", ""), family
    assert len({family.help for family in told}) == len(told), "no two say the same"
