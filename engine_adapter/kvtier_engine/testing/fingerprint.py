"""A deep snapshot of live objects, to prove that a question about them changed nothing."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import random
import types
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import cast

import numpy as np

__all__ = ["Fingerprint", "difference", "fingerprint", "unchanged"]

PRIMITIVES = (type(None), bool, int, float, complex, str, bytes, enum.Enum, PurePath, range, slice)
CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, functools.partial)
# Locks, threads, loggers and references that keep nothing alive say nothing of the state.
SILENT_MODULES = {"_thread", "threading", "logging", "weakref", "_weakref", "_weakrefset", "mmap", "socket", "queue"}
CONTAINERS = (Mapping, AbstractSet, Sequence, deque, array, np.ndarray, memoryview)
LONG_BYTES = 64
SHOWN = 8  # differences within one sequence


@dataclass(frozen=True, slots=True, repr=False)
class Fingerprint:
    """Every value that was reachable, by its path. Equal where nothing differs; hashable.

    entries: path and value, in the order of the walk.
    """

    entries: tuple[tuple[str, Hashable], ...]

    def __repr__(self) -> str:
        digest = hashlib.sha256(repr(self.entries).encode()).hexdigest()[:12]
        return f"<Fingerprint {digest} of {len(self.entries)} entries>"


def fingerprint(*roots: object, ignore: Iterable[str] = (), arrays: bool = False) -> Fingerprint:
    """Walk everything that the roots reach: attributes, slots, containers, each object once.

    What counts: values, the order of sequences, mappings and queues, and which places share one object. What does not:
    functions, classes, locks, threads, loggers, weak references, generators. The roots are called `0`, `1` and so on in
    paths, a single one by its class.

    ignore: patterns of paths that are passed over, as in `fnmatch`: `"*._cache"`, `"Engine._streams*"`.
    arrays: look at the bytes of numpy arrays and memory views too, such as a block pool's.
    """
    walk = _Walk(tuple(ignore), arrays)
    for index, root in enumerate(roots):
        walk.visit(type(root).__name__ if len(roots) == 1 else f"{index}", root)
    return Fingerprint(tuple(walk.entries))


def difference(before: Fingerprint, after: Fingerprint) -> list[str]:
    """What differs, a line each: the path, what was there, and what is there now. Empty where nothing does."""
    old, new = dict(before.entries), dict(after.entries)
    lines: list[str] = []
    for path in dict.fromkeys((*old, *new)):
        if path not in new:
            lines.append(f"{path}: {old[path]!r} -> gone")
        elif path not in old:
            lines.append(f"{path}: came as {new[path]!r}")
        elif old[path] != new[path]:
            lines += _compare(path, old[path], new[path])
    return lines


@contextmanager
def unchanged(*roots: object, ignore: Iterable[str] = (), arrays: bool = False) -> Iterator[None]:
    """AssertionError at the end of the block, naming every path, if it changed anything that the roots reach."""
    patterns = tuple(ignore)
    before = fingerprint(*roots, ignore=patterns, arrays=arrays)
    yield
    changes = difference(before, fingerprint(*roots, ignore=patterns, arrays=arrays))
    assert not changes, "changed: " + "; ".join(changes)


def _compare(path: str, old: Hashable, new: Hashable) -> list[str]:
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        if sorted(map(repr, old)) == sorted(map(repr, new)):
            return [f"{path}: in the order {old!r} -> {new!r}"]
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        if len(pairs) <= SHOWN:
            return [f"{path}[{index}]: {a!r} -> {b!r}" for index, a, b in pairs]
    return [f"{path}: {old!r} -> {new!r}"]


class _Walk:
    """One walk. `_seen` keeps the objects alive, so that no id is another's."""

    def __init__(self, ignore: tuple[str, ...], arrays: bool, *, passes_sets: bool = False) -> None:
        self.entries: list[tuple[str, Hashable]] = []
        self._ignore = ignore
        self._arrays = arrays
        self._passes_sets = passes_sets
        self._seen: dict[int, tuple[str, object]] = {}

    def visit(self, path: str, value: object) -> None:
        if any(fnmatchcase(path, pattern) for pattern in self._ignore) or _is_silent(value):
            return
        leaf = _leaf(value)
        if leaf is not _NO_LEAF:
            self.entries.append((path, leaf))
            return
        seen = self._seen.get(id(value))
        if seen is not None:
            self.entries.append((path, f"is {seen[0]}"))
            return
        self._seen[id(value)] = (path, value)
        if isinstance(value, (np.ndarray, memoryview)) or _is_tensor(value):
            self._visit_array(path, value)
        elif isinstance(value, Mapping):
            self._visit_mapping(path, value)
        elif isinstance(value, AbstractSet):
            self._visit_set(path, value)
        elif isinstance(value, (Sequence, deque, array)):
            self._visit_items(path, value)
        self._visit_attributes(path, value)

    def _visit_array(self, path: str, value: object) -> None:
        if self._arrays:
            data = np.ascontiguousarray(value)
            entry = (data.shape, str(data.dtype), hashlib.sha256(data.tobytes()).hexdigest()[:16])
            self.entries.append((path, entry))

    def _visit_mapping(self, path: str, value: Mapping[object, object]) -> None:
        names = [_name(index, key) for index, key in enumerate(value)]
        self.entries.append((f"{path}.keys()", tuple(names)))
        for name, (key, item) in zip(names, value.items(), strict=True):
            if _leaf(key) is _NO_LEAF:
                self.visit(f"{path}.key[{name}]", key)
            self.visit(f"{path}[{name}]", item)

    def _visit_set(self, path: str, value: AbstractSet[object]) -> None:
        if self._passes_sets:
            self.entries.append((f"{path}.len()", len(value)))
        else:
            self._visit_items(path, sorted(value, key=self._order))

    def _order(self, member: object) -> tuple[str, int]:
        """A place among a set's members that depends on what they hold; among equal ones, on which they are."""
        leaf, seen = _leaf(member), self._seen.get(id(member))
        if leaf is not _NO_LEAF:
            return f"{type(leaf).__name__} {leaf!r}", 0
        if seen is not None:
            return f"seen {seen[0]}", 0
        walk = _Walk(self._ignore, self._arrays, passes_sets=True)
        walk.visit("", member)
        return f"walked {walk.entries!r}", id(member)

    def _visit_items(self, path: str, value: Iterable[object]) -> None:
        items = list(value)
        leaves = [_leaf(item) for item in items]
        if all(leaf is not _NO_LEAF for leaf in leaves):
            self.entries.append((path, tuple(leaves)))
            return
        self.entries.append((f"{path}.len()", len(items)))
        for index, item in enumerate(items):
            self.visit(f"{path}[{index}]", item)

    def _visit_attributes(self, path: str, value: object) -> None:
        attributes = dict(_attributes(value))
        if not attributes and not isinstance(value, CONTAINERS):
            self.entries.append((path, f"a {type(value).__name__}"))
        for name, item in attributes.items():
            self.visit(f"{path}.{name}", item)


class _NoLeaf:
    def __hash__(self) -> int:
        return 0


_NO_LEAF = _NoLeaf()


def _leaf(value: object) -> Hashable:
    """What stands for a value that has no parts; `_NO_LEAF` for any other."""
    if isinstance(value, float) and value != value:
        return "not a number"
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
        return data if len(data) <= LONG_BYTES else f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, (slice, np.generic, itertools.count)):
        return repr(value)
    if isinstance(value, PRIMITIVES):
        return cast("Hashable", value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (tuple, frozenset)) and type(value) in (tuple, frozenset):
        parts = [_leaf(part) for part in value]
        if all(part is not _NO_LEAF for part in parts):
            return type(value)(parts)
    return _NO_LEAF


def _is_silent(value: object) -> bool:
    if isinstance(value, CODE) or inspect.isgenerator(value) or inspect.iscoroutine(value):
        return True
    return type(value).__module__.partition(".")[0] in SILENT_MODULES


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "__array__")


def _name(index: int, key: object) -> Hashable:
    """How a mapping's key is called in paths: itself, or for an object its place."""
    leaf = _leaf(key)
    return f"{type(key).__name__} {index}" if leaf is _NO_LEAF else leaf


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Every attribute in an instance's dictionary or slots, in the order of their names."""
    found: dict[str, object] = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return iter(sorted(found.items()))
