"""`NumpyMasked`: the forward and backward pass of a `MaskedNetwork` in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.common.action_mask import MASKED_LOGIT
from polopt.policies.networks.actor_critics import MaskedNetwork


class NumpyMasked:
    """Wraps a network in NumPy, and masks its outputs with the action mask in the observation, like
    `MaskedNetwork`. Masked outputs have no gradient.

    Args:
        inner: the `NumpyNetwork` or `NumpyQNetwork` of `network.network`.
        network: the masked network in torch. It has the position of the mask.
    """

    def __init__(self, inner: Any, network: MaskedNetwork) -> None:
        self._inner = inner
        self.work = inner.work
        self._place, self._seen = network.place, network.seen

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` of observations `[N, D]`."""
        return self._masked(self._inner.action_params(self._rest(obs)), self._allowed(obs))

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` of observations `[N, D]`."""
        values: np.ndarray = self._inner.value(self._rest(obs))
        return values

    def forward(self, obs: np.ndarray) -> tuple[Any, ...]:
        """Returns the outputs of the wrapped network, with masked parameters `[B, P]`. The last
        element is the argument `done` of `backward`."""
        params, *others, done = self._inner.forward(self._rest(obs))
        allowed = self._allowed(obs)
        return (self._masked(params, allowed), *others, (allowed, done))

    def backward(self, done: Any, by_params: np.ndarray, *by_others: Any) -> None:
        """Adds the gradients of all weights to the `.grad` of the weights.

        Args:
            done: the last element that `forward` returned.
            by_params: gradient of the loss with respect to the masked parameters, `[B, P]`.
            by_others: gradients of the loss with respect to the other outputs.
        """
        allowed, inner_done = done
        self._inner.backward(inner_done, np.where(allowed, by_params, np.float32(0.0)), *by_others)

    def _allowed(self, obs: np.ndarray) -> np.ndarray:
        """`[B, P]` bool: whether the mask allows each action."""
        return obs[:, self._place] > 0.5

    def _masked(self, params: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        return np.where(allowed, params, np.float32(MASKED_LOGIT))

    def _rest(self, obs: np.ndarray) -> np.ndarray:
        """The observations `[B, D]` for the wrapped network, with or without the mask."""
        if self._seen:
            return obs
        start, stop = self._place.start, self._place.stop
        if start == 0:
            return obs[:, stop:]
        return np.concatenate([obs[:, :start], obs[:, stop:]], axis=1)
