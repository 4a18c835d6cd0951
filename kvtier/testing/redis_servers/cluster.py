"""A Redis cluster on this machine, formed without redis-cli, whose slots can be moved, also half of the way."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.errors import KVTierError
from kvtier.testing.redis_servers.server import RedisServer, ServerKind
from kvtier.testing.redis_servers.tls import TlsFiles
from kvtier.testing.redis_servers.waiting import wait_until
from kvtier.testing.redis_servers.wire import RedisConnection, Reply

__all__ = ["Migration", "RedisCluster"]

NUM_SLOTS = 16384
FORM_TIMEOUT_S = 30.0
MOVE_TIMEOUT_MS = 10_000
KEYS_A_MOVE = 16


class RedisCluster:
    """A cluster that is well when its `with` block begins, which takes two to four seconds: Redis waits that long.

    num_nodes: masters, at least 3, among which the slots are divided evenly, in order. replicas: of each master; when
    one dies and stays dead, a replica takes over after some `node_timeout_ms`, and without replicas the whole cluster
    refuses commands, unless `cluster-require-full-coverage no` is among the options.
    The other arguments are those of each `RedisServer`.
    Mutable state: `_nodes`, filled at the start.
    """

    def __init__(
        self,
        num_nodes: int = 3,
        replicas: int = 0,
        *,
        node_timeout_ms: int = 1000,
        maxmemory: int | None = None,
        policy: str = "noeviction",
        password: str = "",
        users: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        options: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        if num_nodes < 3:
            raise KVTierError(f"a cluster votes, and needs at least 3 masters for it, not {num_nodes}")
        self._num_nodes = num_nodes
        self._clock = clock or MonotonicClock()
        admin_password = secrets.token_hex(16)
        own = [
            "cluster-config-file nodes.conf",
            f"cluster-node-timeout {node_timeout_ms}",
            "cluster-replica-validity-factor 0",  # a replica takes over however old its data is
        ]
        self._nodes = [
            RedisServer(
                maxmemory=maxmemory,
                policy=policy,
                password=password,
                users=users,
                tls=tls,
                options=[*own, *options],
                clock=self._clock,
                kind=ServerKind.NODE,
                admin_password=admin_password,
            )
            for _ in range(num_nodes * (1 + replicas))
        ]
        self._stack = ExitStack()

    @property
    def nodes(self) -> list[RedisServer]:
        """Those that began as masters, in the order of their slots; then the replicas, of each of them in turn."""
        return list(self._nodes)

    @property
    def masters(self) -> list[RedisServer]:
        """Those that began as masters."""
        return self._nodes[: self._num_nodes]

    @property
    def urls(self) -> list[str]:
        """Of the nodes, in their order."""
        return [node.url for node in self._nodes]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self._nodes:
                stack.enter_context(node)
            self._form()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # ---- forming -------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        first, *others = self._nodes
        for position, node in enumerate(self._nodes):
            # Nodes with the same epoch would have to settle which of them is right first.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", position + 1)
        for position, node in enumerate(self.masters):
            start, end = (NUM_SLOTS * place // self._num_nodes for place in (position, position + 1))
            node.command("CLUSTER", "ADDSLOTS", *range(start, end))
        for node in others:
            node.command("CLUSTER", "MEET", first.host, first.port)
        wait_until("the nodes of the cluster meet", self._all_met, FORM_TIMEOUT_S, self._clock)
        for position, replica in enumerate(self._nodes[self._num_nodes :]):
            master = self.masters[position % self._num_nodes]
            replica.command("CLUSTER", "REPLICATE", node_id(master))
        self.wait_ok()

    def _all_met(self) -> bool:
        """Whether each knows all by name; one that still shakes hands has a name that it will not keep."""
        ids = {node_id(node) for node in self._nodes}
        return all(set(_table(node)) == ids for node in self._nodes)

    def wait_ok(self, timeout_s: float = FORM_TIMEOUT_S) -> None:
        """Until every node that runs says that all slots are served, and replicas have what their masters have."""

        def is_ok(node: RedisServer) -> bool:
            state = _cluster_info(node)
            is_whole = state["cluster_state"] == "ok" and state["cluster_slots_ok"] == str(NUM_SLOTS)
            return is_whole and node.info("replication").get("master_link_status", "up") == "up"

        def all_ok() -> bool:
            return all(is_ok(node) for node in self._nodes if node.is_running)

        wait_until("the cluster is well", all_ok, timeout_s, self._clock)

    # ---- slots and keys ------------------------------------------------------------------------------------------

    def slot_of(self, key: bytes | str) -> int:
        reply = self._any_running().command("CLUSTER", "KEYSLOT", key)
        assert isinstance(reply, int)
        return reply

    def owner_of(self, slot: int) -> RedisServer:
        """The master that serves the slot by now, as a node that runs sees it."""
        ports = {node.port: node for node in self._nodes}
        reply = self._any_running().command("CLUSTER", "SLOTS")
        assert isinstance(reply, list)
        for row in reply:
            assert isinstance(row, list)
            start, end, master = row[:3]
            assert isinstance(start, int)
            assert isinstance(end, int)
            assert isinstance(master, list)
            if start <= slot <= end:
                assert isinstance(master[1], int)
                return ports[master[1]]
        raise KVTierError(f"nobody serves slot {slot}")

    def migrate(self, slots: int | Iterable[int], source: RedisServer, target: RedisServer) -> None:
        """Move slots with their keys from one master to another; all masters know of it afterwards."""
        migration = self.start_migration(slots, source, target)
        migration.move()
        migration.finish()

    def start_migration(self, slots: int | Iterable[int], source: RedisServer, target: RedisServer) -> Migration:
        """Begin to move them: from now on `source` answers ASK for keys of these slots that it does not hold."""
        return Migration(self.masters, [slots] if isinstance(slots, int) else list(slots), source, target)

    def _any_running(self) -> RedisServer:
        for node in self._nodes:
            if node.is_running:
                return node
        raise KVTierError("no node of the cluster runs")


class Migration:
    """Slots on their way from one master to another; begun when it is made.

    Until `finish`, `source` serves the keys it still holds and answers ASK for all others of the slots, and `target`
    takes only commands after ASKING.
    """

    def __init__(
        self, masters: Sequence[RedisServer], slots: Sequence[int], source: RedisServer, target: RedisServer
    ) -> None:
        self._masters = list(masters)
        self._slots = list(slots)
        self._source = source
        self._target = target
        with source.connect() as sender, target.connect() as receiver:
            for slot in self._slots:  # first who takes, or an ASK would lead to a node that knows nothing of it
                receiver.command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
                sender.command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))

    def move(self, max_keys: int | None = None) -> int:
        """Move keys, all or so many more; how many were moved."""
        moved = 0
        with self._source.connect() as sender:
            for slot in self._slots:
                while max_keys is None or moved < max_keys:
                    count = KEYS_A_MOVE if max_keys is None else min(KEYS_A_MOVE, max_keys - moved)
                    keys = sender.command("CLUSTER", "GETKEYSINSLOT", slot, count)
                    assert isinstance(keys, list)
                    if not keys:
                        break
                    self._send(sender, keys)
                    moved += len(keys)
        return moved

    def _send(self, sender: RedisConnection, keys: Sequence[Reply]) -> None:
        names = [key for key in keys if isinstance(key, bytes)]
        target, user = self._target, self._target.admin_credentials
        address = (target.host, target.port, "", 0, MOVE_TIMEOUT_MS)
        sender.command("MIGRATE", *address, "REPLACE", "AUTH2", *user, "KEYS", *names)

    def finish(self) -> None:
        """Give the slots to the target. Keys that were not moved are dropped by the source."""
        owner = node_id(self._target)
        others = [node for node in self._masters if node not in (self._source, self._target)]
        for node in [self._target, self._source, *others]:
            if node.is_running:
                with node.connect() as connection:
                    for slot in self._slots:
                        connection.command("CLUSTER", "SETSLOT", slot, "NODE", owner)


def node_id(node: RedisServer) -> str:
    reply = node.command("CLUSTER", "MYID")
    assert isinstance(reply, bytes)
    return reply.decode()


def _table(node: RedisServer) -> list[str]:
    reply = node.command("CLUSTER", "NODES")
    assert isinstance(reply, bytes)
    return [line.split()[0] for line in reply.decode().splitlines()]


def _cluster_info(node: RedisServer) -> dict[str, str]:
    reply = node.command("CLUSTER", "INFO")
    assert isinstance(reply, bytes)
    return dict(line.split(":", 1) for line in reply.decode().split("\r\n") if ":" in line)
