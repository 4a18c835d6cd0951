"""Connectors and engines that are closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier_engine.testing.rig import ConnectorRig, EngineRig


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_rig(stack: ExitStack) -> Callable[..., ConnectorRig]:
    def make(*args: Any, **kwargs: Any) -> ConnectorRig:
        rig = ConnectorRig(*args, **kwargs)
        stack.callback(rig.close)
        return rig

    return make


@pytest.fixture
def open_engine(stack: ExitStack) -> Callable[..., EngineRig]:
    def make(*args: Any, **kwargs: Any) -> EngineRig:
        rig = EngineRig(*args, **kwargs)
        stack.callback(rig.close)
        return rig

    return make
