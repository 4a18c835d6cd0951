"""Whether this is still the process that a tier was opened in."""

from __future__ import annotations

import os

from kvtier.errors import ForkedError

__all__ = ["OwnProcess"]


class OwnProcess:
    """Base of what must not be used in a fork's child: it shares the parent's memory, files and connections, and not
    the locks and threads that keep them in order."""

    _owned = "store"
    _instead = "open a store in the child"

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a child of the process that opened this."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises ForkedError in a fork's child."""
        if self.is_forked:
            raise ForkedError(
                f"this {self._owned} belongs to process {self._pid}, not to its fork {os.getpid()}: {self._instead}"
            )
