"""`kvtier selftest`: random blocks down and up again through the real path, compared bit for bit."""

from kvtier_connectors.selftest.cli import command
from kvtier_connectors.selftest.run import SelftestReport, run_selftest

__all__ = ["SelftestReport", "command", "run_selftest"]
