"""What a figure's ratio should be on any machine."""

from __future__ import annotations

__all__ = ["GOOD", "good_ratio"]


GOOD = {
    "host.store": "0.8 or more",
    "host.restore": "0.8 or more",
    "host.store_first_touch": "near 1",
    "pool.start": "below 1",
    "connector.idle_step": "below 1",
    "peak_memory": "near 0",
    "lookup.array": "1.6 or less",
    "lookup.list": "2.5 or less",
    "disk.store": "0.9 or more",
    "disk.restore": "0.9 or more",
    "disk.restore.p50_ms": "1.5 or less",
    "disk.restore.p99_ms": "1.5 or less",
    "disk.store.c1": "0.6 or more",
    "disk.store.c4": "0.9 or more",
    "disk.store.c16": "0.9 or more",
    "disk.restore.c1": "0.6 or more",
    "disk.restore.c4": "0.9 or more",
    "disk.restore.c16": "0.9 or more",
    "disk.restore_buffered": "0.8 or more",
    "disk.warm_restart": "below 1",
    "disk.write_amplification": "1 or less",
    "disk.hit_rate": "0.85 or more",
    "codec.lz4.ratio": "1 or more",
    "codec.lz4.down": "",
    "codec.lz4.up": "",
    "codec.shuffle_lz4.ratio": "1.1 or more",
    "codec.shuffle_lz4.down": "",
    "codec.shuffle_lz4.up": "",
    "faults.step_time": "1 or less",
    "faults.seeded": "",
    "faults.server.warm": "1",
}
GOOD |= {
    f"faults.{tier}.{figure}.{case}": good
    for tier, cases in (
        ("redis", ("stopped", "killed", "failing_over")),
        ("server", ("stopped", "killed", "restarting")),
    )
    for case in cases
    for figure, good in {
        "step_time": "1 or less",
        "waited": "1 or less",
        "unhindered": "1",
        "back": "1 or less",
    }.items()
}
GOOD |= {
    f"redis.{topology}{figure}": good
    for topology in ("", "cluster.")
    for figure, good in {
        **{f"{way}.c{threads}": "0.8 or more" for way in ("store", "restore") for threads in (1, 4, 16)},
        "restore.p50_ms": "1.5 or less",
        "restore.p99_ms": "1.5 or less",
        "mixed.c4": "0.8 or more",
        "mixed.c4.p50_ms": "1.5 or less",
        "mixed.c4.p99_ms": "1.5 or less",
        **{f"lookup.{case}": "3 or less" for case in ("hits", "holes", "none")},
    }.items()
}
# Small segments: the copy's own work per segment counts.
GOOD_BY_SHAPE = {("host.store", "smollm2"): "0.5 or more", ("host.restore", "smollm2"): "0.5 or more"}
GOOD |= {
    **{f"server.unix.{way}.c{number}": "0.75 or more" for way in ("store", "restore") for number in (1, 4)},
    **{f"server.unix.unchecked.{way}.c{number}": "0.9 or more" for way in ("store", "restore") for number in (1, 4)},
    **{f"server.place.{way}.c{number}": "0.75 or more" for way in ("store", "restore") for number in (1, 4)},
    **{f"server.place.unchecked.{way}.c{number}": "0.9 or more" for way in ("store", "restore") for number in (1, 4)},
    **{f"server.tcp.{way}.c{number}": "0.8 or more" for way in ("store", "restore") for number in (1, 4)},
    **{f"server.tcp.unchecked.{way}.c{number}": "0.8 or more" for way in ("store", "restore") for number in (1, 4)},
    "server.lookup": "1 or less",
    "server.ping": "3 or less",
    "server.start": "below 1",
}


def good_ratio(figure: str, shape: str) -> str:
    """In words; empty where there is no saying."""
    return GOOD_BY_SHAPE.get((figure, shape), GOOD[figure])
