"""Restore or compute: how many of the blocks that tiers hold are worth restoring, by what both take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvtier.clock import Clock
from kvtier.cost import PrefillCost, TierCost
from kvtier.episode import HOST, TierPart
from kvtier.reasons import MissReason

__all__ = ["Choice", "RestoreCosts"]


@dataclass(frozen=True, slots=True)
class Choice:
    """num_blocks: leading blocks worth restoring. predicted_s: how long that takes; None where it is not known."""

    num_blocks: int
    predicted_s: float | None


class RestoreCosts:
    """What computing and each tier cost, and the choice between them. One thread.

    A tier that was judged slow is not used, hence not measured, hence unknown after a while: then one request at a time
    tries it, and the others go on with what was known last.

    Mutable state: everything. A probe is held by whoever tries such a tier, until it is measured or released.
    """

    def __init__(self, margin: float, block_tokens: int, block_bytes: int, clock: Clock) -> None:
        self._factor = 1.0 + margin
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._prefill = PrefillCost()
        self._tiers: dict[str, TierCost] = {}
        self._probes: dict[str, object] = {}
        self._ended_at: dict[str, float] = {}
        self.backlog_tokens = 0

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second by tier, as last measured. Any thread."""
        return {tier: cost.num_bytes_per_s for tier, cost in self._tiers.copy().items()}

    def observe_prefill(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        self._prefill.observe(num_tokens, num_pairs, seconds)

    def observe_tier(self, tier: str, nbytes: int, queued_bytes: int, seconds: float) -> None:
        self._tier(tier).observe(nbytes, queued_bytes, seconds)
        self._probes.pop(tier, None)

    def observe_stage(
        self,
        parts: Iterable[TierPart],
        arrived: Mapping[str, int],
        queued_bytes: int,
        seconds: float,
        miss: MissReason | None,
    ) -> None:
        """A stage of these parts brought so many blocks by tier. Tiers are read side by side: each took all the time.

        One that brought nothing in time takes at least so long; one that failed says nothing of its speed.
        """
        if miss not in (None, MissReason.TIMEOUT, MissReason.COST):
            return
        for tier, num_blocks in arrived.items():
            if num_blocks > 0:
                self.observe_blocks(tier, num_blocks, queued_bytes, seconds)
                self._ended_at[tier] = self._clock.now()
        if miss is not MissReason.TIMEOUT:
            return
        for part in parts:
            if part.tier == HOST or arrived.get(part.tier, 0) > 0:
                continue
            self._tier(part.tier).observe_at_least(part.num_blocks * self._block_bytes, queued_bytes, seconds)
            self._probes.pop(part.tier, None)

    def observe_blocks(self, tier: str, num_blocks: int, queued_bytes: int, seconds: float) -> None:
        """A stage that began so long ago, behind so many bytes, has brought so many blocks of one tier by now.

        Not all of those bytes may have been read: stages before it may have been given up. So where one of them ended
        meanwhile, the time since then counts, and nothing was queued.
        """
        since_s = self.since_last_s(tier)
        if 0.0 < since_s < seconds:
            queued_bytes, seconds = 0, since_s
        self.observe_tier(tier, num_blocks * self._block_bytes, queued_bytes, seconds)

    def since_last_s(self, tier: str) -> float:
        """Seconds since a stage ended that brought blocks of this tier; inf without one."""
        return self._clock.now() - self._ended_at.get(tier, -inf)

    def is_measured(self, tier: str) -> bool:
        """Whether blocks of this tier came of late."""
        return tier in self._tiers and self._tiers[tier].is_measured

    def read_s(self, tier: str, nbytes: int, queued_bytes: int) -> float | None:
        """Seconds until so many bytes behind so many others are here; None where that was not measured of late."""
        return self._tiers[tier].estimate(nbytes, queued_bytes) if self.is_measured(tier) else None

    def reads(self, parts: Iterable[TierPart]) -> dict[str, int]:
        """Bytes to be read, by lower tier."""
        reads: dict[str, int] = {}
        for part in parts:
            if part.tier != HOST:
                reads[part.tier] = reads.get(part.tier, 0) + part.num_blocks * self._block_bytes
        return reads

    def is_wait_worth_it(self, position: int, num_blocks: int, left_s: float) -> bool:
        """Whether blocks that will be in host memory in so many seconds are on the GPU before they could be computed.
        What is not known is tried."""
        compute, backlog = self.compute_s(position, num_blocks), self._prefill.backlog(self.backlog_tokens)
        if compute is None or backlog is None:
            return True
        landing = self._tier_s(HOST, num_blocks * self._block_bytes, 0, None) or 0.0
        return (max(0.0, left_s - backlog) + landing) * self._factor < compute

    def compute_s(self, position: int, num_blocks: int) -> float | None:
        """Seconds to compute so many blocks from a position; None before the first measurement."""
        return self._prefill.estimate(position, num_blocks * self._block_tokens)

    def recompute_s(self, position: int, num_blocks: int) -> float | None:
        """As `compute_s`, behind the prompts that are to be computed first: when they are there, if not restored."""
        compute, backlog = self.compute_s(position, num_blocks), self._prefill.backlog(self.backlog_tokens)
        return None if compute is None or backlog is None else compute + backlog

    def is_landing_worth_it(self, position: int, num_blocks: int) -> bool:
        """Whether to copy blocks up from host memory, or to compute them. What is not known is tried."""
        compute = self.compute_s(position, num_blocks)
        landing = self._tier_s(HOST, num_blocks * self._block_bytes, 0, None)
        return compute is None or landing is None or landing * self._factor < compute

    def choose(self, position: int, parts: Sequence[TierPart], prober: object, max_stage_s: float = inf) -> Choice:
        """The leading parts that save most time, if any does by the margin. What was never measured is tried.

        prober: takes the probes that the choice implies; `release` when it is over. max_stage_s: what takes longer to
        stage is not begun: it would be given up.
        """
        best, _ = self.weigh(position, parts, prober, max_stage_s)
        self._take_probes(parts, best.num_blocks, prober)
        return best

    def weigh(
        self, position: int, parts: Sequence[TierPart], prober: object, max_stage_s: float = inf
    ) -> tuple[Choice, float]:
        """What `choose` would say, and the seconds that it saves; inf before computing was measured. Pure."""
        backlog_s = self._prefill.backlog(self.backlog_tokens) or 0.0
        best, best_gain_s = Choice(0, None), 0.0
        num_blocks = 0
        reads: dict[str, tuple[int, int]] = {HOST: (0, 0)}
        for part in parts:
            num_blocks += part.num_blocks
            nbytes, queued_bytes = reads.get(part.tier, (0, 0))
            reads[part.tier] = nbytes + part.num_blocks * self._block_bytes, max(queued_bytes, part.queued_bytes)
            compute_s = self.compute_s(position, num_blocks)
            stage_s, landing_s, is_known = self._restore_s(reads, num_blocks, prober)
            choice = Choice(num_blocks, stage_s + landing_s if is_known else None)
            if compute_s is None:
                best, best_gain_s = choice, inf
                continue
            cost_s = max(0.0, stage_s - backlog_s) + landing_s
            if stage_s <= max_stage_s and cost_s * self._factor < compute_s and compute_s - cost_s > best_gain_s:
                best, best_gain_s = choice, compute_s - cost_s
        return best, best_gain_s

    def release(self, prober: object) -> None:
        """Its probes are over, measured or not."""
        for tier in [tier for tier, holder in self._probes.items() if holder is prober]:
            del self._probes[tier]

    def _restore_s(
        self, reads: Mapping[str, tuple[int, int]], num_blocks: int, prober: object
    ) -> tuple[float, float, bool]:
        """Seconds to stage and to land, with 0 for what is not known, and whether all of it is.

        reads: bytes to be read and bytes queued before them, by tier. All tiers read at once.
        """
        stage_s, is_known = 0.0, True
        for tier, (nbytes, queued_bytes) in reads.items():
            if tier != HOST:
                seconds = self._tier_s(tier, nbytes, queued_bytes, prober)
                stage_s, is_known = max(stage_s, seconds or 0.0), is_known and seconds is not None
        landing_s = self._tier_s(HOST, num_blocks * self._block_bytes, reads[HOST][1], prober)
        return stage_s, landing_s or 0.0, is_known and landing_s is not None

    def _tier(self, name: str) -> TierCost:
        if name not in self._tiers:
            self._tiers[name] = TierCost(self._clock)
        return self._tiers[name]

    def _tier_s(self, tier: str, nbytes: int, queued_bytes: int, prober: object) -> float | None:
        cost = self._tiers.get(tier)
        if cost is None:
            return None
        if self._probes.get(tier, prober) is not prober:
            return cost.last_estimate(nbytes, queued_bytes)
        return cost.estimate(nbytes, queued_bytes)

    def _take_probes(self, parts: Sequence[TierPart], num_blocks: int, prober: object) -> None:
        used = {HOST} if num_blocks else set()
        for part in parts:
            if num_blocks <= 0:
                break
            used.add(part.tier)
            num_blocks -= part.num_blocks
        for tier in used & self._tiers.keys():
            if self._tiers[tier].estimate(0, 0) is None:
                self._probes.setdefault(tier, prober)
