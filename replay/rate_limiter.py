"""`RateLimiter`: keeps the ratio of learning to sampling. The side that is ahead must wait."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from polopt.common.config import ConfigError, shown

#: The largest credit in a state, in rows. The credit of a run is below the rows of a batch, or at
#: most `error_buffer`.
MOST_CREDIT = 100_000_000


class RateLimiter:
    """Keeps the number of rows learned at `intensity` times the number of rows sampled. The idea is
    from the rate limiters of Reverb (Cassirer et al., 2021).

    A row counts as sampled when a sampler (a worker) adds the row to the buffer. A row counts as
    learned each time that the learner learns from it.

        credit = intensity * rows sampled - rows learned

    The learner may learn from a batch only if the credit is at least the number of rows of the
    batch. So the learner never runs ahead. A sampler may insert a fragment that adds credit only if
    the credit does not exceed `error_buffer` afterwards. The credit is an exact fraction of
    integers, so it has no rounding errors, and a checkpoint saves the exact value.

    The first `min_size` rows do not add credit, because learning has not begun. The buffer can lose
    its rows, for example when a run continues from a checkpoint without the rows. Learning then
    waits until the buffer has `min_size` rows again. The rows that fill the buffer again do not add
    credit, so the learner does not make extra updates for these rows.

        while not limiter.can_learn(batch_size):     # one step of a synchronous optimizer
            limiter.inserted(buffer.add(next_fragment()))
        while limiter.can_learn(batch_size):
            learn(buffer.sample(batch_size))
            limiter.learned(batch_size)

    Args:
        intensity: number of rows learned for each row sampled. `None` means that `min_size` is the
            only limit. A float is rounded to the nearest fraction with a denominator of up to
            1,000,000.
        min_size: number of rows in the buffer before learning starts.
        error_buffer: the largest credit, in rows. Samplers are blocked if their fragment would
            raise the credit above this number. `None` means that samplers are never blocked. If
            this number is too small, samplers and learner block each other forever. `check` raises
            an error in this case.

    Attributes:
        num_learned: number of rows learned since the start.
        num_counted: number of rows sampled since the start, without the rows that only filled the
            buffer to `min_size`. Of the fragment that completes `min_size` again after a loss, it
            also leaves out rows whose credit would exceed `error_buffer`.

    Raises:
        ConfigError: see `set_intensity`.
    """

    def __init__(
        self,
        intensity: float | Fraction | None,
        min_size: int,
        error_buffer: int | None = None,
    ) -> None:
        self._intensity: Fraction | None = None
        self.set_intensity(intensity)
        self.min_size = min_size
        self.error_buffer = error_buffer
        self.num_learned = 0
        self.num_counted = 0
        self._credit = Fraction(0)
        self._missing = min_size  # number of rows that must arrive before learning may start

    @property
    def intensity(self) -> Fraction | None:
        """Number of rows learned for each row sampled. `None` means that the ratio is not
        limited."""
        return self._intensity

    def set_intensity(self, intensity: float | Fraction | None) -> None:
        """Changes the intensity. The credit of rows that were sampled before does not change.

        Raises:
            ConfigError: the intensity is not a finite number above 0, or is rounded to 0.
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
                f"key 'training_intensity': got {shown(intensity)}; allowed: 0.000001 or more"
            )
        self._intensity = exact

    def check(self, batch_rows: int, fragment_rows: int) -> None:
        """Checks that samplers and learner cannot block each other forever.

        Args:
            batch_rows: number of rows of one batch.
            fragment_rows: number of rows of the largest fragment.

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
        """Intensity times rows sampled, minus rows learned. Unless `intensity` is None, the learner
        may learn from at most this number of rows now."""
        return self._credit

    @property
    def missing(self) -> int:
        """Number of rows that must arrive before learning may begin."""
        return self._missing

    def can_insert(self, rows: int) -> bool:
        """Whether a sampler may insert a fragment of `rows` rows now."""
        return (
            self._intensity is None
            or self.error_buffer is None
            or rows <= self._missing
            or self._credit + self._intensity * (rows - self._missing) <= self.error_buffer
        )

    def can_learn(self, rows: int) -> bool:
        """Whether the learner may learn from a batch of `rows` rows now."""
        return self._missing <= 0 and (self._intensity is None or self._credit >= rows)

    def inserted(self, rows: int, can_draw: bool = True) -> None:
        """Counts rows that were added to the buffer.

        Args:
            rows: number of added rows.
            can_draw: whether the buffer can draw any of its rows. If not, learning cannot begin,
                and the added rows do not add credit.
        """
        filling = min(rows, self._missing) if can_draw else rows
        self._missing = max(self._missing - filling, 0 if can_draw else 1)
        counted = rows - filling
        if filling and self._intensity is not None and self.error_buffer is not None:
            # The credit may be near its bound from before the buffer lost its rows.
            free = (self.error_buffer - self._credit) // self._intensity
            counted = min(counted, max(0, int(free)))
        self.num_counted += counted
        if self._intensity is not None:
            self._credit += self._intensity * counted

    def learned(self, rows: int) -> None:
        """Counts rows as learned."""
        self.num_learned += rows
        if self._intensity is not None:
            self._credit -= rows

    def set_size(self, rows: int) -> None:
        """Tells the limiter that the buffer has lost rows, and now has `rows` rows. Learning then
        waits until the buffer has `min_size` rows again. Rows that are added in the meantime do not
        add credit."""
        self._missing = max(0, self.min_size - rows)

    @property
    def delivered(self) -> float:
        """The actual intensity since the start: `num_learned / num_counted`, or 0 if `num_counted`
        is 0."""
        return self.num_learned / self.num_counted if self.num_counted else 0.0

    def get_state(self) -> dict[str, Any]:
        """Returns the counts and the credit, as integers."""
        return {
            "num_learned": self.num_learned,
            "num_counted": self.num_counted,
            "credit": [self._credit.numerator, self._credit.denominator],
            "missing": self._missing,
        }

    def set_state(self, state: Mapping[str, Any], rows: int | None = None) -> None:
        """Restores a state from `get_state`.

        Args:
            state: the state that `get_state` returned.
            rows: number of rows in the restored buffer. `None` means that the buffer has not lost
                rows.

        Raises:
            ValueError: a count is negative or too large, or the credit is so large that learning or
                sampling would not end.
        """
        counts = {key: int(state[key]) for key in ("num_learned", "num_counted", "missing")}
        for key, count in counts.items():
            if not 0 <= count < 2**62:
                raise ValueError(f"{key}: got {count}; allowed: an integer from 0 below 2**62")
        credit = Fraction(*map(int, state["credit"]))
        if abs(credit) > MOST_CREDIT:
            raise ValueError(f"credit: got {float(credit):g}; allowed: at most {MOST_CREDIT:,}")
        self.num_learned, self.num_counted = counts["num_learned"], counts["num_counted"]
        self._missing, self._credit = counts["missing"], credit
        if rows is not None:
            self.set_size(rows)
