"""`Weights` and `Gradients`: flat float32 vectors with a version."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polopt.common.moments import Moments


class Acting(NamedTuple):
    """The options of a policy that change how the input and output of the network are scaled or
    clipped.

    Attributes:
        normalize_actions, clip_actions: see `PolicyConfig`.
        scale_by_high: if True, uint8 images are divided by the bound `high` of their space. If
            False, they are divided by 255, as in runs that began before version 0.3.
    """

    normalize_actions: bool
    clip_actions: bool
    scale_by_high: bool = True


class Weights(NamedTuple):
    """All parameters of a policy, and the other values that are needed for acting and for losses.

    The progress of schedules and the adapted coefficients are sent with the weights. Workers
    therefore use the learner's values.

    Attributes:
        flat: the parameters `[P]` float32.
        version: the number of updates of the weights so far.
        env_steps: the number of environment steps that all workers have sampled so far. The
            schedules of the policy depend on this number.
        coefficients: the values that learning adapts, such as PPO's `kl_coeff`.
        moments: the moments (mean and variance) for the normalisation of observations and rewards.
            `None` means that the policy does not normalise, or that the receiver keeps its own
            moments.
        acting: the options for acting with these weights. `None` means that the receiver keeps its
            own options.
    """

    flat: np.ndarray  # [P] float32
    version: int
    env_steps: int
    coefficients: dict[str, float]
    moments: Moments | None = None
    acting: Acting | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, _weights, protocol)


class Gradients(NamedTuple):
    """The gradient of a mean loss over `rows` rows.

    Attributes:
        flat: the gradient `[P]` float32, before clipping.
        version: the version of the weights with which the gradient was computed.
        rows: the number of valid rows in the mean.
        stats: the learner statistics, as means over the same rows.
        new_rows: the number of rows that no earlier gradient of the rollout has used. It is 0 after
            the first epoch.
        ends_rollout: whether this is the last gradient of a rollout.
        acted: the version of the weights that chose the actions. If several versions chose actions,
            this is the oldest version.
    """

    flat: np.ndarray  # [P] float32
    version: int
    rows: int
    stats: dict[str, float]
    new_rows: int = 0
    ends_rollout: bool = True
    acted: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the vector in bytes."""
        return int(self.flat.nbytes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, _gradients, protocol)


def _reduced(vector: Weights | Gradients, restore: Callable[..., Any], protocol: int) -> Any:
    """Pickles the vector as a raw buffer if the protocol is at least 5. Unpickling restores the
    vector as `[P]` float32.

    NumPy would also pickle a description of the array's type, which takes longer than everything
    else.
    """
    if protocol < 5:
        return type(vector), tuple(vector)
    flat: Any = np.ascontiguousarray(vector.flat, np.float32)
    return restore, (pickle.PickleBuffer(flat), *vector[1:])


def _weights(flat: Any, *rest: Any) -> Weights:
    return Weights(np.frombuffer(flat, np.float32), *rest)


def _gradients(flat: Any, *rest: Any) -> Gradients:
    return Gradients(np.frombuffer(flat, np.float32), *rest)
