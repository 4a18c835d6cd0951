"""The disk tier: KV blocks on local file systems, across restarts."""

from kvtier.tiers.disk.files import Files
from kvtier.tiers.disk.inspection import (
    DamagedFrame,
    FrameInfo,
    UnreadableFile,
    VerifyReport,
    list_directory,
    verify_directory,
)
from kvtier.tiers.disk.snapshot import DiskSnapshot
from kvtier.tiers.disk.tier import DiskTier

__all__ = [
    "DamagedFrame",
    "DiskSnapshot",
    "DiskTier",
    "Files",
    "FrameInfo",
    "UnreadableFile",
    "VerifyReport",
    "list_directory",
    "verify_directory",
]
