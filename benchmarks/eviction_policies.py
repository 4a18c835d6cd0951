"""What do eviction policies of host memory keep, of real prompts, and how far is that from the most that can be kept?

Three traces (benchmarks/data/README.md) are replayed, prompt by prompt, against a tier that holds a part of their
different blocks. Of each prompt the leading blocks that are resident are hits, and used; blocks behind the first that
is missing are no hits, resident or not. The missing blocks are stored, first block first; each evicts one when the tier
is full, and none of the same prompt, as in the host tier, which leases what it reads and fills. What finds nothing to
evict is dropped.

* lru, s3fifo: kvtier's own classes, tails before prefixes;
* plain-lru, plain-fifo: the same without chains, for comparison: they evict prefixes before their tails;
* optimum: of all blocks the one whose next use is farthest goes, the incoming one too (Belady's MIN with bypass), by
  the trace's future. A block's next use is never before its prefix's next use, so that MIN evicts tails first by
  itself and all that is resident counts under the prefix rule. MIN has the most hits that are possible without that
  rule, and here has as many with it: it is the optimum, not only a bound. It writes only what will be used again.

Printed are the part of all blocks that were hits, beside the optimum's, and blocks written in parts of all blocks.
There is no GPU cache above the tier here: it sees all prompts.

    python -m benchmarks.eviction_policies [--json] [--trace conversation]
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.traces import TRACES, Trace
from kvtier.policy import NO_PARENT, S3FIFO, EvictionPolicy, TailsFirstLRU

PARTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ABSENT = -1


class PlainFIFO:
    """First in, first out, of blocks without chains."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:  # noqa: ARG002
        self._order[slot] = None

    def touch(self, slots: Sequence[int]) -> None:
        """A use changes nothing."""

    def remove(self, slot: int) -> None:
        del self._order[slot]

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        return next((slot for slot in self._order if can_evict(slot)), None)

    def released(self, slots: Sequence[int]) -> None:
        """Nothing was set aside."""

    def check_integrity(self, slots: set[int]) -> None:
        assert self._order.keys() == slots


class PlainLRU(PlainFIFO):
    """Least recently used first, of blocks without chains."""

    def touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._order.move_to_end(slot)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": TailsFirstLRU,
    "s3fifo": S3FIFO,
    "plain-lru": PlainLRU,
    "plain-fifo": PlainFIFO,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What one replay came to, in blocks."""

    hits: int
    written: int


class Tier:
    """So many slots, and a policy that says which block goes."""

    def __init__(self, num_slots: int, num_blocks: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._slot_of = [ABSENT] * num_blocks
        self._block_of = [ABSENT] * num_slots
        self._free = list(range(num_slots))
        self._leased = bytearray(num_slots)
        self._refused: list[int] = []
        self.hits = 0
        self.written = 0

    def serve(self, prompt: list[int]) -> None:
        slots = [self._slot_of[block] for block in prompt]
        held = slots.index(ABSENT) if ABSENT in slots else len(slots)
        self.hits += held
        self._policy.touch(slots[:held])
        leased = slots[:held]
        for slot in leased:
            self._leased[slot] = 1
        parent = slots[held - 1] if held else NO_PARENT
        for block in prompt[held:]:
            slot = self._slot_of[block]
            if slot == ABSENT:
                slot = self._room()
                if slot == ABSENT:
                    break
                self._slot_of[block], self._block_of[slot] = slot, block
                self._policy.insert(slot, parent, block)
                self.written += 1
            self._leased[slot] = 1
            leased.append(slot)
            parent = slot
        for slot in leased:
            self._leased[slot] = 0
        if self._refused:
            self._policy.released(self._refused)
            self._refused = []

    def _room(self) -> int:
        if self._free:
            return self._free.pop()
        slot = self._policy.victim(self._can_evict)
        if slot is None:
            return ABSENT
        self._policy.remove(slot)
        self._slot_of[self._block_of[slot]] = ABSENT
        return slot

    def _can_evict(self, slot: int) -> bool:
        if self._leased[slot]:
            self._refused.append(slot)
        return not self._leased[slot]


def replay(trace: Trace, num_slots: int, policy: EvictionPolicy) -> Kept:
    tier = Tier(num_slots, trace.num_unique, policy)
    for prompt in trace.prompts():
        tier.serve(prompt)
    return Kept(tier.hits, tier.written)


def next_uses(trace: Trace) -> list[int]:
    """Of each use the place of the same block's next use, or one beyond the trace's end that no other has."""
    order = np.argsort(trace.ids, kind="stable")
    same = trace.ids[order[1:]] == trace.ids[order[:-1]]
    uses = np.arange(len(trace.ids)) + len(trace.ids)
    uses[order[:-1][same]] = order[1:][same]
    return [int(place) for place in uses]


def optimum(trace: Trace, num_slots: int) -> Kept:
    uses, end = next_uses(trace), len(trace.ids)
    next_of = [ABSENT] * trace.num_unique  # of what is resident
    farthest: list[tuple[int, int]] = []
    room, hits, written = num_slots, 0, 0
    for block, use in zip(trace.ids.tolist(), uses, strict=True):
        is_held = next_of[block] != ABSENT
        hits += is_held
        next_of[block] = ABSENT
        room += is_held
        if use >= end:
            continue
        if not room:
            while next_of[farthest[0][1]] != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] < use:
                continue
            next_of[heapq.heappop(farthest)[1]] = ABSENT
            room += 1
        written += not is_held
        next_of[block] = use
        heapq.heappush(farthest, (-use, block))
        room -= 1
    return Kept(hits, written)


@dataclass(frozen=True, slots=True)
class Row:
    """One replay; rates are parts of all blocks of the trace's prompts."""

    figure: str
    trace: str
    policy: str
    part: float
    """Slots, as a part of the trace's different blocks."""
    blocks: int
    hit_rate: float
    of_optimum: float
    written_rate: float


def measure(trace: Trace) -> Iterator[Row]:
    for part in PARTS:
        num_slots = max(1, round(part * trace.num_unique))
        best = optimum(trace, num_slots)
        found = {name: replay(trace, num_slots, make()) for name, make in POLICIES.items()}
        for name, kept in [*found.items(), ("optimum", best)]:
            rate, written = kept.hits / len(trace.ids), kept.written / len(trace.ids)
            yield Row("eviction.hit_rate", trace.name, name, part, num_slots, rate, kept.hits / best.hits, written)


def show(rows: Sequence[Row]) -> None:
    """A table of a trace: a line a capacity, a column a policy: hit rate and blocks written, in per cent."""
    names = [*POLICIES, "optimum"]
    print("| blocks held | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for part in PARTS:
        cells = {row.policy: f"{row.hit_rate:.1%} ({row.written_rate:.1%})" for row in rows if row.part == part}
        print(f"| {part:.0%} | " + " | ".join(cells[name] for name in names) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eviction_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--trace", choices=list(TRACES), help="only this one")
    arguments = parser.parse_args()
    for name in [arguments.trace] if arguments.trace else TRACES:
        trace = TRACES[name]()
        rows = []
        for row in measure(trace):
            rows.append(row)
            if arguments.json:
                print(json.dumps(asdict(row)), flush=True)
        if not arguments.json:
            prompts = f"{len(trace.ends)} prompts, {len(trace.ids)} blocks, {trace.num_unique} different"
            print(f"\n{name}: {prompts}; {trace.reuse:.1%} came before. Hits (written), of all blocks\n")
            show(rows)


if __name__ == "__main__":
    main()
