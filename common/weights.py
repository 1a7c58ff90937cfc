"""Weights and gradients as flat float32 vectors, each with a version of the weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polopt.common.moments import Moments


class Acting(NamedTuple):
    """Options of a policy that change how the network's input and output are scaled.

    Attributes:
        normalize_actions, clip_actions: see `PolicyConfig`.
        scale_by_high: images of bytes are divided by the bound `high` of their space. False: by
            255, as older versions did, whatever the bound.
    """

    normalize_actions: bool
    clip_actions: bool
    scale_by_high: bool = True


#: The options that hold for checkpoints from before they were saved.
FORMER_ACTING = Acting(normalize_actions=False, clip_actions=True, scale_by_high=False)


class Weights(NamedTuple):
    """All parameters of a policy, and the other values that acting and losses need.

    Schedules and adapted coefficients are sent with the weights, so that workers always use the
    learner's values. (In RLlib 0.8, `lr_schedule` and DD-PPO's KL coefficient did not reach the
    workers.)

    Attributes:
        flat: `[P]` float32.
        version: number of updates of the weights so far.
        env_steps: environment steps sampled so far by all workers. The argument of all schedules.
        coefficients: values that learning adapts (PPO's `kl_coeff`).
        moments: moments with which observations and rewards are normalised. None: the policy does
            not normalise, or the receiver keeps its own moments.
        acting: how the policy acts with these weights. None: the receiver keeps its own options.
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
        flat: `[P]` float32, not clipped.
        version: version of the weights with which the gradient was computed.
        rows: number of valid rows over which the loss is a mean.
        stats: learner statistics, as means over the same rows.
        new_rows: number of rows that no earlier gradient has used. After the first epoch, it is 0.
        ends_rollout: True for the last gradient of a rollout.
        acted: version of the weights that chose the actions. The oldest if there were several.
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
        """Bytes of the vector."""
        return int(self.flat.nbytes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, _gradients, protocol)


def _reduced(vector: Weights | Gradients, restore: Callable[..., Any], protocol: int) -> Any:
    """Pickles the vector as a raw buffer, with protocol 5 or later. It is restored as `[P]`
    float32.

    NumPy would also pickle a description of the array's type, which takes longer than the rest.
    """
    if protocol < 5:
        return type(vector), tuple(vector)
    flat: Any = np.ascontiguousarray(vector.flat, np.float32)
    return restore, (pickle.PickleBuffer(flat), *vector[1:])


def _weights(flat: Any, *rest: Any) -> Weights:
    return Weights(np.frombuffer(flat, np.float32), *rest)


def _gradients(flat: Any, *rest: Any) -> Gradients:
    return Gradients(np.frombuffer(flat, np.float32), *rest)
