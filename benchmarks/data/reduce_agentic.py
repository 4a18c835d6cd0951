"""Reduce the WEKA Claude-Code traces to what a replay of blocks of 512 tokens needs.

    python benchmarks/data/reduce_agentic.py weka_cc_agentic_119.jsonl.gz agentic.jsonl.gz

Of each request the ids of every eighth block of 64 tokens are kept: an id stands for its whole prefix, so that it also
stands for the 512 tokens that end with it; what is left over at the end is no full block. Sub-agents' requests stand
among those of their conversation, which shares their ids, by time. Ids are numbered anew by first appearance in the
conversation, which makes most of them runs. A line is one conversation:

    {"id": ..., "requests": [[seconds since its start, leading blocks as in the request before, [first, number, ...]]]}

where the pairs are runs of consecutive ids that follow the leading blocks.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STRIDE = 8


def flat(requests: list[dict[str, Any]]) -> Iterator[tuple[float, list[int]]]:
    for request in requests:
        if "requests" in request:
            yield from flat(request["requests"])
        else:
            yield request["t"], request["hash_ids"][STRIDE - 1 :: STRIDE]


def runs(ids: list[int]) -> list[int]:
    pairs: list[int] = []
    for number in ids:
        if pairs and number == pairs[-2] + pairs[-1]:
            pairs[-1] += 1
        else:
            pairs += [number, 1]
    return pairs


def reduce(line: dict[str, Any]) -> dict[str, Any]:
    names: dict[int, int] = {}
    before: list[int] = []
    requests = []
    for t, hashes in sorted(flat(line["requests"]), key=lambda item: item[0]):
        ids = [names.setdefault(each, len(names)) for each in hashes]
        same = next((i for i, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), None)
        keep = min(len(before), len(ids)) if same is None else same
        requests.append([round(t, 1), keep, runs(ids[keep:])])
        before = ids
    return {"id": line["id"], "requests": requests}


def main(source: str, target: str) -> None:
    with gzip.open(source, "rt") as lines:
        text = "".join(json.dumps(reduce(json.loads(line)), separators=(",", ":")) + "\n" for line in lines)
    Path(target).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
