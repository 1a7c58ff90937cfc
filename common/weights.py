"""What travels between learners and workers: flat float32 vectors that say where they are from."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np


class Weights(NamedTuple):
    """All parameters of a policy, and the scalars that acting and losses depend on.

    Schedules and adapted coefficients travel with the weights, because in systems where they did
    not they never reached the workers (RLlib 0.8: `lr_schedule` and the KL coefficient in DD-PPO).

    Attributes:
        flat: `[P]` float32.
        version: how many updates made them.
        env_steps: environment steps sampled so far by all workers; the clock of all schedules.
        coefficients: values that learning itself adapts (PPO's `kl_coeff`).
    """

    flat: np.ndarray  # [P] float32
    version: int
    env_steps: int
    coefficients: dict[str, float]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, protocol)


class Gradients(NamedTuple):
    """The gradient of a mean loss over `rows` rows.

    Attributes:
        flat: `[P]` float32, not clipped.
        version: version of the weights it was computed from.
        rows: how many valid rows the mean is over.
        stats: learner statistics, means over the same rows.
    """

    flat: np.ndarray  # [P] float32
    version: int
    rows: int
    stats: dict[str, float]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, protocol)


def _reduced(vector: Weights | Gradients, protocol: int) -> Any:
    """How to pickle it. NumPy would describe the array's type each time, which takes longer than
    all the rest; from protocol 5 on it arrives as what it should be, `[P]` float32."""
    if protocol < 5:
        return type(vector), tuple(vector)
    flat: Any = np.ascontiguousarray(vector.flat, np.float32)
    return _restored, (type(vector), pickle.PickleBuffer(flat), *vector[1:])


def _restored(kind: Any, flat: Any, *rest: Any) -> Any:
    return kind(np.frombuffer(flat, np.float32), *rest)
