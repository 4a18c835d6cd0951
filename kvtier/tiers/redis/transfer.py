"""Blocks to and from a server: frames sent from where they lie, and read to where they belong."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from kvtier.errors import FrameError
from kvtier.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    NewerFrameError,
    frame_bytes,
    padded,
    payload_checksum,
)
from kvtier.keys import KEY_BYTES, Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.redis.channel import Channel, advance
from kvtier.tiers.redis.exchange import ASKING, AbandonedError, Exchange
from kvtier.tiers.redis.resp import CRLF, ErrorReply, key_argument, repeated

__all__ = ["Gets", "Naming", "Sets"]

ASKED_BYTES = 1 << 20
"""Of answers that may wait in a server's buffers for one read, and for several reads together up to twice as much: so
that it always has the next to work on, and no more than its processor's caches hold. They count against its maxmemory,
too. Each read asks for one block at least, and for two where it is the only one: of several the others keep the server
at work."""
SENT_BYTES = 16 << 20
"""Of blocks that were sent and not yet answered: so many are sent in vain at most, to a server that has no room."""
MAX_SURPLUS_BYTES = 1 << 16
"""By how much an answer may be longer than the block and still be read, to be thrown away."""
PIECE_BYTES = 512 << 10
FIRST_BYTES = HEADER_BYTES + 32  # of an answer: its line, and the header page
NUMBER_BYTES = 4  # of an answer that is one digit
RAW = 0
_PAGE = struct.Struct("<12s4x48s48xI20sQ16x64s")
"""Of a header page what a reader compares: up to the codec, key, whether there is a parent, lengths, the payload's
checksum, tenant. See kvtier.frame."""
_NO_KEY = Key(bytes(KEY_BYTES))
_PAGE_CHECKSUM = struct.Struct("<Q")
_PAGE_CHECKSUM_AT = HEADER_BYTES - _PAGE_CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Naming:
    """What is the same for every block of a call."""

    prefix: str
    """Of every key, with tenant and epoch."""
    tenant: str


class _Form:
    """What the answers with blocks of one length have in common, and where the parts of one go that are no block.

    Of one thread, which reads one answer after the other, whatever exchanges it is in.
    """

    def __init__(self, tenant: str, nbytes: int) -> None:
        self.tenant = tenant
        self.nbytes = nbytes
        self.line = b"$%d" % frame_bytes(nbytes)
        self._begin = self.line + CRLF
        self._head = bytearray(len(self._begin) + HEADER_BYTES)
        self.head = memoryview(self._head)
        self.page = self.head[len(self._begin) :]
        self._summed = self.page[:_PAGE_CHECKSUM_AT]
        self.tail = memoryview(bytearray(padded(nbytes) - nbytes + len(CRLF)))
        self._start, self._lengths, self._tenant = _invariants(tenant, nbytes)
        self.begin_bytes = len(self._begin)
        """Of the line with its end."""
        self.answer_bytes = len(self.head) + nbytes + len(self.tail)

    def is_begun(self, nbytes: int) -> bool:
        """Whether so many bytes, of which the first are in `head`, begin an answer of this form."""
        return nbytes >= self.begin_bytes and self._head.startswith(self._begin)

    def checksum(self, key: Key) -> int | None:
        """That of the payload, as `page` says; None where it is not, to the bit, what is written for a block with
        this key now: then it has to be looked at closely.
        """
        start, found, has_parent, lengths, checksum, tenant = _PAGE.unpack_from(self.page)
        is_expected = (
            found == key
            and start == self._start
            and lengths == self._lengths
            and tenant == self._tenant
            and has_parent <= 1
            and xxhash.xxh3_64_intdigest(self._summed) == _PAGE_CHECKSUM.unpack_from(self.page, _PAGE_CHECKSUM_AT)[0]
        )
        return checksum if is_expected else None


class _OwnForm(threading.local):
    last: _Form | None = None


_own = _OwnForm()


def _form(tenant: str, nbytes: int) -> _Form:
    """This thread's: mostly the one of its last call."""
    form = _own.last
    if form is None or form.nbytes != nbytes or form.tenant != tenant:
        form = _own.last = _Form(tenant, nbytes)
    return form


_frame_bytes = lru_cache(64)(frame_bytes)


@lru_cache(64)
def _invariants(tenant: str, nbytes: int) -> tuple[bytes, bytes, bytes]:
    """Of the header pages of blocks of one length: up to the codec, lengths, tenant."""
    size = min(max(1, nbytes), MAX_PAYLOAD_BYTES)  # others cannot be written
    header = FrameHeader(key=_NO_KEY, parent=None, raw_bytes=size, stored_bytes=size, checksum=0, tenant=tenant)
    start, _, _, lengths, _, name = _PAGE.unpack_from(header.encode())
    return start, lengths, name


class Gets(Exchange[ReadOutcome]):
    """Blocks to read. The answer of a key under which something else lies is DAMAGED; of one with a block of another
    length, or a frame of a later kvtier, MISS.
    """

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        naming: Naming,
        ttl_ms: int | None,
        *,
        asking: bool = False,
        num_reads: int = 1,
    ) -> None:
        """ttl_ms: how long a block lives from now on, where it has less; None: not to be changed. num_reads: how many
        calls read from the servers now.
        """
        super().__init__(len(requests), asking=asking)
        self._requests = requests
        self._naming = naming
        self._ttl_ms = ttl_ms
        self._ahead_bytes = 0
        self._most_bytes = 2 * ASKED_BYTES // max(2, num_reads)
        self._least_ahead = 2 if num_reads == 1 else 1
        self._form = _form(naming.tenant, len(requests[0].buffer))
        self._frame_bytes = [_frame_bytes(len(request.buffer)) for request in requests]
        self._commands, self._num_replies = self._encoded()
        self._command_bytes = len(self._commands) // len(requests)  # all have one length

    def begin(self, channel: Channel) -> None:
        self._ahead_bytes = 0
        self._ask(channel)

    def finish(self, channel: Channel) -> None:
        while (number := len(self.answers)) < self.num_items:
            if self.asking:
                channel.prefetch(FIRST_BYTES)
                channel.read_reply()
            self._read(channel, self._requests[number])
            self._ahead_bytes -= self._frame_bytes[number]
            if self._ttl_ms is not None:
                channel.prefetch(NUMBER_BYTES)  # and not the next block, which goes to its place directly
                channel.read_replies(2 if self.asking else 1)  # an old server's refusal changes nothing for the read
            if self._num_sent < self.num_items and (
                self._ahead_bytes <= self._most_bytes // 2 or self._num_sent <= number + self._least_ahead
            ):
                self._ask(channel)

    def _ask(self, channel: Channel) -> None:
        """Ask for as many more as may be on their way."""
        start = stop = self._num_sent
        least = len(self.answers) + self._least_ahead
        while stop < self.num_items and (stop < least or self._ahead_bytes < self._most_bytes):
            self._ahead_bytes += self._frame_bytes[stop]
            stop += 1
        if start < stop:
            commands = self._commands[self._command_bytes * start : self._command_bytes * stop]
            channel.send([commands], self._num_replies * (stop - start))
            self._num_sent = stop

    def _encoded(self) -> tuple[bytes, int]:
        """The commands for all of the blocks, and how many answers those for one have."""
        keys = [request.key for request in self._requests]
        before, prefix = ASKING if self.asking else b"", self._naming.prefix
        if self._ttl_ms is None:
            return repeated("GET", prefix, keys, before=before), 1 + self.asking
        # Lengthened only: a block that was given longer keeps that, and one without an end gets none.
        return b"".join(
            [
                repeated("GET", prefix, [key], before=before)
                + repeated("PEXPIRE", prefix, [key], self._ttl_ms, "GT", before=before)
                for key in keys
            ]
        ), 2 * (1 + self.asking)

    def _read(self, channel: Channel, request: ReadRequest) -> None:
        buffer = request.buffer
        if len(buffer) != self._form.nbytes:
            self._form = _form(self._naming.tenant, len(buffer))
        form = self._form
        # As if the answer were the block: then its first bytes are where they belong.
        is_short = len(buffer) <= PIECE_BYTES
        targets = [form.head, buffer, form.tail] if is_short else [form.head, buffer[:PIECE_BYTES]]
        received = channel.read_ahead(targets)
        if form.is_begun(received):
            self._read_block(channel, request, targets, received)
            return
        if received:
            channel.push_back(targets, received)
        channel.prefetch(FIRST_BYTES)
        line = channel.read_line()
        if line == form.line:
            self._read_block(channel, request, targets, form.begin_bytes)
        elif line.startswith(b"$") and line != b"$-1":
            self._read_other(channel, request, channel.number(line))
        else:
            self._read_refusal(channel, line)

    def _read_refusal(self, channel: Channel, line: bytes) -> None:
        channel.settle()
        if line.startswith(b"-"):
            self.answers.append(ErrorReply(line[1:].decode("utf-8", "replace")))
        elif line == b"$-1":
            self.answers.append(ReadOutcome.MISS)
        else:
            raise channel.garbled(f"{line[:40]!r} where a block was asked for")

    def _read_block(self, channel: Channel, request: ReadRequest, targets: list[memoryview], received: int) -> None:
        """The rest of an answer with as many bytes as the block's. targets: where it begins to go; received: how much
        of it is there.
        """
        buffer, form = request.buffer, self._form
        if received < form.answer_bytes:
            advance(targets, received)
            channel.read_into(targets)
        if len(buffer) <= PIECE_BYTES:
            checksum = payload_checksum(buffer)
        else:  # summed piece by piece, while it is still in the processor's cache and the next piece is coming
            summed = xxhash.xxh3_64(buffer[:PIECE_BYTES])
            for start in range(PIECE_BYTES, len(buffer), PIECE_BYTES):
                piece = buffer[start : start + PIECE_BYTES]
                channel.read_into([piece])
                summed.update(piece)
            channel.read_into([form.tail])
            checksum = summed.intdigest()
        if form.tail[-2:] != CRLF:
            raise channel.garbled("a string without an end")
        channel.settle()
        expected = form.checksum(request.key)
        if expected is None:
            header = self._decode(request.key, form.page, frame_bytes(len(buffer)))
            if not isinstance(header, FrameHeader) or header.raw_bytes != len(buffer):
                self.answers.append(header if isinstance(header, ReadOutcome) else ReadOutcome.MISS)
                return
            expected = header.checksum
        self.answers.append(ReadOutcome.OK if checksum == expected else ReadOutcome.DAMAGED)

    def _read_other(self, channel: Channel, request: ReadRequest, nbytes: int) -> None:
        """A string of another length: no block of this one's."""
        outcome = ReadOutcome.DAMAGED
        left = nbytes + len(CRLF)
        if nbytes >= HEADER_BYTES:
            page = self._form.page
            channel.read_into([page])
            left -= HEADER_BYTES
            header = self._decode(request.key, page, nbytes)
            outcome = header if isinstance(header, ReadOutcome) else ReadOutcome.MISS
        self._drop(channel, request, left, outcome)

    def _decode(self, key: Key, page: memoryview, nbytes: int) -> FrameHeader | ReadOutcome:
        """The header, or what to answer where it is not one of a block with this key and this length of frame."""
        try:
            header = FrameHeader.decode(page)
        except NewerFrameError:
            return ReadOutcome.MISS  # whoever wrote it reads it
        except FrameError:
            return ReadOutcome.DAMAGED
        is_ours = header.key == key and header.tenant == self._naming.tenant and header.codec == RAW
        is_whole = header.stored_bytes == header.raw_bytes and header.frame_bytes == nbytes
        return header if is_ours and is_whole else ReadOutcome.DAMAGED

    def _drop(self, channel: Channel, request: ReadRequest, nbytes: int, outcome: ReadOutcome) -> None:
        """Answer so, and get past the bytes that are left: through the buffer, which is undefined then anyway."""
        self.answers.append(outcome)
        if nbytes > frame_bytes(len(request.buffer)) + MAX_SURPLUS_BYTES:
            raise AbandonedError(f"{channel.address} holds {nbytes} bytes under the key of a block")
        scratch = request.buffer if len(request.buffer) > HEADER_BYTES else self._form.page
        channel.skip(nbytes, scratch)
        channel.settle()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to write, and how long it lives; None: until it is evicted."""

    request: WriteRequest
    ttl_ms: int | None


class Sets(Exchange[WriteOutcome]):
    """Blocks to write where there is none. After the first for which the server has no memory no other is sent."""

    def __init__(
        self, blocks: Sequence[Outgoing], naming: Naming, *, asking: bool = False, is_full: bool = False
    ) -> None:
        """is_full: the server had no memory a moment ago: send nothing, and say so."""
        super().__init__(len(blocks), asking=asking)
        self._blocks = blocks
        self._naming = naming
        self._ahead_bytes = 0
        self.was_refused = False
        """Whether the server answered that it has no memory."""
        if is_full:
            self._give_up()

    def begin(self, channel: Channel) -> None:
        self._ahead_bytes = 0
        self._send_ahead(channel)

    def finish(self, channel: Channel) -> None:
        while not self.is_done:
            if len(self.answers) < self._num_sent:
                self._read(channel)
            self._send_ahead(channel)

    def _send_ahead(self, channel: Channel) -> None:
        while self._num_sent < self.num_items:
            block = self._blocks[self._num_sent]
            nbytes = frame_bytes(len(block.request.buffer))
            if self._ahead_bytes and self._ahead_bytes + nbytes > SENT_BYTES:
                return
            if self._ahead_bytes and channel.is_readable:
                self._read(channel)  # it may be that there is no room: not a reason to send all the others
                continue
            if self.was_refused:
                if len(self.answers) == self._num_sent:
                    self._give_up()
                return
            self._send(channel, block)
            self._ahead_bytes += nbytes
            self._num_sent += 1

    def _send(self, channel: Channel, block: Outgoing) -> None:
        request, nbytes = block.request, len(block.request.buffer)
        header = FrameHeader(
            key=request.key,
            parent=request.parent,
            raw_bytes=nbytes,
            stored_bytes=nbytes,
            checksum=payload_checksum(request.buffer) if request.checksum is None else request.checksum,
            codec=RAW,
            tenant=self._naming.tenant,
        )
        name = (self._naming.prefix + key_argument(request.key)).encode("ascii")
        options = b"$2\r\nNX\r\n"
        if block.ttl_ms is not None:
            options += b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(block.ttl_ms)), block.ttl_ms)
        head = b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            ASKING if self.asking else b"",
            4 if block.ttl_ms is None else 6,
            len(name),
            name,
            frame_bytes(nbytes),
            header.encode(),
        )
        tail = bytes(padded(nbytes) - nbytes) + CRLF + options
        channel.send([head, request.buffer, tail], 2 if self.asking else 1)

    def _read(self, channel: Channel) -> None:
        if self.asking:
            channel.read_reply()
        reply = channel.read_reply()
        self._ahead_bytes -= frame_bytes(len(self._blocks[len(self.answers)].request.buffer))
        if reply == b"OK":
            self.answers.append(WriteOutcome.STORED)
        elif reply is None:
            self.answers.append(WriteOutcome.ALREADY_STORED)
        elif isinstance(reply, ErrorReply) and reply.code == "OOM":
            self.was_refused = True
            self.answers.append(WriteOutcome.FULL)
        elif isinstance(reply, ErrorReply):
            self.answers.append(reply)
        else:
            raise channel.garbled("an answer that SET does not give")

    def _give_up(self) -> None:
        self.answers.extend([WriteOutcome.FULL] * (self.num_items - len(self.answers)))
        self._num_sent = self.num_items
