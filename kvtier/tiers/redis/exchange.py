"""What one call says to one server: commands sent ahead, and their replies read in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtier.tiers.redis.channel import Channel, ChannelError
from kvtier.tiers.redis.resp import ErrorReply, Reply, encode

__all__ = ["ASKING", "AbandonedError", "Commands", "Exchange", "commands"]

ASKING = encode("ASKING")
WINDOW = 2048
"""Commands whose replies are awaited together. Two windows of short replies fit into any socket's buffer, so neither
side waits for the other to read."""

Answer_co = TypeVar("Answer_co", covariant=True)


class AbandonedError(ChannelError):
    """An answer was not worth reading to its end: the rest of the exchange wants another connection."""

    kind = "oversize"


class Exchange(ABC, Generic[Answer_co]):
    """Items for one server, in order. `answers` grows in that order too, an ErrorReply where the server refused.

    `begin` sends what may go ahead of the first reply, and `finish` does the rest. Either may raise a ChannelError;
    then `rewind`, and begin again on another connection with what has no answer yet.
    """

    def __init__(self, num_items: int, *, asking: bool) -> None:
        """asking: the server has the keys only for those who say ASKING before each command."""
        self.num_items = num_items
        self.asking = asking
        self.answers: list[Answer_co | ErrorReply] = []
        self._num_sent = 0

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.num_items

    @abstractmethod
    def begin(self, channel: Channel) -> None: ...

    @abstractmethod
    def finish(self, channel: Channel) -> None: ...

    def rewind(self) -> None:
        """The connection is gone, and with it what was sent and not answered."""
        self._num_sent = len(self.answers)


class Commands(Exchange[Reply]):
    """Short commands with short replies."""

    def __init__(self, num_items: int, make: Callable[[int, int], bytes], *, asking: bool = False) -> None:
        """make: the bytes of the commands from one item to before another; with ASKING before each, where it is so."""
        super().__init__(num_items, asking=asking)
        self._make = make

    def begin(self, channel: Channel) -> None:
        self._send_window(channel)
        self._send_window(channel)

    def finish(self, channel: Channel) -> None:
        while not self.is_done:
            number = min(WINDOW, self._num_sent - len(self.answers))
            replies = channel.read_replies(2 * number if self.asking else number)
            self.answers.extend(replies[1::2] if self.asking else replies)
            self._send_window(channel)

    def _send_window(self, channel: Channel) -> None:
        start, stop = self._num_sent, min(self._num_sent + WINDOW, self.num_items)
        if start < stop:
            channel.send([self._make(start, stop)], (2 if self.asking else 1) * (stop - start))
            self._num_sent = stop


def commands(encoded: Sequence[bytes], *, asking: bool = False) -> Commands:
    """An exchange of commands that are made already."""
    before = ASKING if asking else b""
    return Commands(
        len(encoded), lambda start, stop: b"".join([before + command for command in encoded[start:stop]]), asking=asking
    )
