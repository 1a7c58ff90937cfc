"""`RateLimiter`: how much is learned for each row that is sampled, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from polopt.common.clock import Clock
from polopt.common.config import ConfigError, shown

#: Who can be blocked.
SAMPLERS, LEARNER = "samplers", "learner"


class RateLimiter:
    """Keeps the rows learned at `intensity` times the rows sampled. After the rate limiters of
    Reverb (Cassirer et al., 2021).

        credit = intensity * rows sampled - rows learned

    A batch is learned from only if the credit pays for all of it, so learning never runs ahead. A
    fragment is inserted only if the credit stays at or below `error_buffer`. The credit is a
    fraction of integers: it never drifts, and a checkpoint holds it exactly.

    The first `min_size` rows give no credit, because nothing is learned from them. If rows are
    lost, by a restore without the buffer for example, the rows that fill it again give none either.
    So learning goes on at the same rate, without a burst that makes up for rows nobody asked for.

        while not limiter.can_learn(batch_size):     # one step of a synchronous strategy
            limiter.inserted(buffer.add(next_fragment()))
        while limiter.can_learn(batch_size):
            learn(buffer.sample(batch_size))
            limiter.learned(batch_size)

    Args:
        intensity: rows learned for each row sampled. None: no limit but `min_size`. A float counts
            as the nearest fraction with a denominator up to 1,000,000.
        min_size: rows in the buffer before learning starts.
        error_buffer: the largest credit in rows learned, above which samplers are blocked. None:
            samplers are never blocked. At least one batch plus what a fragment gives, or nobody
            could go on (`check`).
        clock: seconds of a monotonic clock.

    Attributes:
        num_learned: rows learned since the start.
        num_counted: rows sampled since the start that gave credit.
    """

    def __init__(
        self,
        intensity: float | Fraction | None,
        min_size: int,
        error_buffer: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._intensity: Fraction | None = None
        self.set_intensity(intensity)
        self.min_size = min_size
        self.error_buffer = error_buffer
        self.num_learned = 0
        self.num_counted = 0
        self._credit = Fraction(0)
        self._missing = min_size  # rows until learning may start
        self._blocked_since: dict[str, float | None] = {SAMPLERS: None, LEARNER: None}
        self._blocked_s = {SAMPLERS: 0.0, LEARNER: 0.0}

    @property
    def intensity(self) -> Fraction | None:
        """Rows learned for each row sampled. None: no limit."""
        return self._intensity

    def set_intensity(self, intensity: float | Fraction | None) -> None:
        """Changes the intensity for the rows that are sampled from now on.

        Raises:
            ConfigError: it is not above 0 and finite.
        """
        if intensity is None:
            self._intensity = None
            return
        try:
            exact = Fraction(intensity).limit_denominator(1_000_000)
        except (ValueError, OverflowError, TypeError):
            exact = Fraction(0)
        if exact <= 0:
            raise ConfigError(
                f"key 'training_intensity': got {shown(intensity)}; allowed: a number above 0, "
                "or None for no limit"
            )
        self._intensity = exact

    def check(self, batch_rows: int, fragment_rows: int) -> None:
        """Checks that samplers and learner can never block each other.

        Args:
            batch_rows: rows of one batch.
            fragment_rows: rows of the largest fragment.

        Raises:
            ConfigError: `error_buffer` is smaller than one batch plus what a fragment gives.
        """
        if self.error_buffer is None or self._intensity is None:
            return
        least = batch_rows + self._intensity * fragment_rows
        if self.error_buffer < least:
            raise ConfigError(
                f"key 'error_buffer': got {self.error_buffer}; allowed: {-int(-least // 1)} or "
                f"more (a batch of {batch_rows} rows, and {float(self._intensity):g} times the "
                f"{fragment_rows} rows of a fragment)"
            )

    @property
    def credit(self) -> Fraction:
        """Rows that may be learned now: intensity times rows sampled, minus rows learned."""
        return self._credit

    @property
    def warming_up(self) -> bool:
        """Whether the buffer has fewer rows than learning needs."""
        return self._missing > 0

    def can_insert(self, rows: int) -> bool:
        """Whether a fragment of `rows` rows may be inserted. The time until the next True counts as
        time in which samplers were blocked."""
        allowed = (
            self._intensity is None
            or self.error_buffer is None
            or rows <= self._missing
            or self._credit + self._intensity * (rows - self._missing) <= self.error_buffer
        )
        return self._note(SAMPLERS, allowed)

    def can_learn(self, rows: int) -> bool:
        """Whether a batch of `rows` rows may be learned from. The time until the next True counts
        as time in which the learner was blocked."""
        allowed = self._missing <= 0 and (self._intensity is None or self._credit >= rows)
        return self._note(LEARNER, allowed)

    def inserted(self, rows: int, can_draw: bool = True) -> None:
        """Counts rows that were added to the buffer.

        Args:
            rows: number of them.
            can_draw: whether the buffer has rows whose windows are complete. As long as it has
                none, learning has not begun, and rows give no credit.
        """
        filling = min(rows, self._missing) if can_draw else rows
        self._missing = max(self._missing - filling, 0 if can_draw else 1)
        counted = rows - filling
        self.num_counted += counted
        if self._intensity is not None:
            self._credit += self._intensity * counted

    def learned(self, rows: int) -> None:
        """Counts rows that were drawn to be learned from. A strategy with batches in flight counts
        them when it draws them."""
        self.num_learned += rows
        if self._intensity is not None:
            self._credit -= rows

    def give_back(self, rows: int) -> None:
        """Takes back `learned` for rows that were lost on their way to the learner."""
        self.learned(-rows)

    def set_size(self, rows: int) -> None:
        """Tells how many rows the buffer holds after it has lost some: learning waits until it has
        `min_size` again, and the rows until then give no credit."""
        self._missing = max(0, self.min_size - rows)

    @property
    def delivered(self) -> float:
        """The intensity delivered since the start: rows learned per row that gave credit. 0 before
        the first."""
        return self.num_learned / self.num_counted if self.num_counted else 0.0

    def report(self) -> dict[str, float]:
        """`intensity` delivered, `credit`, and the seconds since the last report in which
        `samplers_blocked_s` and `learner_blocked_s`. Then begins a new interval."""
        now_s = self._clock()
        for who, since_s in self._blocked_since.items():
            if since_s is not None:
                self._blocked_s[who] += now_s - since_s
                self._blocked_since[who] = now_s
        blocked = {f"{who}_blocked_s": blocked_s for who, blocked_s in self._blocked_s.items()}
        self._blocked_s = dict.fromkeys(self._blocked_s, 0.0)
        return {"intensity": self.delivered, "credit": float(self._credit), **blocked}

    def get_state(self) -> dict[str, Any]:
        """Counts and credit, integers only. Blocked times are not part of it."""
        return {
            "num_learned": self.num_learned,
            "num_counted": self.num_counted,
            "credit": [self._credit.numerator, self._credit.denominator],
            "missing": self._missing,
        }

    def set_state(self, state: Mapping[str, Any], rows: int | None = None) -> None:
        """Restores what `get_state` returned.

        Args:
            state: see there.
            rows: rows that the restored buffer holds. None: all that it held.
        """
        self.num_learned = int(state["num_learned"])
        self.num_counted = int(state["num_counted"])
        self._credit = Fraction(*map(int, state["credit"]))
        self._missing = int(state["missing"])
        if rows is not None:
            self.set_size(rows)

    def _note(self, who: str, allowed: bool) -> bool:
        since_s = self._blocked_since[who]
        if allowed and since_s is not None:
            self._blocked_s[who] += self._clock() - since_s
            self._blocked_since[who] = None
        elif not allowed and since_s is None:
            self._blocked_since[who] = self._clock()
        return allowed
