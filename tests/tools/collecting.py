"""Collect the test suite without running it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def collect(plugin: object) -> None:
    """Let a pytest plugin see every test of the suite; exits with pytest's output when they cannot be collected."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["--collect-only", "--quiet", f"--rootdir={ROOT}", str(ROOT / "tests")], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(f"{output.getvalue()}\nThe tests cannot be collected.")
