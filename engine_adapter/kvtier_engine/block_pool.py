"""The engine's block pool: references, pins, the free queue and the prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, IntegrityError

__all__ = ["BlockPool"]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a matchable block holds. node: unique for every publication, so that a parent is known by identity."""

    digest: bytes
    parent: bytes | int
    tokens: tuple[int, ...]
    node: int


class BlockPool:
    """Owns every block's state: which requests reference it, who pins it, what it holds, and who goes next.

    A block is *used* while requests reference it, *held* while only copies pin it, and *free* otherwise. Unreferenced
    blocks stand in the free queue, next to be reused first; pinned ones keep their place there and are passed over.
    A block that holds published KV stays matchable until it is reused. The pool moves no bytes. Engine's thread only.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._holders: dict[int, list[str]] = {}
        self._contents: list[_Content | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_free = num_blocks
        self.num_freed = 0
        """Times that a block became free: while it stands still, nobody has more room than before."""
        self._reused: list[int] = []
        self._num_allocated = 0
        self._nodes = 0
        self.queue_version = 0
        self.num_published = 0
        """Publications so far: while it stands still, no prompt has more of its prefix here than before."""
        self.num_collisions = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Blocks that only copies keep: not referenced, and not free."""
        return len(self._queue) - self._num_free

    def free_queue(self) -> Iterable[int]:
        return self._queue

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def pins(self, block_id: int) -> int:
        return self._pins[block_id]

    # ---- allocation ----------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, referenced once, whatever they held forgotten.

        None, and nothing changed, if too few are free.
        """
        if count > self._num_free:
            return None
        taken: list[int] = []
        for block_id in self._queue:
            if len(taken) == count:
                break
            if not self._pins[block_id]:
                taken.append(block_id)
        for block_id in taken:
            del self._queue[block_id]
            self._refs[block_id] = 1
            self._forget(block_id)
        self._num_free -= count
        self._num_allocated += count
        self.queue_version += bool(count)
        return taken

    def num_free_of(self, block_ids: Sequence[int]) -> int:
        """How many of these `acquire` would take from the free ones."""
        return sum(not self._refs[b] and not self._pins[b] for b in block_ids)

    def num_freed_by_release(self, block_ids: Sequence[int]) -> int:
        """How many of these `allocate` could hand out if one reference on each mention of them ended: nobody else has
        them, and nobody pins them."""
        return sum(self._refs[b] == count and not self._pins[b] for b, count in Counter(block_ids).items())

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more reference on each: the caller shares blocks that it matched."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                del self._queue[block_id]
                self._num_free -= not self._pins[block_id]
                self.queue_version += 1
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """End one reference on each of a request's blocks, given in table order.

        The tail enters the queue first, so that it is reused before its prefix; a block with nothing to match goes to
        the very front.
        """
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} released more often than acquired"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._queue[block_id] = None
                if self._contents[block_id] is None:
                    self._queue.move_to_end(block_id, last=False)
                self._add_free(not self._pins[block_id])
                self.queue_version += 1

    def take_reused(self) -> list[int]:
        """Blocks that lost what they held since the last call."""
        reused, self._reused = self._reused, []
        return reused

    def take_num_allocated(self) -> int:
        """Blocks allocated since the last call."""
        count, self._num_allocated = self._num_allocated, 0
        return count

    # ---- pins ----------------------------------------------------------------------------------------------------

    def pin(self, block_id: int, holder: str) -> None:
        """Keep it from reuse until unpinned as often. holder: who keeps it, for `holders`."""
        if not self._pins[block_id] and not self._refs[block_id]:
            self._num_free -= 1
        self._pins[block_id] += 1
        self._holders.setdefault(block_id, []).append(holder)

    def unpin(self, block_id: int) -> None:
        assert self._pins[block_id] > 0, f"block {block_id} unpinned more often than pinned"
        self._pins[block_id] -= 1
        if not self._pins[block_id]:
            del self._holders[block_id]
            self._add_free(not self._refs[block_id])

    def holders(self) -> Counter[str]:
        """Who keeps blocks from reuse by pins, and how many. Of a block that was pinned several times, every holder
        since its first pin. O(pinned blocks): for messages."""
        return Counter(holder for holders in self._holders.values() for holder in set(holders))

    # ---- prefix cache --------------------------------------------------------------------------------------------

    def match(self, root: bytes, digests: Sequence[bytes], tokens_of: Callable[[int], tuple[int, ...]]) -> list[int]:
        """The blocks that hold the longest cached prefix. Pure.

        root: the chain's root digest. tokens_of: block index to its tokens. Tokens and parents are compared, so that
        equal digests of different prompts, should the hash fail, match nothing.
        """
        parent: bytes | int = root
        blocks: list[int] = []
        for index, digest in enumerate(digests):
            block_id = self._cached.get(digest)
            content = None if block_id is None else self._contents[block_id]
            if block_id is None or content is None or content.parent != parent or content.tokens != tokens_of(index):
                break
            blocks.append(block_id)
            parent = content.node
        return blocks

    def publish(self, block_id: int, digest: bytes, root: bytes, previous: int | None, tokens: tuple[int, ...]) -> int:
        """Make a block that a confirmed forward or landing filled matchable; returns the block that stands for it.

        previous: the block before it in the table, None for the first. If another block already holds the same KV,
        that one is returned and nothing changes: the caller shares it and releases its own.
        """
        before = None if previous is None else self._contents[previous]
        if previous is not None and before is None:
            return block_id  # unreachable: its parent could not be published
        parent: bytes | int = root if before is None else before.node
        twin = self._cached.get(digest)
        if twin == block_id:
            return block_id
        if twin is not None:
            content = self._contents[twin]
            assert content is not None
            if (content.parent, content.tokens) == (parent, tokens):
                return twin
            if content.tokens != tokens or self._refs[twin]:
                self.num_collisions += 1
                return block_id
            self._forget(twin)  # a pin made it outlive its prefix: nothing can reach it there
        self._nodes += 1
        self.num_published += 1
        self._contents[block_id] = _Content(digest, parent, tokens, self._nodes)
        self._cached[digest] = block_id
        return block_id

    def is_published(self, block_id: int) -> bool:
        return self._contents[block_id] is not None

    def reset_cache(self) -> None:
        """Forget what every block holds; references and pins stay."""
        for block_id in range(self.num_blocks):
            self._forget(block_id)
        self.queue_version += 1

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raises IntegrityError when counts, queue and cache disagree, or with `tables`, when references do.

        O(blocks).
        """
        free = sum(not r and not p for r, p in zip(self._refs, self._pins, strict=True))
        expected = [0] * self.num_blocks
        for table in tables or ():
            for block_id in table:
                expected[block_id] += 1
        contents = {c.digest: b for b, c in enumerate(self._contents) if c is not None}
        checks = {
            "the queue holds exactly the unreferenced blocks": set(self._queue)
            == {b for b, refs in enumerate(self._refs) if not refs},
            "free blocks are counted": free == self._num_free,
            "pinned blocks have holders": self._holders.keys() == {b for b, pins in enumerate(self._pins) if pins},
            "references and pins are not negative": min(self._refs) >= 0 and min(self._pins) >= 0,
            "the cache names exactly the published blocks": contents == self._cached
            and len(contents) == sum(c is not None for c in self._contents),
            "references equal the tables": tables is None or expected == self._refs,
        }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"block pool: not true that {claim}")

    def _add_free(self, count: int) -> None:
        self._num_free += count
        self.num_freed += count

    def _forget(self, block_id: int) -> None:
        content = self._contents[block_id]
        if content is not None:
            del self._cached[content.digest]
            self._contents[block_id] = None
            self._reused.append(block_id)
