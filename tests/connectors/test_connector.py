"""What is said at start when pool, planes and layout do not belong together."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import ConfigError, LayoutError
from kvtier.keys import Namespace, Shard
from kvtier.layout import KVKind, KVLayout
from kvtier_connectors import Connector
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.testing.rig import tiny_settings
from kvtier_kernels import BlockPlanes

KV = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
MLA = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4, kind=KVKind.MLA)


def planes(count: int, num_blocks: int = 8, floats: int = 32) -> BlockPlanes:
    return BlockPlanes.from_arrays(list(np.zeros((count, num_blocks, floats), np.float32)))


def open_connector(layout: KVLayout, planes: BlockPlanes, num_blocks: int = 8) -> Connector:
    namespace = Namespace("test", "", layout, "all", Shard(0, 1))
    return Connector(tiny_settings(16), namespace, BlockPool(num_blocks), planes)


@pytest.mark.parametrize(("layout", "count"), [(KV, 4), (MLA, 2)])
def test_planes_of_the_layout_are_taken(layout: KVLayout, count: int) -> None:
    connector = open_connector(layout, planes(count))
    assert connector.space.block_bytes == layout.block_bytes
    connector.close()


@pytest.mark.bug("WR25")
@pytest.mark.parametrize(
    ("layout", "count", "floats"),
    [(KV, 1, 128), (KV, 2, 64), (KV, 8, 16), (KV, 4, 16), (MLA, 4, 16), (MLA, 1, 64)],
)
def test_other_planes_are_refused_though_the_block_is_as_long(layout: KVLayout, count: int, floats: int) -> None:
    with pytest.raises(LayoutError, match="planes"):
        open_connector(layout, planes(count, floats=floats))


def test_a_pool_with_another_number_of_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="9 blocks, its planes 8"):
        open_connector(KV, planes(4), num_blocks=9)


def test_settings_that_were_not_loaded_are_refused() -> None:
    with pytest.raises(ConfigError, match="load_settings"):
        Connector({"host": {}}, Namespace("t", "", KV, "all", Shard(0, 1)), BlockPool(8), planes(4))  # type: ignore[arg-type]
