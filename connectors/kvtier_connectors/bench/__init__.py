"""`kvtier bench`: what storing, restoring and looking up cost, against what the machine can do."""

from kvtier_connectors.bench.cli import command

__all__ = ["command"]
