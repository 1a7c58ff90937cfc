"""`Scaling`: how the observations and rewards of a batch are normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Scaling(NamedTuple):
    """Mean and inverse standard deviation of observations, and scale of rewards, as they were when
    the actions of a batch `[T, N]` were chosen. Few of its N columns differ, so that each of V
    scalings is held once.

    Attributes:
        mean: `[V, ...]` float32, float64 for observations that need it; None: observations are not
            normalised.
        inverse_std: `[V, ...]`, likewise.
        reward_scale: `[V]` float32; None: rewards are not normalised.
        of_column: `[N]` which of them each column has, 0 to V - 1.
    """

    mean: np.ndarray | None  # [V, ...]
    inverse_std: np.ndarray | None  # [V, ...]
    reward_scale: np.ndarray | None  # [V]
    of_column: np.ndarray  # [N] int64

    def per_column(self, parts: np.ndarray) -> np.ndarray:
        """`[N, ...]` of `mean`, `inverse_std` or `reward_scale`; `[1, ...]`, a view, if all columns
        have the same."""
        return parts if len(parts) == 1 else parts[self.of_column]

    def select(self, columns: np.ndarray) -> Scaling:
        """The scaling of the columns `[n]`, in that order."""
        return self._replace(of_column=self.of_column[columns])

    @staticmethod
    def concat(scalings: Sequence[Scaling]) -> Scaling:
        """Concatenates along the columns. Equal scalings are held once: workers with the same
        weights have the same."""
        places: dict[bytes, int] = {}  # by the bytes of a scaling
        kept: list[list[np.ndarray]] = [[], [], []]
        of_column = []
        for scaling in scalings:
            parts = [scaling.mean, scaling.inverse_std, scaling.reward_scale]
            place = []
            for v in range(scaling.num_scalings):
                rows = [None if part is None else part[v] for part in parts]
                key = b"".join(row.tobytes() for row in rows if row is not None)
                if key not in places:
                    places[key] = len(places)
                    for held, row in zip(kept, rows, strict=True):
                        held += [] if row is None else [row]
                place.append(places[key])
            of_column.append(np.asarray(place)[scaling.of_column])
        mean, inverse_std, reward_scale = (np.stack(held) if held else None for held in kept)
        return Scaling(mean, inverse_std, reward_scale, np.concatenate(of_column))

    @property
    def num_scalings(self) -> int:
        """V."""
        part = self.reward_scale if self.mean is None else self.mean
        return 0 if part is None else len(part)
