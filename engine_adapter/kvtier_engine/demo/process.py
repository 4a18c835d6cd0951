"""The demo's side of the process of the third turns: started, asked, and ended, each within a bound."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from kvtier.errors import KVTierError
from kvtier_engine.demo.protocol import Ask, Ready, Start, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReturningError", "ReturningProcess"]

COMMAND = (sys.executable, "-P", "-m", "kvtier_engine.demo.returning")
START_S = 300.0  # a model of several GB from a cold disk
TURN_S = 300.0
END_S = 30.0
TAIL_BYTES = 2000

M = TypeVar("M", Ready, Turn)


class ReturningError(KVTierError):
    """The process of the third turns died, or did not answer."""


class ReturningProcess:
    """Owns the process, from `with` to its end: closed in peace, or killed when the block is left by an exception.

    It has a session of its own, so that Ctrl-C reaches the demo alone; without the demo it ends by itself, as its stdin
    does. The caller computes nothing while it waits here. Raises ReturningError.
    """

    def __init__(self, start: Start, command: Sequence[str] = COMMAND) -> None:
        self._start = start
        self._command = command
        self._received = b""

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()  # a pipe would have to be read
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
            )
        except BaseException:
            self._stderr.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        try:
            assert process.stdin is not None
            process.stdin.close()
            if kind is None and self._wait(END_S) != 0:
                raise self._failure("did not end well")
        finally:
            self._kill()
            assert process.stdout is not None
            process.stdout.close()
            self._stderr.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Ready:
        """Have it load the model and open its engine."""
        self._send(self._start)
        return self._receive(Ready, START_S)

    def ask(self, messages: list[dict[str, str]]) -> Turn:
        """Have it answer a conversation."""
        self._send(Ask(messages))
        turn = self._receive(Turn, TURN_S)
        if turn.error is not None:
            raise ReturningError(f"the model failed in the process of the third turns: {turn.error}")
        return turn

    def _send(self, message: Start | Ask) -> None:
        """It reads before it answers, and a message is shorter than a pipe, so this does not block."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.to_line())
        except BrokenPipeError:
            raise self._failure("died", END_S) from None

    def _receive(self, kind: type[M], limit_s: float) -> M:
        line = self._read_line(limit_s)
        try:
            return kind.from_line(line)
        except (ValueError, TypeError, KeyError) as error:
            raise self._failure(f"answered {line[:80]!r} ({error})") from error

    def _read_line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise self._failure(f"did not answer within {limit_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failure("died", END_S)
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failure(self, what: str, limit_s: float = 0.0) -> ReturningError:
        """What to raise. The process has ended by then: by itself, within `limit_s`, or killed."""
        code = self._wait(limit_s)
        self._kill()
        status = "it was killed" if code is None else f"exit code {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip() or "nothing"
        return ReturningError(f"the process of the third turns {what} ({status}); the end of its stderr:\n{tail}")

    def _wait(self, timeout: float) -> int | None:
        """Its exit code; None when it still runs."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def _kill(self) -> None:
        self._process.kill()  # harmless after its end
        self._process.wait(END_S)
