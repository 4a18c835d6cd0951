"""Questions to a kvtier-server and its answers, on one connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvtier.errors import ProtocolError
from kvtier.protocol.messages import MAX_MESSAGE_BYTES, Bye, ClientMessage, Failed, Pong, ServerMessage, Staged, Welcome
from kvtier.protocol.wire import MAX_PAYLOAD_BYTES, Message, PayloadEnd, Receiver, pack
from kvtier.tiers.server.channel import Channel
from kvtier.tiers.server.failures import GarbledError, RefusedError, ServerError
from kvtier.tiers.server.mapping import Mapping

__all__ = ["Came", "Connection", "Place"]

Place = Callable[[Staged, int], Sequence[memoryview]]
"""Where the payload of an answer goes, of so many bytes, or none. Raises GarbledError for an answer that cannot be
right."""

Came = Callable[[int], None]
"""Told how many bytes of an answer's payload are in their place by now, while more may be on their way."""

Answer = TypeVar("Answer")


class _Asked(NamedTuple):
    kind: type
    place: Place | None
    came: Came | None = None


class Connection:
    """A connection on which the server has said welcome. Used by one call at a time; `shut` by any thread.

    What was asked is known by its number until it was answered. `held` are the reservations and leases that the server
    has given and not got back. While anything is asked, answered or held, or anything went wrong, the connection is
    not `is_idle`, and no other call may have it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._receiver: Receiver[ServerMessage] = Receiver(
            ServerMessage, max_message_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=MAX_PAYLOAD_BYTES
        )
        self._last_id = 0
        self._asked: dict[int, _Asked] = {}
        self._answers: dict[int, ServerMessage] = {}
        self._unsent: list[bytes] = []
        self.held: dict[int, tuple[int, int]] = {}
        """Handles, and where in the mapping the slot of each begins and ends."""
        self.is_broken = False
        self.welcome: Welcome
        """Set by whoever opens the connection, and from then on `is_welcome`."""
        self.is_welcome = False
        self.mapping: Mapping | None = None
        self.fds: list[int] = []
        """Descriptors that came before the welcome was whole; whoever opens the connection closes them."""

    @property
    def address(self) -> object:
        return self._channel.address

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_idle(self) -> bool:
        return not (
            self.is_broken or self._asked or self._answers or self._unsent or self.held or self._receiver.within_frame
        )

    @property
    def is_readable(self) -> bool:
        """Whether something came that nobody asked for: mostly the end."""
        return self._channel.is_readable

    @property
    def can_ask_ahead(self) -> bool:
        """Whether three may be without an answer at once."""
        return self.welcome.credits >= 3

    def begin(self, deadline: float) -> None:
        """What is said and heard from here on ends by then."""
        self._channel.deadline = deadline

    def ask(
        self, make: Callable[[int], ClientMessage], kind: type, place: Place | None = None, came: Came | None = None
    ) -> int:
        """Send a question; its number, by which `answer` has what comes."""
        self._last_id += 1
        number = self._last_id
        self._asked[number] = _Asked(kind, place, came)
        self.say(make(number))
        return number

    def ask_with(
        self,
        make: Callable[[int], ClientMessage],
        kind: type,
        payload: Sequence[memoryview],
        nbytes: int,
        *,
        later: bool = False,
    ) -> int:
        """As `ask`, with the bytes of these behind it, sent from where they lie. later: as in `say`."""
        self._last_id += 1
        number = self._last_id
        self._asked[number] = _Asked(kind, None)
        self.say(make(number), payload, nbytes, later=later)
        return number

    def say(
        self, message: ClientMessage, payload: Sequence[memoryview] = (), nbytes: int = 0, *, later: bool = False
    ) -> None:
        """Send what has no answer, or one that is known of. Raises a ServerError. later: with what is said next, or
        before an answer is waited for; each wakes the server once. Not with a payload."""
        try:
            self._unsent.append(pack(message, nbytes))
            if not later:
                self._send(payload)
        except ProtocolError as error:
            self.is_broken = True
            raise GarbledError(f"what was to be asked of {self.address} is no message: {error}") from error
        except BaseException:
            self.is_broken = True
            raise

    def _send(self, payload: Sequence[memoryview] = ()) -> None:
        unsent, self._unsent = self._unsent, []
        self._channel.send([*unsent, *payload])

    def answer(self, number: int, kind: type[Answer]) -> Answer:
        """What came to the question of this number, waiting for it. Raises a ServerError: RefusedError for one that
        the server did not answer but could, and the connection stays of use."""
        try:
            while number not in self._answers:
                if self._unsent and not self.is_readable:
                    self._send()
                self._hear()
        except BaseException:
            self.is_broken = True
            raise
        found = self._answers.pop(number)
        if isinstance(found, Failed):
            raise RefusedError(self.address, found.code, found.text, is_final=False)
        assert isinstance(found, kind)  # looked at when it came
        return found

    def call(self, make: Callable[[int], ClientMessage], kind: type[Answer]) -> Answer:
        return self.answer(self.ask(make, kind), kind)

    def ping(self, make: Callable[[int], ClientMessage]) -> None:
        self.call(make, Pong)

    def garbled(self, what: str) -> GarbledError:
        """What to raise for an answer that cannot be right; the connection is of no more use."""
        self.is_broken = True
        return GarbledError(f"{self.address} sent what no kvtier-server sends here: {what}")

    def shut(self) -> None:
        """End what is under way on it, from another thread."""
        self._channel.shut()

    def close(self, *, farewell: bool = True) -> None:
        """Leave, and say so: nothing here reads or writes a slot any more; farewell: whether that is true. The mapping
        is the caller's to release."""
        self.is_broken = True
        if self.is_welcome and farewell:
            self._channel.farewell(pack(Bye()))
        self._receiver.close()
        self._channel.close()

    # ---- what comes ----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take one answer, with all of its payload."""
        try:
            event = self._next_event()
            if not isinstance(event, Message):
                raise self.garbled("the end of a payload")
            message = event.message
            if isinstance(message, Failed) and message.id == 0:
                raise RefusedError(self.address, message.code, message.text, is_final=True)
            asked = self._asked.pop(message.id, None)
            if asked is None:
                raise self.garbled(f"{type(message).__name__} to number {message.id}, which is not open")
            if not isinstance(message, (asked.kind, Failed)):
                raise self.garbled(f"{type(message).__name__} where {asked.kind.__name__} was asked for")
            targets: Sequence[memoryview] = ()
            if asked.place is not None and isinstance(message, Staged):
                targets = asked.place(message, event.payload_bytes)
            elif event.payload_bytes:
                raise self.garbled(f"a payload of {event.payload_bytes} bytes that nobody asked for")
            if event.payload_bytes:
                self._receiver.take_payload(targets)
                self._hear_payload(event.payload_bytes, asked.came)
        except ProtocolError as error:
            raise self.garbled(str(error)) from None
        except ServerError:
            self.is_broken = True
            raise
        self._answers[message.id] = message

    def _hear_payload(self, nbytes: int, came: Came | None) -> None:
        while self._receiver.next_event() is None:
            self._receiver.received(self._channel.receive_into(self._receiver.buffer(), whole=True))
            if came is not None:
                came(nbytes - self._receiver.payload_bytes_left)

    def _next_event(self) -> Message[ServerMessage] | PayloadEnd:
        while (event := self._receiver.next_event()) is None:
            buffer = self._receiver.buffer()
            if self.is_welcome:
                number = self._channel.receive_into(buffer, whole=False)
            else:
                number, fds = self._channel.receive_first(buffer)
                self.fds.extend(fds)
            self._receiver.received(number)
        return event
