"""What computing a prompt costs, and what reading a tier costs: learnt from what was measured, forgotten with time."""

from __future__ import annotations

from math import isfinite

from kvtier.clock import Clock

__all__ = ["PrefillCost", "TierCost"]

PREFILL_FORGETTING = 0.95
TIER_FORGETTING = 0.9
MAX_FACTOR = 8.0
"""A measurement counts as at most so many times what was expected of it, once there is something to expect it from."""
MIN_MEASURED = 8
MAX_AGE_S = 60.0
MIN_SPREAD = 1e-6  # below it the measurements are multiples of each other, and tell one coefficient only


class _Fit:
    """`y = first * u + second * v`, no coefficient below 0, by recursive least squares with exponential forgetting.

    The textbook method of adaptive filtering: the sums of the normal equations are multiplied by the forgetting factor
    before each measurement, so that one that is k measurements old weighs factor ** k. Two unknowns: solved directly.
    """

    __slots__ = ("_forgetting", "_num_measured", "_uu", "_uv", "_uy", "_vv", "_vy")

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._num_measured = 0
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def add(self, u: float, v: float, y: float, weight: float) -> None:
        """One measurement; all finite, `u`, `y` and `weight` positive.

        Far more than expected counts as MAX_FACTOR times that: an outlier moves the estimate by a little, a change
        moves it all the way within a few measurements.
        """
        expected = self.predict(u, v)
        if self._num_measured >= MIN_MEASURED and expected:
            y = min(y, MAX_FACTOR * expected)
        self._num_measured += 1
        keep = self._forgetting
        self._uu = keep * self._uu + weight * u * u
        self._uv = keep * self._uv + weight * u * v
        self._vv = keep * self._vv + weight * v * v
        self._uy = keep * self._uy + weight * u * y
        self._vy = keep * self._vy + weight * v * y

    @property
    def mean_v(self) -> float:
        """`v` for each `u`, over what was measured."""
        return self._uv / self._uu if self._uu else 0.0

    def solve(self) -> tuple[float, float] | None:
        """The two coefficients; None before the first measurement. Undetermined ones: all of it is `first`."""
        if not self._uu:
            return None
        determinant = self._uu * self._vv - self._uv * self._uv
        if determinant <= MIN_SPREAD * self._uu * self._vv:
            return self._uy / self._uu, 0.0
        first = (self._vv * self._uy - self._uv * self._vy) / determinant
        second = (self._uu * self._vy - self._uv * self._uy) / determinant
        if first < 0.0:
            return 0.0, self._vy / self._vv
        return (self._uy / self._uu, 0.0) if second < 0.0 else (first, second)

    def predict(self, u: float, v: float) -> float | None:
        """`y`; None before the first measurement."""
        solution = self.solve()
        return None if solution is None else solution[0] * u + solution[1] * v


class PrefillCost:
    """Seconds that prompts take to compute: a x tokens + b x pairs, where a chunk of n tokens from a position has
    n x (position + n / 2) pairs. Neither a nor b is ever below 0. One thread.

    Mutable state: the fit.
    """

    __slots__ = ("_fit",)

    def __init__(self) -> None:
        self._fit = _Fit(PREFILL_FORGETTING)

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A step computed so much in so many seconds. What cannot be is ignored: nothing computed, no time taken."""
        if num_tokens <= 0 or not seconds > 0 or not num_pairs >= 0 or not isfinite(seconds + num_pairs):
            return
        self._fit.add(num_tokens, num_pairs, seconds, 1 / num_tokens)

    def estimate(self, position: int, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens from a position; None before the first measurement."""
        num_tokens = max(0, num_tokens)
        return self._fit.predict(num_tokens, num_tokens * (max(0, position) + num_tokens / 2))

    def backlog(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens of prompts like those measured; None before the first measurement."""
        num_tokens = max(0, num_tokens)
        return self._fit.predict(num_tokens, num_tokens * self._fit.mean_v)


class TierCost:
    """Seconds that blocks take to come from one tier: latency + (bytes queued before them + theirs) / rate. One thread.

    What was measured more than MAX_AGE_S ago is not known any more: the tier may be another by now.

    Mutable state: the fit, what is known without one, and when either was last fed.
    """

    __slots__ = ("_clock", "_fit", "_measured_at", "_s_per_byte")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fit = _Fit(TIER_FORGETTING)
        self._measured_at = clock.now()
        self._s_per_byte: float | None = None  # at least, while nothing ever came

    def observe(self, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """So many bytes, behind so many others, came in so many seconds. What cannot be is ignored."""
        if nbytes <= 0 or queued_bytes < 0 or not seconds > 0 or not isfinite(seconds):
            return
        if self._is_old:
            self._fit = _Fit(TIER_FORGETTING)
        total = nbytes + queued_bytes
        self._fit.add(total, 1.0, seconds, 1 / total)
        self._measured_at = self._clock.now()
        self._s_per_byte = None

    def observe_at_least(self, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """So many bytes, behind so many others, had not come after so many seconds. That confirms an estimate that is
        longer, however old; where nothing ever came it is all that is known."""
        if nbytes <= 0 or queued_bytes < 0 or not seconds > 0 or not isfinite(seconds):
            return
        expected = self.last_estimate(nbytes, queued_bytes)
        if expected is not None and expected >= seconds:
            self._measured_at = self._clock.now()
        elif self._fit.solve() is not None:
            self.observe(nbytes, queued_bytes, seconds)
        else:
            self._s_per_byte = seconds / (nbytes + queued_bytes)
            self._measured_at = self._clock.now()

    def estimate(self, nbytes: int, queued_bytes: int) -> float | None:
        """Seconds until so many bytes are here; None when that was never measured, or too long ago."""
        return None if self._is_old else self.last_estimate(nbytes, queued_bytes)

    def last_estimate(self, nbytes: int, queued_bytes: int) -> float | None:
        """As `estimate`, from however long ago; None when it was never measured."""
        total = max(0, nbytes + queued_bytes)
        return self._fit.predict(total, 1.0) if self._s_per_byte is None else total * self._s_per_byte

    @property
    def is_measured(self) -> bool:
        """Whether something came of late."""
        return not self._is_old and self._fit.solve() is not None

    @property
    def num_bytes_per_s(self) -> float:
        """The rate as last measured; 0.0 while none is known."""
        if self._s_per_byte is not None:
            return 1 / self._s_per_byte
        solution = self._fit.solve()
        return 1 / solution[0] if solution and solution[0] else 0.0

    @property
    def _is_old(self) -> bool:
        now = self._clock.now()
        self._measured_at = min(self._measured_at, now)  # a clock that went back makes nothing young for ever
        return now - self._measured_at > MAX_AGE_S
