"""Any order of what two stores do whose host pool is one daemon's memory, while it hangs, restarts and forgets."""

from __future__ import annotations

import random
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.errors import TierError
from kvtier.leases import Lease, Owner
from kvtier.protocol.admin import Damage
from kvtier.reasons import DropReason
from kvtier.server.verifying import verify_host
from kvtier.space import Space
from kvtier.store import Store
from kvtier.tiers.reservation import Reservation
from tests.server_tier.in_place_rig import (
    BLOCK_BYTES,
    DIGESTS,
    NAMESPACE,
    given_back,
    held_at,
    hung,
    lower_of,
    num_free,
    open_store,
    settled,
    stocked,
)
from tests.server_tier.rig import DaemonAt, daemon_at, until

NUM_BLOCKS = 60
SIZES: dict[str, object] = {
    "host.size": "2MiB",
    "host.slab": "1MiB",
    "daemon.dma_grace_s": 0,
    "disk.size": "64MiB",
    "disk.min_free": 0,
}
WHICH = st.integers(0, 1)
RUN = st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(1, 12))


def content(space: Space, number: int) -> bytes:
    """Another in each epoch."""
    return random.Random(space.digest + bytes([number])).randbytes(BLOCK_BYTES)


class Held:
    """Leases of one owner, and what their slots must have."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.blocks: list[tuple[Lease, bytes]] = []

    def check(self) -> None:
        for lease, expected in self.blocks:
            assert lease.view[:BLOCK_BYTES] == expected


class InPlaceMachine(RuleBasedStateMachine):
    """What it draws depends on nothing that the stores do: their threads may be sooner or later another time."""

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        self.start()
        self.stores: list[Store] = []
        for _ in range(2):
            store = open_store(self.at.unix_url, host__size="1MiB", server__timeout_s=0.5)
            self.stack.callback(store.close)
            self.stores.append(store)
        self.spaces = [store.open_space(NAMESPACE) for store in self.stores]
        for store in self.stores:
            stocked(store)
        self.leased: list[Held] = []
        self.filling: list[tuple[Space, Owner, Reservation, bytes]] = []

    def start(self) -> None:
        self.running = ExitStack()
        self.at: DaemonAt = self.running.enter_context(
            daemon_at(self.directory, SIZES | {"disk.path": str(self.directory / "disk")})
        )

    # ---- what the stores do

    @rule(which=WHICH, run=RUN)
    def store_blocks(self, which: int, run: tuple[int, int]) -> None:
        space = self.spaces[which]
        with space.owner("engine") as owner:
            for number in range(run[0], min(NUM_BLOCKS, sum(run))):
                reserved = self.reserve(space, number, owner)
                if isinstance(reserved, Reservation):
                    reserved.lease.view[:BLOCK_BYTES] = content(space, number)
                    space.commit([reserved])

    @rule(which=WHICH, number=st.integers(0, NUM_BLOCKS - 1))
    def begin_to_fill(self, which: int, number: int) -> None:
        space = self.spaces[which]
        owner = space.owner("engine")
        reserved = self.reserve(space, number, owner)
        if isinstance(reserved, DropReason):
            owner.close()
            return
        expected = content(space, number)
        reserved.lease.view[: BLOCK_BYTES // 2] = expected[: BLOCK_BYTES // 2]
        self.filling.append((space, owner, reserved, expected))

    @rule(place=st.integers(0, 3), commits=st.booleans())
    def end_to_fill(self, place: int, *, commits: bool) -> None:
        """Whatever became of the daemon meanwhile."""
        if place >= len(self.filling):
            return
        space, owner, reserved, expected = self.filling.pop(place)
        view = reserved.lease.view
        view[BLOCK_BYTES // 2 : BLOCK_BYTES] = expected[BLOCK_BYTES // 2 :]
        assert view[:BLOCK_BYTES] == expected
        if commits:
            space.commit([reserved])
        owner.close()

    @rule(which=WHICH, run=RUN)
    def restore(self, which: int, run: tuple[int, int]) -> None:
        space = self.spaces[which]
        numbers = range(run[0], min(NUM_BLOCKS, sum(run)))
        digests = [DIGESTS[number] for number in numbers]
        questions = space.ask(digests, space.locate(digests))
        until("questions are answered", lambda: all(question.done for question in questions))
        stage = space.stage("r", digests, None, 5.0, space.locate(digests))
        if stage is not None:
            until("the stage ends", stage.poll)
        held = Held(space.owner("reader"))
        leases = space.lease(digests, held.owner)
        held.blocks = [(lease, content(space, number)) for lease, number in zip(leases, numbers, strict=False)]
        if stage is not None:
            stage.close()
        self.leased.append(held)

    @rule(place=st.integers(0, 3))
    def release(self, place: int) -> None:
        if place < len(self.leased):
            held = self.leased.pop(place)
            held.check()
            held.owner.close()

    @rule(which=WHICH)
    def reset(self, which: int) -> None:
        with suppress(TierError):  # a lease of before it was restarted keeps its memory out
            self.stores[which].reset()

    @rule(which=WHICH)
    def settle(self, which: int) -> None:
        store = self.stores[which]
        until("nothing is on its way", lambda: not store.is_writing)

    # ---- what becomes of the daemon

    @rule()
    def restart(self) -> None:
        """It finds again what was on its disk. What is leased keeps the memory of before."""
        self.running.close()
        self.start()

    @rule()
    def hang(self) -> None:
        """Longer than anybody waits, while both store and ask."""
        with hung(self.at.daemon):
            threads = [threading.Thread(target=self.store_blocks, args=(which, (10 * which, 5))) for which in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for store in self.stores:
                until("it is given up", lambda store=store: not store.is_writing)  # type: ignore[misc]

    @rule()
    def forget(self) -> None:
        """What is in the daemon's host memory, and not on its disk, is gone."""
        served = self.at.daemon.tenants[0].store
        for namespace in served.host.namespaces():
            served.host.reset(namespace)

    # ---- always

    def reserve(self, space: Space, number: int, owner: Owner) -> Reservation | DropReason:
        return space.reserve(DIGESTS[number], DIGESTS[number - 1] if number else None, owner)

    @invariant()
    def is_whole(self) -> None:
        for store in self.stores:
            store.check_integrity()
        self.at.daemon.check_integrity()
        served = self.at.daemon.tenants[0].store
        served.check_integrity()
        assert not [each for each in verify_host(1, "default", served) if isinstance(each, Damage)]
        for held in self.leased:
            held.check()

    def teardown(self) -> None:
        for owner in [*(owner for _, owner, *_ in self.filling), *(held.owner for held in self.leased)]:
            owner.close()
        with self.stack, self.running:
            if not hasattr(self, "stores"):
                return
            for store in self.stores:
                until("it is well", lambda store=store: lower_of(store)._guard.breaker.is_closed)  # type: ignore[misc]
                until("it has slots", lambda store=store: num_free(store) > 0)  # type: ignore[misc]
            for store in self.stores:
                store.reset()  # what could not be published is kept here else
                settled(store)
            for store in self.stores:
                store.close()
            until("all is given back", lambda: held_at(self.at.daemon) == 0)
            given_back(self.at.daemon)


@pytest.mark.slow
def test_any_order() -> None:
    InPlaceMachine.TestCase.settings = settings(
        max_examples=10, stateful_step_count=20, deadline=None, phases=[Phase.reuse, Phase.generate]
    )
    InPlaceMachine.TestCase("runTest").runTest()
