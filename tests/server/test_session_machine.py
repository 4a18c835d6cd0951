"""Clients of two tenants that say all there is to say, in any order, and stop, write late, go and die meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.frame import payload_checksum
from kvtier.index import BlockState
from kvtier.memory import PAGE_BYTES
from kvtier.protocol import messages as m
from kvtier.slots import SlotPool
from tests.server.session_rig import SPACE, TOKEN, Client, FakeProcess, Rig, content, digest, joined

BLOCKS = 12
GARBAGE = b"\xee" * PAGE_BYTES
numbers = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)
runs = st.integers(0, 12).flatmap(lambda start: st.integers(1, 4).map(lambda n: list(range(start, start + n))))
some_blocks = numbers | runs
nth = st.integers(0, 7)


@dataclass(eq=False)
class Known:
    """What a client knows of itself."""

    client: Client
    is_mapped: bool
    reserved: dict[int, tuple[int, int]] = field(default_factory=dict)  # handle: number, offset
    granted: dict[int, int] = field(default_factory=dict)  # handle: offset
    leased: dict[int, tuple[int, int]] = field(default_factory=dict)
    asked: dict[int, Sequence[int]] = field(default_factory=dict)  # stages by id
    others: set[int] = field(default_factory=set)  # requests by id

    @property
    def pool(self) -> SlotPool:
        return self.client.rig.tenant(self.client).store.pool


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name)
        self.rig = Rig(BLOCKS, disk=path, daemon={"credits": 6}, token_file=path / "token")
        self.clients = [Known(client, is_mapped=True) for client in (self.rig.unix(), self.rig.unix())]
        self.gone: list[tuple[SlotPool, Known]] = []  # without a word, and still alive

    # ---- who comes and goes ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 6)
    @rule(kind=st.sampled_from(["a", "b", "tcp", "unmapped"]), pid=st.integers(1, 3))
    def connect(self, kind: str, pid: int) -> None:
        if kind == "tcp":
            client = self.rig.tcp(token=TOKEN, reads=False)
        else:
            uid = 2000 if kind == "b" else 1000
            client = self.rig.unix(uid, 10 * uid + pid, wants_mapping=kind != "unmapped")
        self.clients.append(Known(client, client.session.is_mapped))

    def take(self, place: int) -> Known:
        return self.clients.pop(place % len(self.clients))

    def known(self, place: int) -> Known:
        return self.clients[place % len(self.clients)]

    @precondition(lambda self: self.clients)
    @rule(place=nth)
    def say_goodbye(self, place: int) -> None:
        known = self.take(place)
        known.client.say(m.Bye())
        known.client.session.end(clean=False)
        assert known.client.session.held_bytes == 0

    @precondition(lambda self: self.clients)
    @rule(place=nth)
    def go_without_a_word(self, place: int) -> None:
        known = self.take(place)
        pool = known.pool
        known.client.session.end(clean=False)
        if known.is_mapped:
            self.gone.append((pool, known))

    @precondition(lambda self: self.gone)
    @rule(place=nth)
    def die(self, place: int) -> None:
        _, known = self.gone.pop(place % len(self.gone))
        assert isinstance(known.client.peer.process, FakeProcess)
        known.client.peer.process.dead = True

    @precondition(lambda self: self.clients)
    @rule(place=nth)
    def break_the_protocol(self, place: int) -> None:
        known = self.known(place)
        pool = known.pool
        known.client.say(m.Hello(999, [1], "test 1", "", wants_mapping=True))
        failed = known.client.heard.pop().message
        assert isinstance(failed, m.Failed)
        assert (failed.id, failed.code) == (0, m.FailureCode.PROTOCOL)
        self.clients.remove(known)
        known.client.session.end(clean=False)
        if known.is_mapped:
            self.gone.append((pool, known))

    # ---- what is said ----------------------------------------------------------------------------------------------

    def has_credit(self, known: Known) -> bool:
        return known.client.session.num_requests < 6

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks)
    def reserve(self, place: int, blocks: list[int]) -> None:
        known = self.known(place)
        if not self.has_credit(known):
            return
        self.hear(known)
        reserved = known.client.reserve(blocks)
        mine = [n for n, outcome in zip(blocks, reserved.outcomes, strict=True) if not outcome]
        for handle, number, offset in zip(reserved.reservations, mine, reserved.offsets, strict=True):
            known.reserved[handle] = number, offset

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks)
    def store(self, place: int, blocks: list[int]) -> None:
        self.reserve(place, blocks)
        self.commit(place, len(self.known(place).reserved))

    @precondition(lambda self: self.clients)
    @rule(place=nth, count=st.integers(1, 4))
    def commit(self, place: int, count: int) -> None:
        known = self.known(place)
        if not self.has_credit(known):
            return
        self.hear(known)
        handles = list(known.reserved)[:count]
        blocks = [content(known.reserved[handle][0]) for handle in handles]
        offsets = [known.reserved.pop(handle)[1] for handle in handles]
        known.client.commit(m.Reserved(1, bytes(len(handles)), handles, offsets), blocks)

    @precondition(lambda self: self.clients)
    @rule(place=nth, count=st.integers(1, 4))
    def abort(self, place: int, count: int) -> None:
        known = self.known(place)
        handles = list(known.reserved)[:count]
        known.client.say(m.Abort(0, handles))
        for handle in handles:
            del known.reserved[handle]

    @precondition(lambda self: self.clients)
    @rule(place=nth, number=st.integers(1, 4))
    def grant(self, place: int, number: int) -> None:
        known = self.known(place)
        if not self.has_credit(known):
            return
        self.hear(known)
        if not known.is_mapped:
            failed = known.client.ask(m.Grant(next(known.client.ids), PAGE_BYTES, number), m.Failed)
            assert failed.code == m.FailureCode.INVALID
            return
        granted = known.client.grant(number)
        known.granted.update(zip(granted.reservations, granted.offsets, strict=True))

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks)
    def publish(self, place: int, blocks: list[int]) -> None:
        """Blocks in granted slots, one more than there are, if it can be, in a slot of another kind."""
        known = self.known(place)
        if not self.has_credit(known) or not known.granted:
            return
        self.hear(known)
        others = [*known.reserved, *known.leased]
        pairs = dict(zip([*known.granted, *others[:1]], blocks, strict=False))
        for handle, number in pairs.items():
            if handle in known.granted:
                known.client.fill(known.granted[handle], content(number))
        message = known.client.publish_message(list(pairs), list(pairs.values()))
        published = known.client.ask(message, m.Published)
        for (handle, number), outcome in zip(pairs.items(), published.outcomes, strict=True):
            assert (outcome == m.PublishOutcome.VOID) == (handle not in known.granted)
            if outcome == m.PublishOutcome.STORED:
                known.leased[handle] = number, known.granted.pop(handle)
                assert known.client.lookup([number]) == [1]

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks)
    def store_from_granted_slots(self, place: int, blocks: list[int]) -> None:
        self.grant(place, len(blocks))
        self.publish(place, blocks)

    @precondition(lambda self: self.clients)
    @rule(place=nth, count=st.integers(1, 4))
    def give_back_granted_slots(self, place: int, count: int) -> None:
        known = self.known(place)
        handles = [*list(known.granted)[:count], *list(known.leased)[:1]]  # of the second nothing comes
        known.client.say(m.Abort(0, handles))
        for handle in handles:
            known.granted.pop(handle, None)

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks, max_wait_ms=st.sampled_from([0, 10, 5000]), inline=st.booleans())
    def stage(self, place: int, blocks: list[int], max_wait_ms: int, inline: bool) -> None:
        known = self.known(place)
        if not self.has_credit(known):
            return
        inline = inline or not known.is_mapped
        message = known.client.stage_message(blocks, max_wait_ms, inline=inline)
        known.asked[message.id] = blocks
        known.client.say(message)
        self.hear(known)

    @precondition(lambda self: self.clients)
    @rule(place=nth, count=st.integers(1, 4))
    def release(self, place: int, count: int) -> None:
        known = self.known(place)
        handles = list(known.leased)[:count]
        known.client.say(m.Release(0, handles))
        for handle in handles:
            del known.leased[handle]

    @precondition(lambda self: self.clients)
    @rule(place=nth)
    def cancel(self, place: int) -> None:
        known = self.known(place)
        for number in [*known.asked, *known.others][:1]:
            known.client.say(m.Cancel(number))
            self.hear(known)

    @precondition(lambda self: self.clients)
    @rule(place=nth, blocks=some_blocks, kind=st.sampled_from(["lookup", "remove", "touch", "durable", "stats"]))
    def ask(self, place: int, blocks: list[int], kind: str) -> None:
        known = self.known(place)
        if not self.has_credit(known):
            return
        number = next(known.client.ids)
        messages: dict[str, m.ClientMessage] = {
            "lookup": m.Lookup(number, SPACE, joined(blocks)),
            "remove": m.Remove(number, SPACE, joined(blocks)),
            "touch": m.Touch(SPACE, joined(blocks), digest(0)),
            "durable": m.WaitDurable(number, SPACE, joined(blocks), "disk", 50),
            "stats": m.Stats(number),
        }
        if kind != "touch":
            known.others.add(number)
        known.client.say(messages[kind])
        self.hear(known)

    @precondition(lambda self: self.clients)
    @rule(place=nth)
    def reset(self, place: int) -> None:
        known = self.known(place)
        if self.has_credit(known):
            number = next(known.client.ids)
            known.others.add(number)
            known.client.say(m.StartEpoch(number, 0))

    @rule(place=nth)
    def payloads_are_out(self, place: int) -> None:
        if self.clients:
            self.known(place).client.take_payloads()

    def hear(self, known: Known) -> None:
        """Every answer is of a request that has none yet, and every block is the one that was asked for."""
        while known.client.heard:
            message, payload, _ = vars(known.client.heard.popleft()).values()
            if isinstance(message, m.Staged):
                blocks = known.asked.pop(message.id)
                mine = [n for n, outcome in zip(blocks, message.outcomes, strict=True) if outcome == m.StageOutcome.OK]
                assert message.checksums == [payload_checksum(content(number)) for number in mine]
                assert not payload or payload == [content(number) for number in mine]
                if message.leases:
                    for handle, number, offset in zip(message.leases, mine, message.offsets, strict=True):
                        known.leased[handle] = number, offset
            elif message.id in known.asked:
                assert isinstance(message, m.Failed)
                assert message.code == m.FailureCode.CANCELLED
                del known.asked[message.id]
            else:
                known.others.remove(message.id)

    # ---- what happens meanwhile ------------------------------------------------------------------------------------

    @rule(place=nth, tenant=st.integers(0, 1))
    def run_a_job(self, place: int, tenant: int) -> None:
        executor = self.rig.tenants[tenant].store.lower[0].executor
        executor.run_next(place)  # type: ignore[attr-defined]

    @rule(tenant=st.integers(0, 1))
    def run_a_reset_or_removal(self, tenant: int) -> None:
        store = self.rig.tenants[tenant].store
        start_epoch = store.lower[0].start_epoch
        # Its thread would wait for the disk's, which runs when told: here the disk is told at once.
        store.lower[0].start_epoch = lambda epoch: None  # type: ignore[method-assign]
        try:
            self.rig.tenants[tenant].executor.run_next()  # type: ignore[attr-defined]
        finally:
            store.lower[0].start_epoch = start_epoch  # type: ignore[method-assign]
        if store.lower[0].tier.epoch != store.epoch:
            store.lower[0].write_behind.reset()
            store.lower[0].tier.start_epoch(store.epoch)

    @rule(seconds=st.sampled_from([0.005, 0.5, 1.0, 31.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.advance(seconds)
        for known in self.clients:
            self.hear(known)

    @rule(tenant=st.integers(0, 1))
    def host_memory_turns_over(self, tenant: int) -> None:
        host = self.rig.tenants[tenant].store.host
        host.remove([SPACE + digest(number) for number in range(0, 16, 3)])  # type: ignore[misc]

    @invariant()
    def late_writes(self) -> None:
        """Who was stopped, or went, writes to the slots that it still believes to be its own, and reads others."""
        everyone = [*self.gone, *((known.pool, known) for known in self.clients)]
        for pool, known in everyone:
            if known.is_mapped:
                for offset in [*(offset for _, offset in known.reserved.values()), *known.granted.values()]:
                    pool.buffer[offset : offset + PAGE_BYTES] = memoryview(GARBAGE)
            for number, offset in known.leased.values():
                assert pool.buffer[offset : offset + PAGE_BYTES].tobytes() == content(number)

    # ---- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        self.rig.check_integrity()

    @invariant()
    def every_block_is_what_was_stored(self) -> None:
        for tenant in self.rig.tenants:
            host = tenant.store.host
            for _, name, slot, state in host._index.items():
                if state is BlockState.COMMITTED:
                    offset = tenant.store.pool._offsets[slot]
                    found = tenant.store.pool.buffer[offset : offset + PAGE_BYTES].tobytes()
                    assert found == content(int.from_bytes(name, "big"))

    @invariant()
    def nobody_holds_more_than_half(self) -> None:
        for tenant in self.rig.tenants:
            assert all(0 < held <= tenant.max_held_bytes for held in tenant.held_bytes.values())

    def teardown(self) -> None:
        for known in self.clients:
            known.client.say(m.Bye())
            known.client.take_payloads()  # until then what is sent is kept, whatever it said
        for _, known in self.gone:
            assert isinstance(known.client.peer.process, FakeProcess)
            known.client.peer.process.dead = True
        self.rig.hub.poll()
        self.rig.clock.advance(2.0)
        for tenant in self.rig.tenants:
            tenant.executor.close(0)
        self.rig.run_jobs()
        self.rig.check_integrity()
        self.rig.verify_baseline()
        assert self.rig.hub.num_sessions == 0
        assert not self.rig.hub.has_requests
        self.rig.close()
        self.directory.cleanup()


Sessions.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestSessions = Sessions.TestCase
