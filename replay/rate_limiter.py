"""`RateLimiter`: keeps the ratio of learning to sampling, and says who has to wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from polopt.common.clock import Clock
from polopt.common.config import ConfigError, shown

#: The two sides, either of which can be blocked.
SAMPLERS, LEARNER = "samplers", "learner"


class RateLimiter:
    """Keeps the number of rows learned at `intensity` times the number of rows sampled. The idea is
    from the rate limiters of Reverb (Cassirer et al., 2021).

        credit = intensity * rows sampled - rows learned

    A batch is learned from only if the credit pays for all of it, so learning never runs ahead. A
    fragment is inserted only if the credit stays at or below `error_buffer`. The credit is a
    fraction of integers, so it never drifts, and a checkpoint holds it exactly.

    The first `min_size` rows give no credit, because learning has not begun. If rows are lost, for
    example by a restore without the buffer, the rows that fill the buffer again give no credit
    either. So learning then goes on at the same rate, without a burst.

        while not limiter.can_learn(batch_size):     # one step of a synchronous strategy
            limiter.inserted(buffer.add(next_fragment()))
        while limiter.can_learn(batch_size):
            learn(buffer.sample(batch_size))
            limiter.learned(batch_size)

    Args:
        intensity: rows learned for each row sampled. None: `min_size` is the only limit. A float is
            rounded to the nearest fraction with a denominator up to 1,000,000.
        min_size: rows in the buffer before learning starts.
        error_buffer: the largest credit, in rows learned. Samplers are blocked above it. None:
            samplers are never blocked. It must pay for one batch and for one fragment, because
            samplers and learner would otherwise block each other (`check`).
        clock: returns the seconds of a monotonic clock.

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
        """Changes the intensity. Rows that were sampled before keep the credit that they gave.

        Raises:
            ConfigError: the intensity is 0, negative or not finite.
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
            ConfigError: `error_buffer` is smaller than one batch plus the credit of one fragment.
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
        """The number of rows that may be learned now: intensity times rows sampled, minus rows
        learned."""
        return self._credit

    @property
    def warming_up(self) -> bool:
        """Whether the buffer has fewer rows than learning needs."""
        return self._missing > 0

    def can_insert(self, rows: int) -> bool:
        """Whether a fragment of `rows` rows may be inserted now. Samplers count as blocked from the
        first False until the next True."""
        allowed = (
            self._intensity is None
            or self.error_buffer is None
            or rows <= self._missing
            or self._credit + self._intensity * (rows - self._missing) <= self.error_buffer
        )
        return self._note(SAMPLERS, allowed)

    def can_learn(self, rows: int) -> bool:
        """Whether a batch of `rows` rows may be learned from now. The learner counts as blocked
        from the first False until the next True."""
        allowed = self._missing <= 0 and (self._intensity is None or self._credit >= rows)
        return self._note(LEARNER, allowed)

    def inserted(self, rows: int, can_draw: bool = True) -> None:
        """Counts rows that were added to the buffer.

        Args:
            rows: number of added rows.
            can_draw: whether the buffer has rows whose windows are complete. Until it has such
                rows, learning cannot begin, and added rows give no credit.
        """
        filling = min(rows, self._missing) if can_draw else rows
        self._missing = max(self._missing - filling, 0 if can_draw else 1)
        counted = rows - filling
        self.num_counted += counted
        if self._intensity is not None:
            self._credit += self._intensity * counted

    def learned(self, rows: int) -> None:
        """Counts rows as learned. A strategy with batches in flight calls this when it draws the
        rows."""
        self.num_learned += rows
        if self._intensity is not None:
            self._credit -= rows

    def give_back(self, rows: int) -> None:
        """Undoes `learned` for rows that were lost on their way to the learner."""
        self.learned(-rows)

    def set_size(self, rows: int) -> None:
        """Sets how many rows the buffer holds, after it has lost some. Learning waits until the
        buffer holds `min_size` rows again. Rows added until then give no credit."""
        self._missing = max(0, self.min_size - rows)

    @property
    def delivered(self) -> float:
        """The intensity reached since the start: rows learned for each row that gave credit. 0
        before the first such row."""
        return self.num_learned / self.num_counted if self.num_counted else 0.0

    def report(self) -> dict[str, float]:
        """Returns the `intensity` reached, the `credit`, and how many seconds the samplers and the
        learner were blocked since the last report (`samplers_blocked_s`, `learner_blocked_s`). Then
        begins a new interval."""
        now_s = self._clock()
        for who, since_s in self._blocked_since.items():
            if since_s is not None:
                self._blocked_s[who] += now_s - since_s
                self._blocked_since[who] = now_s
        blocked = {f"{who}_blocked_s": blocked_s for who, blocked_s in self._blocked_s.items()}
        self._blocked_s = dict.fromkeys(self._blocked_s, 0.0)
        return {"intensity": self.delivered, "credit": float(self._credit), **blocked}

    def get_state(self) -> dict[str, Any]:
        """The counts and the credit, as integers. The blocked times are left out."""
        return {
            "num_learned": self.num_learned,
            "num_counted": self.num_counted,
            "credit": [self._credit.numerator, self._credit.denominator],
            "missing": self._missing,
        }

    def set_state(self, state: Mapping[str, Any], rows: int | None = None) -> None:
        """Restores what `get_state` returned.

        Args:
            state: what `get_state` returned.
            rows: number of rows that the restored buffer holds. None: it has lost no rows.
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
