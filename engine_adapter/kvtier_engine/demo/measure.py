"""What the demo runs: the same turns on several engines, and the bytes and tokens that prove them equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvtier.config import load_settings
from kvtier.errors import ConfigError, KVTierError
from kvtier.metrics import DiskStats, RedisStats, ServerStats
from kvtier_connectors.connector import Connector
from kvtier_connectors.contract import CopyDirection
from kvtier_engine.config import EngineConfig
from kvtier_engine.demo.check import KVCheck, restored_blocks
from kvtier_engine.demo.directory import file_system
from kvtier_engine.demo.process import ReturningProcess
from kvtier_engine.demo.protocol import Start, Turn
from kvtier_engine.demo.result import BelowResult, DemoResult, DiskResult, RedisResult, ServerResult
from kvtier_engine.demo.sessions import ANSWER, Session
from kvtier_engine.hf_runner import HFRunner
from kvtier_engine.llm import LLM, Completion
from kvtier_engine.tokenizer import Tokenizer

__all__ = ["Measurement", "Model", "Progress"]

MEMCPY_BYTES = 256 << 20
FLUSH_S = 60.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model and what the engines over it share."""

    directory: Path
    runner: HFRunner
    tokenizer: Tokenizer
    fingerprint: str


@dataclass(slots=True)
class _Turns:
    """What each engine answered, session by session. The reference and cold engines answer every measured turn."""

    first: list[Completion] = field(default_factory=list)
    first_reference: list[Completion] = field(default_factory=list)
    host: list[Completion] = field(default_factory=list)
    host_reference: list[Completion] = field(default_factory=list)
    below: list[Turn] = field(default_factory=list)
    below_reference: list[Completion] = field(default_factory=list)
    recompute: list[Completion] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True when the pools that evict put out the tokens of the pool that does not."""
        return (
            _tokens(self.first) == _tokens(self.first_reference)
            and _tokens(self.host) == _tokens(self.host_reference)
            and _tokens(self.below) == _tokens(self.below_reference)
        )

    def ttft_s(self, below: str) -> dict[str, float]:
        """Medians, those restored from the tier below host memory under its name, `below`; those of the GPU prefix
        cache and of recomputing are over the turns beside both kinds of restore."""
        return {
            "recompute": _ttft(self.recompute),
            "gpu_hit": _ttft([*self.host_reference, *self.below_reference]),
            "host": _ttft(self.host),
            below: _ttft(self.below),
        }


class Measurement:
    """Runs every session's second and third turn three times: restored, from the GPU prefix cache, recomputed.

    Three engines share the weights. One has kvtier and a pool that holds two sessions, so each has been evicted by the
    time that it returns, and is restored from host memory; the reference's pool holds everything; the last forgets its
    cache before each turn. Then the first engine is closed, and the third turns run in a new process over the same tier
    below, whose GPU pool and host pool begin empty; the same turns run on the other two engines here,
    after it answered.

    A session's three turns run one after the other, so that a machine that slows down slows all, and only one process
    computes at a time. Those that restore run the same steps as the reference, so KV and tokens must be equal to the
    bit. `ttft_s` of the GPU prefix cache and of recomputing are medians over second and third turns together. The new
    process first computes one prompt of a session's length that shares no block with any, and waits until its host pool
    has pages: what a server pays once is not in its first turn's time.
    """

    def __init__(
        self,
        model: Model,
        sessions: list[Session],
        overrides: dict[str, Any],
        config: EngineConfig,
        progress: Progress,
        below: str,
    ) -> None:
        """overrides: kvtier's settings beside those of environment and file; they name one tier below host memory, a
        directory for the disk or a server of Redis. below: that tier's name."""
        self._model = model
        self._sessions = sessions
        self._overrides = overrides
        self._config = config
        self._progress = progress
        self._below = below
        self._kv = KVCheck()
        self._turns = _Turns()

    def run(self, *, small_blocks: int, session_blocks: int, corrupt: bool) -> DemoResult:
        """Measure. corrupt: flip one byte in host memory before the sessions return, which the comparison must find.

        small_blocks: the pool beside kvtier. session_blocks: what one session needs at most. Raises ReturningError when
        the new process fails.
        """
        large_blocks = (len(self._sessions) + 1) * session_blocks
        turns = self._turns
        with (
            self._engine(large_blocks, None) as reference,
            self._engine(session_blocks, None) as cold,
        ):
            with self._engine(small_blocks, self._overrides) as llm:
                for session in self._sessions:
                    self._progress(
                        f"{session.name}: first turn, in a pool of {small_blocks} blocks and one of {large_blocks}"
                    )
                    self._open(session, llm, reference)
                if corrupt:
                    self._flip_a_byte(llm)
                for session in self._sessions:
                    self._progress(f"{session.name}: returns; restored, from the GPU prefix cache, recomputed")
                    self._return(session, llm, reference, cold)
                shares = self._memcpy_shares(llm)
                num_unstored, written = self._flush(llm)
                ledger = _connector(llm).scheduler.stats().ledger
            recovered = self._run_third_turns(small_blocks, reference, cold)
        return DemoResult(
            model=self._model.directory.name,
            prompt_tokens=int(median(turn.num_prompt_tokens for turn in [*turns.host, *turns.below_reference])),
            ttft_s=turns.ttft_s(self._below),
            restored_tokens={
                "host": sum(turn.restored_tokens for turn in turns.host),
                self._below: self._block_tokens * sum(turn.hits.get(self._below, 0) for turn in turns.below),
            },
            memcpy_share=shares,
            num_blocks_compared=self._kv.compared.total(),
            kv_bit_equal=self._kv.holds_for("host", self._below),
            tokens_equal=turns.equal,
            ledger=ledger,
            below=self._describe(written, num_unstored, recovered),
        )

    def _describe(
        self, written: DiskStats | RedisStats | ServerStats, num_unstored: int, recovered: int
    ) -> BelowResult:
        """The tier below, as the first process left it and the second found it."""
        damaged_blocks = sum(turn.damaged_blocks for turn in self._turns.below)
        if isinstance(written, RedisStats):
            redis = self._overrides["redis"]
            return RedisResult(
                url=redis["url"],
                prefix=redis["prefix"],
                blocks_written=written.blocks,
                bytes_written=written.written_bytes,
                unstored_blocks=num_unstored,
                damaged_blocks=damaged_blocks,
            )
        if isinstance(written, ServerStats):
            return ServerResult(
                url=self._overrides["server"]["url"],
                blocks_written=written.blocks,
                bytes_written=written.written_bytes,
                unstored_blocks=num_unstored,
                damaged_blocks=damaged_blocks,
            )
        (directory, mode), *_ = written.modes.items()
        return DiskResult(
            directory=directory,
            file_system=file_system(Path(directory)),
            mode=mode,
            blocks_written=written.blocks,
            bytes_written=written.written_bytes,
            unstored_blocks=num_unstored,
            recovered_blocks=recovered,
            damaged_blocks=damaged_blocks,
        )

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _open(self, session: Session, llm: LLM, reference: LLM) -> None:
        """The first turn on both engines, and the question of the second."""
        session.ask(0)
        answer = _generate(llm, session.messages)
        self._turns.first.append(answer)
        self._turns.first_reference.append(_generate(reference, session.messages))
        self._go_on(session, llm, answer, next_turn=1)

    def _return(self, session: Session, llm: LLM, reference: LLM, cold: LLM) -> None:
        """The second turn, its restored blocks compared; and the question of the third."""
        answer = _generate(llm, session.messages)
        blocks = restored_blocks(llm, session.messages, answer)
        self._kv.compare("host", answer.restored_tokens // self._block_tokens, {key: kv for key, _, kv in blocks})
        self._kv.note_places({key: block_id for key, block_id, _ in blocks})
        self._turns.host.append(answer)
        self._turns.host_reference.append(_generate(reference, session.messages))
        self._turns.recompute.append(self._recompute(cold, session))
        self._go_on(session, llm, answer, next_turn=2)

    def _run_third_turns(self, num_blocks: int, reference: LLM, cold: LLM) -> int:
        """The third turns, in a new process; how many blocks that found on its disk."""
        start = Start(
            model_dir=str(self._model.directory),
            num_blocks=num_blocks,
            config=asdict(self._config),
            overrides=self._overrides,
            warm_up_tokens=self._turns.host[0].num_prompt_tokens,
        )
        with ReturningProcess(start) as process:
            self._progress(f"a new process loads the model and opens {self._below}, with nothing in memory of its own")
            recovered = process.wait_ready().recovered_blocks
            for session in self._sessions:
                self._progress(f"{session.name}: returns to the new process; then as before here")
                turn = process.ask(session.messages)
                self._kv.compare(self._below, turn.restored_tokens // self._block_tokens, turn.kv)
                self._turns.below.append(turn)
                self._turns.below_reference.append(_generate(reference, session.messages))
                self._turns.recompute.append(self._recompute(cold, session))
        return recovered

    def _go_on(self, session: Session, llm: LLM, answer: Completion, *, next_turn: int) -> None:
        """Remember the KV of what was said while the pool holds it, and ask the next question."""
        prompt = self._model.tokenizer.encode_chat(session.messages)
        self._kv.remember(llm, [*prompt, *answer.token_ids])
        session.answer(answer.text)
        session.ask(next_turn)

    @staticmethod
    def _recompute(cold: LLM, session: Session) -> Completion:
        cold.engine.reset_cache()
        return _generate(cold, session.messages)

    # ---- engines -------------------------------------------------------------------------------------------------

    @property
    def _block_tokens(self) -> int:
        return self._model.runner.layout.block_tokens

    @contextmanager
    def _engine(self, num_blocks: int, overrides: dict[str, Any] | None) -> Iterator[LLM]:
        model = self._model
        settings = None if overrides is None else load_settings(overrides=overrides)
        runner = model.runner.with_pool(num_blocks)
        llm = LLM.from_parts(runner, model.tokenizer, model.fingerprint, self._config, settings)
        try:
            yield llm
        except BaseException:
            llm.close(0.0)  # what is not on disk yet is of no use to anyone
            raise
        llm.close(FLUSH_S)

    def _flush(self, llm: LLM) -> tuple[int, DiskStats | RedisStats | ServerStats]:
        """As closing does, before the counts are gone: blocks that could not be stored, and what the tier below has."""
        llm.engine.check_integrity()
        num_unstored = llm.flush(FLUSH_S)
        stats = llm.stats()
        below = (
            None if stats is None else {"disk": stats.disk, "redis": stats.redis, "server": stats.server}[self._below]
        )
        if below is None:
            raise ConfigError("the demo needs a tier below host memory")
        self._progress(f"{below.blocks} blocks are in the {self._below} tier; the first engine closes")
        return num_unstored, below

    def _flip_a_byte(self, llm: LLM) -> None:
        """Damage the first block in host memory of the session that returns first."""
        space = _connector(llm).space
        digests = llm.engine.digests(self._model.tokenizer.encode_chat(self._sessions[0].messages))
        with space.owner("corrupt") as owner:
            leases = space.lease(digests[:1], owner)
            if not leases:
                raise KVTierError("nothing was stored that could be corrupted")
            leases[0].view[self._model.runner.layout.block_bytes // 2] ^= 1
        self._progress("one byte of one stored block was flipped")

    def _memcpy_shares(self, llm: LLM) -> dict[str, float]:
        """The copying thread's bytes a second, as a share of memcpy's for pieces of a block."""
        limit = _memcpy_rate(self._model.runner.layout.block_bytes)
        shares = {}
        for direction in CopyDirection:
            totals = _connector(llm).worker.totals(direction)
            shares[direction.value] = round(totals.num_bytes / totals.seconds / limit, 3) if totals.seconds else 0.0
        return shares


def _connector(llm: LLM) -> Connector:
    assert llm.engine.connector is not None
    return llm.engine.connector


def _generate(llm: LLM, messages: list[dict[str, str]]) -> Completion:
    answer = llm.chat(messages, ANSWER)
    if answer.error is not None:
        raise KVTierError(f"the demo's model failed: {answer.error}")
    return answer


def _ttft(turns: Sequence[Completion | Turn]) -> float:
    times = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    return round(median(times), 4)


def _tokens(turns: Sequence[Completion | Turn]) -> list[tuple[int, ...]]:
    return [turn.token_ids for turn in turns]


def _memcpy_rate(piece_bytes: int) -> float:
    """Bytes a second of one thread copying touched memory in pieces; median of five passes."""
    num_pieces = max(1, MEMCPY_BYTES // piece_bytes)
    source = np.ones((num_pieces, piece_bytes), np.uint8)
    target = np.ones_like(source)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        for piece in range(num_pieces):
            np.copyto(target[piece], source[piece])
        rates.append(source.nbytes / (time.perf_counter() - start))
    return median(rates)
