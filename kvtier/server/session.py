"""A session: one connection, from its first message to its end. Sans-I/O: messages in, messages out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from kvtier import __version__
from kvtier.errors import ConfigError, IntegrityError, LayoutError, ProtocolError
from kvtier.protocol import messages
from kvtier.protocol.messages import VERSIONS, ClientMessage, Failed, FailureCode, Welcome
from kvtier.server.dialogue import MAX_TEXT, Dialogue, Send
from kvtier.server.hub import Hub
from kvtier.server.peers import Peer
from kvtier.server.slots import Slots

__all__ = ["Send", "Session"]

logger = logging.getLogger("kvtier.server")  # who came is told to kvtier.audit, by whoever has the connection

_FIRST_AND_LAST = (messages.Hello, messages.Bye)
SOFTWARE = f"kvtier {__version__}"


class Session:
    """One connection's state. Every call is on the loop's thread, unless it says otherwise, and none blocks.

    The shell around it gives it each message, fills the memory that it names for a payload, and sends what it says. A
    session that found its peer wrong sends Failed with id 0, calls `close`, and takes nothing more: `is_closed`.

    Mutable state: whether it is closed, whether it has ended, and the dialogue, from Hello on.
    """

    def __init__(self, hub: Hub, peer: Peer, send: Send, close: Callable[[str], None]) -> None:
        """send: see `Send`. close: end the connection once what was sent is out, for this reason; called once at most,
        and never calls the session (the shell calls `end` afterwards). peer: its process is the session's from now on.
        """
        self.peer = peer
        self._hub = hub
        self._send = send
        self._close = close
        self._settings = hub.settings
        self._name = f"{peer.kind} client {hub.add(self)}"
        self._dialogue: Dialogue | None = None
        self._is_closed = False
        self._has_ended = False
        self._said_bye = False

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing more: after Bye, a failure, or `end`."""
        return self._is_closed

    @property
    def has_hello(self) -> bool:
        """Whether it is known whose connection it is; before that only Hello may come, soon."""
        return self._dialogue is not None

    @property
    def tenant_name(self) -> str | None:
        return None if self._dialogue is None else self._dialogue.tenant.name

    @property
    def is_mapped(self) -> bool:
        """Whether the peer has the pool's memory: no payload comes from it then."""
        return self._dialogue is not None and self._dialogue.is_mapped

    @property
    def num_requests(self) -> int:
        """Requests without an answer."""
        return 0 if self._dialogue is None else self._dialogue.num_requests

    @property
    def num_reservations(self) -> int:
        """Slots that it fills now, or was granted to fill."""
        slots = None if self._dialogue is None else self._dialogue.slots
        return 0 if slots is None else slots.num_filling + slots.num_granted

    @property
    def num_leases(self) -> int:
        """Blocks that it holds to read."""
        return 0 if self._dialogue is None else self._dialogue.slots.num_leases

    @property
    def held_bytes(self) -> int:
        """Bytes of slots that it holds, whatever for."""
        return 0 if self._dialogue is None else self._dialogue.slots.held_bytes

    @property
    def must_poll(self) -> bool:
        """Whether time alone may bring something to do."""
        return self._dialogue is not None and self._dialogue.must_poll

    @property
    def max_payload_bytes(self) -> int:
        """Of one message's payload, as Welcome said; 0 before, and for who has a mapping."""
        return 0 if self._dialogue is None or self._dialogue.is_mapped else self._dialogue.max_payload_bytes

    def waits(self) -> Iterator[float]:
        """Since when each of its stages has waited for a lower tier. Any thread."""
        return iter(()) if self._dialogue is None else self._dialogue.waits()

    def handle(self, message: ClientMessage, payload_bytes: int) -> Sequence[memoryview] | None:
        """Take a message. payload_bytes: that follow it. Answers by `send`, now or later.

        Returns where the payload belongs, lengths adding up to payload_bytes: the shell fills it, then calls
        `payload_end`, and gives no other message in between. None: there is none, or it is to be skipped, and
        `payload_end` is not called.
        """
        if self._is_closed:
            return None
        number: int = getattr(message, "id", 0)
        dialogue = self._dialogue
        # What nearly all are, found out at once: more words take as long as the answer to a short question.
        is_plain = dialogue is not None and not payload_bytes and type(message) not in _FIRST_AND_LAST
        if is_plain and dialogue is not None and dialogue.is_free_for(number, self._settings.credits):
            return self._handle(dialogue, message, number, 0)
        wrong = self._why_out_of_turn(message) or self._why_not(message, number, payload_bytes)
        if wrong is not None:
            self.fail(*wrong)
        elif isinstance(message, messages.Hello):
            self._hello(message)
        elif isinstance(message, messages.Bye):
            self._stop("goodbye")
            self._say_goodbye()
        elif self._dialogue is not None:
            return self._handle(self._dialogue, message, number, payload_bytes)
        return None

    def payload_end(self) -> None:
        """The payload that `handle` gave memory for is whole."""
        if self._dialogue is not None and not self._is_closed:
            self._dialogue.payload_end()

    def payload_sent(self) -> None:
        """The payload of the earliest message that was sent with one, and not told of yet, is out: nobody reads its
        slots any more."""
        if self._dialogue is not None:
            self._dialogue.slots.sent()
            if self._said_bye and not self._dialogue.slots.is_sending:
                self.end(clean=True)

    def poll(self) -> None:
        """Answer what ended, void what is overdue. Called by `Hub.poll`."""
        num_void = 0 if self._dialogue is None else self._dialogue.poll()
        if num_void:
            self._hub.num_void += num_void
            logger.warning(
                "%s of tenant %s did not fill %d slots within daemon.reservation_s = %g s: others may store these "
                "blocks now",
                self._name,
                self.tenant_name,
                num_void,
                self._settings.reservation_s,
            )

    def fail(self, code: str, text: str) -> None:
        """End the connection with Failed(0): the shell found something wrong with it (FailureCode.PROTOCOL with the
        receiver's words), or the daemon closes (FailureCode.CLOSING). Nothing where it is closed already."""
        if self._is_closed:
            return
        self._hub.refuse(code)
        logger.debug("%s (%s): ended, %s: %s", self._name, self.peer.address, code, text[:MAX_TEXT])
        self._send(Failed(0, code, text[:MAX_TEXT]), (), None)
        self._stop(code)

    def end(self, clean: bool) -> None:
        """The connection is gone, and nobody fills or reads what this session gave memory for. Idempotent.

        clean: the client is known to use no slot any more, as after Bye. Otherwise, where it has a mapping, its slots
        go to the quarantine.
        """
        if self._has_ended:
            return
        self._has_ended = self._is_closed = True
        process, is_kept = self.peer.process, False
        if self._dialogue is not None:
            self._dialogue.drop_requests()
            slots = self._dialogue.slots
            clean = clean or self._said_bye
            is_kept = slots.end(clean=clean, quarantine=self._hub.quarantine, process=process)
            how = "said goodbye" if clean else "went without a word; its slots are kept" if is_kept else "went"
            logger.debug("%s of tenant %s (%s) %s", self._name, self.tenant_name, self.peer.address, how)
        if process is not None and not is_kept:
            process.close()
        self._hub.remove(self)

    def check_integrity(self) -> None:
        """Raises IntegrityError when its slots, requests or credits disagree. For tests."""
        if self.num_requests > self._settings.credits:
            raise IntegrityError(f"{self._name}: {self.num_requests} requests of {self._settings.credits} credits")
        if self._dialogue is not None and not self._has_ended:
            self._dialogue.slots.check_integrity()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _why_out_of_turn(self, message: ClientMessage) -> tuple[str, str] | None:
        """Code and text where such a message may not come now, whatever is in it."""
        kind = type(message).__name__
        if self._dialogue is not None and self._dialogue.payload is not None:
            number = self._dialogue.payload.id
            return FailureCode.PROTOCOL, f"{kind} came before the payload of Commit {number} was whole"
        if isinstance(message, messages.Hello) == self.has_hello:
            wrong = "a second Hello" if self.has_hello else f"{kind} came before Hello"
            return FailureCode.PROTOCOL, f"{wrong}: Hello is the first message, and comes once"
        return None

    def _why_not(self, message: ClientMessage, number: int, payload_bytes: int) -> tuple[str, str] | None:
        """Code and text where the message ends the connection."""
        kind = type(message).__name__
        if payload_bytes and (self.is_mapped or not isinstance(message, messages.Commit)):
            return FailureCode.PROTOCOL, f"{payload_bytes} bytes of payload follow {kind}, which takes none here"
        if not number or self._dialogue is None:
            return None
        if self._dialogue.is_unanswered(number):
            return FailureCode.PROTOCOL, f"request {number} has no answer yet: the id of {kind} must be another"
        if self.num_requests >= self._settings.credits:
            return FailureCode.BUSY, (
                f"more than {self._settings.credits} requests without an answer: wait for answers, or raise "
                f"daemon.credits"
            )
        return None

    def _handle(
        self, dialogue: Dialogue, message: ClientMessage, number: int, payload_bytes: int
    ) -> Sequence[memoryview] | None:
        try:
            return dialogue.handle(message, payload_bytes)
        except ProtocolError as error:
            self.fail(FailureCode.PROTOCOL, str(error))
        except (ConfigError, LayoutError) as error:
            dialogue.fail(number, FailureCode.INVALID, str(error))
        except Exception:
            logger.exception("%s: %s failed", self._name, type(message).__name__)
            dialogue.fail(number, FailureCode.FAILED, "the server could not do it; its log says more")
        finally:
            if dialogue.must_poll and not self._is_closed:
                self._hub.watch(self)
        return None

    def _hello(self, message: messages.Hello) -> None:
        peer = self.peer
        version = max(set(message.versions) & set(VERSIONS), default=None)
        if version is None:
            theirs, ours = (", ".join(map(str, sorted(versions))) for versions in (message.versions, VERSIONS))
            self.fail(
                FailureCode.VERSION,
                f"no version of the protocol in common: the client ({message.software!r}) speaks {theirs}, the server "
                f"({SOFTWARE}) {ours}; upgrade the older of the two",
            )
            return
        tenant = self._hub.tenants.find(peer, message.token)
        if tenant is None:
            shown = f"uid {peer.uid}" if peer.kind == "unix" else "its token or certificate"
            self.fail(FailureCode.DENIED, f"no tenant is bound to {shown}; see daemon.credentials")
            return
        is_mapped = message.wants_mapping and peer.can_map and tenant.mapping_fd >= 0
        slots = Slots(tenant, peer.holder, self._name, is_mapped=is_mapped)
        dialogue = self._dialogue = Dialogue(self._hub, tenant, slots, self._name, self._send, is_mapped=is_mapped)
        logger.debug(
            "%s (%s, uid %s, pid %d, %r) is of tenant %s",
            self._name,
            peer.address,
            peer.uid,
            peer.pid,
            message.software,
            tenant.name,
        )
        welcome = Welcome(
            id=message.id,
            version=version,
            software=SOFTWARE,
            tenant=tenant.name,
            mapping_bytes=tenant.mapping_bytes if is_mapped else 0,
            checksums=self._settings.checksums,
            epoch=tenant.store.epoch,
            credits=self._settings.credits,
            max_payload_bytes=dialogue.max_payload_bytes,
            capacity_bytes=tenant.mapping_bytes,
            tiers=[lower.name for lower in tenant.store.lower],
        )
        self._send(welcome, (), tenant.mapping_fd if is_mapped else None)

    def _say_goodbye(self) -> None:
        """All is free, but for slots that are being sent: others' bytes would go out in place of theirs."""
        self._said_bye = True
        if self._dialogue is not None and self._dialogue.slots.is_sending:
            self._dialogue.slots.let_go()
        else:
            self.end(clean=True)

    def _stop(self, reason: str) -> None:
        self._is_closed = True
        if self._dialogue is not None:
            self._dialogue.drop_requests()
        self._close(reason)
