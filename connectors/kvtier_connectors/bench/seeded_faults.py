"""What is drawn in a seeded run: faults of host memory, disk, Redis and the wire, and what clients do meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.pool import Owner
from kvtier.store import Store
from kvtier.testing.files import Fault
from kvtier_connectors.bench import disk_faults, redis_faults
from kvtier_connectors.bench.ground import Ground
from kvtier_connectors.bench.traffic import Traffic
from kvtier_connectors.selftest.toy_engine import ToyEngine
from kvtier_connectors.shapes import SHAPES

__all__ = ["SEEDED_FAULTS", "Patient", "SeededEngine", "SeededFault", "forget_host"]

GPU_BLOCKS = {"llama8b": 48, "smollm2": 96}
CHAIN_BLOCKS = {"llama8b": 4, "smollm2": 8}
POPULATION = {"llama8b": 12, "smollm2": 24}  # conversations: three times what host memory holds
FILE_FAULTS = [fault for fault in Fault if fault not in (Fault.SLOW, Fault.NO_DIRECT)]
MEAN_CUT_BYTES = 2 << 20
TRICKLE_BYTES = 1 << 10


class SeededEngine:
    """A toy engine for blocks of one shape, and its conversations."""

    def __init__(self, store: Store, shape: str) -> None:
        self.shape = shape
        namespace = Namespace(f"kvtier seeded {shape}", "", SHAPES[shape], "all", Shard(0, 1))
        self.toy = ToyEngine(store, namespace, GPU_BLOCKS[shape], CHAIN_BLOCKS[shape])
        self.traffic = Traffic(self.toy)

    def chain(self, number: int) -> list[BlockDigest]:
        """The digests of a conversation, the same each time."""
        noise = np.random.default_rng(number)
        return [BlockDigest(noise.bytes(32)) for _ in range(CHAIN_BLOCKS[self.shape])]

    def some_chain(self, draw: random.Random) -> list[BlockDigest]:
        """One of those that come again and again, or part of it."""
        return self.chain(draw.randrange(POPULATION[self.shape]))[: draw.randint(1, CHAIN_BLOCKS[self.shape])]


@dataclass(slots=True)
class Patient:
    """What is harmed. must_reset: a reset failed, and is to be tried again."""

    ground: Ground
    store: Store
    engines: Sequence[SeededEngine]
    random: random.Random
    held: list[Owner] = field(default_factory=list)
    must_reset: bool = False

    def reset(self) -> None:
        """Forget all KV everywhere. A device that hangs would only take the time of it."""
        for gate in self.ground.files.gates.values():
            gate.set()
        failed = [engine for engine in self.engines if not engine.traffic.reset()]  # each of them is told
        self.must_reset = bool(failed)

    def any_engine(self) -> SeededEngine:
        return self.random.choice(self.engines)


Act = Callable[[Patient], object]


def _nothing(patient: Patient) -> None:
    del patient


@dataclass(frozen=True, slots=True)
class SeededFault:
    """group: of those of one group one is there at a time; None: it is over at once. weight: how often it comes."""

    name: str
    group: str | None
    begin: Act
    end: Act = _nothing
    weight: int = 2


# ---- host memory and clients -----------------------------------------------------------------------------------------


def _abort(patient: Patient) -> None:
    traffic = patient.any_engine().traffic
    if traffic.num_live:
        traffic.abort(patient.random.randrange(traffic.num_live))


def forget_host(patient: Patient) -> None:
    host = patient.store.host
    for namespace in host.namespaces():
        host.reset(namespace)


def _hold_host(patient: Patient) -> None:
    """Lease whatever host memory holds of the conversations: little room is left for others."""
    for engine in patient.engines:
        space = engine.toy.connector.space
        owner = space.owner("seeded")
        patient.held.append(owner)
        for number in range(POPULATION[engine.shape]):
            space.lease(engine.chain(number), owner)


def _release_host(patient: Patient) -> None:
    while patient.held:
        patient.held.pop().close()


# ---- disk ------------------------------------------------------------------------------------------------------------


def _file_fault(fault: Fault) -> SeededFault:
    def begin(patient: Patient) -> None:
        patient.ground.files.inject(fault, probability=0.3, times=5)

    return SeededFault(f"disk {fault}", "disk", begin, _heal_disk, weight=1)


def _stall_disk(patient: Patient) -> None:
    for what in patient.random.choice((("read",), ("write",), ("read", "write"))):
        patient.ground.files.stall(what)


def _make_read_only(patient: Patient) -> None:
    patient.ground.files.read_only = True


def _heal_disk(patient: Patient) -> None:
    patient.ground.files.heal()


def _flip_on_disk(patient: Patient) -> None:
    with suppress(FileNotFoundError):  # a segment that was reclaimed meanwhile
        disk_faults.flip_bits(patient.ground)


# ---- Redis -----------------------------------------------------------------------------------------------------------


def _on_server(act: Callable[[Ground], object]) -> Act:
    def do(patient: Patient) -> None:
        act(patient.ground)

    return do


def _cut(patient: Patient) -> None:
    assert patient.ground.redis.proxy is not None
    patient.ground.redis.proxy.cut_bytes = MEAN_CUT_BYTES


def _trickle(patient: Patient) -> None:
    assert patient.ground.redis.proxy is not None
    patient.ground.redis.proxy.trickle_bytes = TRICKLE_BYTES


def _cut_all(patient: Patient) -> None:
    assert patient.ground.redis.proxy is not None
    patient.ground.redis.proxy.cut_all()


def _heal_wire(patient: Patient) -> None:
    assert patient.ground.redis.proxy is not None
    patient.ground.redis.proxy.heal()


def _redis(
    name: str, begin: Callable[[Ground], object], end: Callable[[Ground], object] | None = None, weight: int = 2
) -> SeededFault:
    after = _nothing if end is None else _on_server(end)
    return SeededFault(f"redis {name}", "redis", _on_server(begin), after, weight)


SEEDED_FAULTS = (
    SeededFault("request aborted", None, _abort, weight=6),
    SeededFault("reset", None, Patient.reset, weight=1),
    SeededFault("host forgotten", None, forget_host, weight=3),
    SeededFault("host held", "host", _hold_host, _release_host),
    *map(_file_fault, FILE_FAULTS),
    SeededFault("disk stalled", "disk", _stall_disk, _heal_disk),
    SeededFault("disk read-only", "disk", _make_read_only, _heal_disk),
    SeededFault("disk flipped", "disk", _flip_on_disk),
    _redis("stopped", redis_faults.stop, Ground.heal_redis),
    _redis("killed", redis_faults.kill, redis_faults.restart, weight=1),
    _redis("restarted", redis_faults.restart, weight=1),
    _redis("flipped", redis_faults.flip_values),
    _redis("emptied", redis_faults.empty, weight=1),
    _redis("full", redis_faults.use_up, redis_faults.make_room),
    _redis("connections ended", redis_faults.end_connections),
    SeededFault("wire cuts", "wire", _cut, _heal_wire),
    SeededFault("wire trickles", "wire", _trickle, _heal_wire),
    SeededFault("wire cut once", None, _cut_all),
)
