"""Another's policy, held to its contract: at its first fault the built-in LRU goes on in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.errors import IntegrityError
from kvtier.policy.base import PolicyFactory
from kvtier.policy.lru import TailsFirstLRU

__all__ = ["GuardedPolicy", "PolicyError"]


class PolicyError(Exception):
    """A policy answered what its contract forbids."""


class GuardedPolicy:
    """A policy that may raise or answer nonsense, as one that does neither.

    A `TailsFirstLRU` is told everything too, so that every answer can be judged, and that it can go on at once, with
    every block at its last use, after the first fault. From then on the other is not called again. A fault is: an
    Exception, from making it or from any call; a victim that is no slot that may go; no victim though some slot may.
    What cannot be caught is a policy that hangs, or that calls back.
    """

    def __init__(self, make: PolicyFactory, note_fault: Callable[[Exception], None]) -> None:
        """note_fault: told of the fault, once, under whatever lock the policy is called under."""
        self._spare = TailsFirstLRU()
        self._note_fault = note_fault
        self._refused: set[int] = set()  # by `can_evict`, and not released since: asked about once for both
        self._theirs: object | None = None
        try:
            self._theirs = make()
        except Exception as error:  # noqa: BLE001 - noted
            note_fault(error)

    @property
    def has_failed(self) -> bool:
        return self._theirs is None

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:
        self._spare.insert(slot, parent, fingerprint)
        self._tell("insert", slot, parent, fingerprint)

    def touch(self, slots: Sequence[int]) -> None:
        self._spare.touch(slots)
        self._tell("touch", tuple(slots))

    def remove(self, slot: int) -> None:
        self._spare.remove(slot)
        self._refused.discard(slot)
        self._tell("remove", slot)

    def released(self, slots: Sequence[int]) -> None:
        self._spare.released(slots)
        self._refused.difference_update(slots)
        self._tell("released", tuple(slots))

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        allowed: set[int] = set()

        def ask(slot: int) -> bool:
            if type(slot) is not int or not self._spare.is_resident(slot):
                raise PolicyError(f"it asked whether {slot!r} may go, which is no resident slot of its own")
            if slot not in self._refused and slot not in allowed:
                (allowed if can_evict(slot) else self._refused).add(slot)
            return slot in allowed

        slot = self._tell("victim", ask)
        if self._theirs is not None:
            try:
                return self._judged(slot, ask)
            except PolicyError as fault:
                self._fall_back(fault)
        return self._spare.victim(ask)

    def check_integrity(self, slots: set[int]) -> None:
        """As the contract says; an error of another kind is one too. A policy that fails here is not replaced."""
        self._spare.check_integrity(slots)
        if self._theirs is not None:
            try:
                self._theirs.check_integrity(slots)  # type: ignore[attr-defined]
            except IntegrityError:
                raise
            except Exception as error:
                raise IntegrityError(f"eviction policy: its check_integrity raised {error!r}") from error

    def _judged(self, slot: object, can_evict: Callable[[int], bool]) -> int | None:
        if slot is None:
            other = self._spare.victim(can_evict)
            if other is not None:
                raise PolicyError(f"it answered None though slot {other} may go")
            return None
        if type(slot) is not int or not self._spare.is_resident(slot):
            raise PolicyError(f"it answered {slot!r}, which is no resident slot of its own")
        if not self._spare.is_leaf(slot):
            raise PolicyError(f"it answered slot {slot}, which resident blocks continue")
        if not can_evict(slot):
            raise PolicyError(f"it answered slot {slot}, which may not go now")
        return slot

    def _tell(self, method: str, *arguments: object) -> object:
        """Its answer; None after a fault."""
        if self._theirs is None:
            return None
        try:
            return getattr(self._theirs, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - noted
            self._fall_back(error)
            return None

    def _fall_back(self, fault: Exception) -> None:
        self._theirs = None
        self._note_fault(fault)
