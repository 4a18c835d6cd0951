"""What the demo runs: the same turns on three engines, and the bytes and tokens that prove them equal."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from kvtier.config import Settings
from kvtier.errors import KVTierError
from kvtier.keys import BlockDigest
from kvtier.metrics import LedgerSnapshot
from kvtier_connectors.contract import CopyDirection
from kvtier_engine.config import EngineConfig
from kvtier_engine.demo.sessions import Session
from kvtier_engine.hf_runner import HFRunner
from kvtier_engine.llm import LLM, Completion
from kvtier_engine.sampling import SamplingParams
from kvtier_engine.tokenizer import Tokenizer

__all__ = ["DemoResult", "Measurement", "Model", "Progress"]

ANSWER = SamplingParams(max_tokens=16, ignore_eos=True)
MEMCPY_BYTES = 256 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model and what the engines over it share."""

    name: str
    runner: HFRunner
    tokenizer: Tokenizer
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; times are medians over the measured turns."""

    model: str
    prompt_tokens: int
    ttft_s: dict[str, float]
    restored_tokens: int
    memcpy_share: dict[str, float]
    num_blocks_compared: int
    kv_bit_equal: bool
    tokens_equal: bool
    ledger: LedgerSnapshot

    def to_json(self) -> dict[str, object]:
        ledger = self.ledger
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": self.ttft_s,
            "restored_tokens": {"host": self.restored_tokens},
            "memcpy_share": self.memcpy_share,
            "kv_bit_equal": self.kv_bit_equal,
            "tokens_equal": self.tokens_equal,
            "ledger": {
                "due": ledger.due,
                "stored": ledger.stored,
                "dropped": {reason.value: count for reason, count in ledger.dropped.items()},
                "pending": ledger.pending,
            },
        }


@dataclass(slots=True)
class _KVCheck:
    """Blocks as they were before they were evicted, against what stands in the pool after landing."""

    before: dict[BlockDigest, tuple[int, bytes]] = field(default_factory=dict)
    restored: int = 0
    compared: int = 0
    different: int = 0
    moved: int = 0

    @property
    def equal(self) -> bool:
        """True when every restored block was compared, none differed, and they stand in other places than before."""
        return self.compared == self.restored > 0 and self.different == 0 and self.moved > 0


@dataclass(slots=True)
class _Turns:
    """What each engine answered, session by session."""

    first: list[Completion] = field(default_factory=list)
    first_reference: list[Completion] = field(default_factory=list)
    host: list[Completion] = field(default_factory=list)
    gpu_hit: list[Completion] = field(default_factory=list)
    recompute: list[Completion] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True when the pool that evicts put out the tokens of the pool that does not."""
        return _tokens(self.first) == _tokens(self.first_reference) and _tokens(self.host) == _tokens(self.gpu_hit)


class Measurement:
    """Runs every session's second turn three times: restored from host memory, from the GPU prefix cache, recomputed.

    Three engines share the weights. One has kvtier and a pool that holds two sessions, so each has been evicted by the
    time that it returns; the reference's pool holds everything; the third forgets its cache before each turn. A
    session's three turns run one after the other, so that a machine that slows down slows all. The first two engines
    run the same steps, so their KV and tokens must be equal to the bit.
    """

    def __init__(
        self, model: Model, sessions: list[Session], settings: Settings, config: EngineConfig, progress: Progress
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._settings = settings
        self._config = config
        self._progress = progress
        self._kv = _KVCheck()

    def run(self, *, small_blocks: int, session_blocks: int, corrupt: bool) -> DemoResult:
        """Measure. corrupt: flip one stored byte before the sessions return, which the comparison must find.

        small_blocks: the pool beside kvtier. session_blocks: what one session needs at most.
        """
        large_blocks = (len(self._sessions) + 1) * session_blocks
        turns = _Turns()
        with (
            self._engine(small_blocks, self._settings) as llm,
            self._engine(large_blocks, None) as reference,
            self._engine(session_blocks, None) as cold,
        ):
            for session in self._sessions:
                self._progress(
                    f"{session.name}: first turn, in a pool of {small_blocks} blocks and one of {large_blocks}"
                )
                self._open(session, llm, reference, turns)
            if corrupt:
                self._flip_a_byte(llm)
            for session in self._sessions:
                self._progress(f"{session.name}: returns; restored, from the GPU prefix cache, recomputed")
                turns.host.append(self._return(llm, session))
                turns.gpu_hit.append(self._generate(reference, session.messages))
                cold.engine.reset_cache()
                turns.recompute.append(self._generate(cold, session.messages))
            llm.engine.check_integrity()
            ledger, shares = self._ledger(llm), self._memcpy_shares(llm)
        return DemoResult(
            model=self._model.name,
            prompt_tokens=int(median(turn.num_prompt_tokens for turn in turns.host)),
            ttft_s={key: _ttft(getattr(turns, key)) for key in ("recompute", "gpu_hit", "host")},
            restored_tokens=sum(turn.restored_tokens for turn in turns.host),
            memcpy_share=shares,
            num_blocks_compared=self._kv.compared,
            kv_bit_equal=self._kv.equal,
            tokens_equal=turns.equal,
            ledger=ledger,
        )

    def _open(self, session: Session, llm: LLM, reference: LLM, turns: _Turns) -> None:
        """The first turn on both engines, and the question of the second."""
        session.ask(0)
        answer = self._generate(llm, session.messages)
        turns.first.append(answer)
        turns.first_reference.append(self._generate(reference, session.messages))
        session.answer(answer.text)
        session.ask(1)
        self._remember(llm, session, answer)

    def _engine(self, num_blocks: int, settings: Settings | None) -> LLM:
        model = self._model
        runner = model.runner.with_pool(num_blocks)
        return LLM.from_parts(runner, model.tokenizer, model.fingerprint, self._config, settings)

    def _generate(self, llm: LLM, messages: list[dict[str, str]]) -> Completion:
        answer = llm.chat(messages, ANSWER)
        if answer.error is not None:
            raise KVTierError(f"the demo's model failed: {answer.error}")
        return answer

    def _return(self, llm: LLM, session: Session) -> Completion:
        answer = self._generate(llm, session.messages)
        prompt = self._model.tokenizer.encode_chat(session.messages)
        size = self._model.runner.layout.block_tokens
        cached = llm.engine.cached_blocks(prompt)
        start = answer.gpu_hit_tokens // size
        self._kv.restored += answer.restored_tokens // size
        for digest, block_id in cached[start : start + answer.restored_tokens // size]:
            old_id, old_bytes = self._kv.before[digest]
            self._kv.compared += 1
            self._kv.moved += old_id != block_id
            self._kv.different += _block_digest(llm, block_id) != old_bytes
        return answer

    def _remember(self, llm: LLM, session: Session, answer: Completion) -> None:
        """Digest the session's blocks while the GPU pool still holds them."""
        prompt = self._model.tokenizer.encode_chat(session.messages[:2])
        for digest, block_id in llm.engine.cached_blocks([*prompt, *answer.token_ids]):
            self._kv.before[digest] = (block_id, _block_digest(llm, block_id))

    def _flip_a_byte(self, llm: LLM) -> None:
        """Damage the first stored block of the session that returns first."""
        connector = llm.engine.connector
        assert connector is not None
        prompt = self._model.tokenizer.encode_chat(self._sessions[0].messages)
        digests = llm.engine.digests(prompt)
        with connector.space.owner("corrupt") as owner:
            leases = connector.space.lease(digests[:1], owner)
            if not leases:
                raise KVTierError("nothing was stored that could be corrupted")
            leases[0].view[self._model.runner.layout.block_bytes // 2] ^= 1
        self._progress("one byte of one stored block was flipped")

    @staticmethod
    def _ledger(llm: LLM) -> LedgerSnapshot:
        assert llm.engine.connector is not None
        return llm.engine.connector.scheduler.stats().ledger

    def _memcpy_shares(self, llm: LLM) -> dict[str, float]:
        """The copying thread's bytes a second, as a share of memcpy's for pieces of a block."""
        assert llm.engine.connector is not None
        limit = _memcpy_rate(self._model.runner.layout.block_bytes)
        shares = {}
        for direction in CopyDirection:
            totals = llm.engine.connector.worker.totals(direction)
            shares[direction.value] = round(totals.num_bytes / totals.seconds / limit, 3) if totals.seconds else 0.0
        return shares


def _ttft(turns: list[Completion]) -> float:
    times = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    return round(median(times), 4)


def _tokens(turns: list[Completion]) -> list[tuple[int, ...]]:
    return [turn.token_ids for turn in turns]


def _block_digest(llm: LLM, block_id: int) -> bytes:
    digest = hashlib.sha256()
    for plane in llm.engine.block_bytes(block_id):
        digest.update(plane)
    return digest.digest()


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
