"""`EpsilonGreedy`: Discrete actions, the best one or with probability epsilon a random one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.common.action_mask import MASKED_LOGIT
from polopt.policies.distributions.categorical import Categorical

#: Values below this belong to actions that a mask does not allow.
_ALLOWED = 0.5 * MASKED_LOGIT


class EpsilonGreedy(Categorical):
    """Discrete actions. `params` are Q-values `[B, n]`.

    With probability epsilon the action is uniform over the allowed actions, the best one
    included. Else it is the best one.

    Args:
        space: action space of one environment.
        epsilon: returns epsilon, one number or one for each of N environments `[N]`, where N is the
            argument. It is called when noise is drawn, once per fragment.
    """

    def __init__(
        self, space: spaces.Discrete[Any], epsilon: Callable[[int], float | np.ndarray]
    ) -> None:
        super().__init__(space)
        self._epsilon = epsilon

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """`[*leading, 2]`: whether the action is random (1 or 0), and which one it is then, as a
        fraction of the allowed actions."""
        noise = rng.random((*leading, 2), dtype=np.float32)
        noise[..., 0] = noise[..., 0] < self._epsilon(leading[-1])
        return noise

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        best: np.ndarray = params.argmax(axis=-1)
        if noise is None:
            return best
        explores = noise[..., 0] > 0.5
        if not explores.any():
            return best
        return np.where(explores, _pick(params, noise[..., 1]), best)

    def random_allowed(
        self, rng: np.random.Generator, logits: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray]:
        return logits, _pick(logits, rng.random(len(logits), dtype=np.float32))

    def probabilities(self, params: Tensor) -> Tensor:
        """`[B, n]` of Q-values `[B, n]`, with the present epsilon."""
        allowed = (params > _ALLOWED).float()
        epsilon = torch.as_tensor(self._epsilon(len(params)), dtype=params.dtype).reshape(-1, 1)
        best = F.one_hot(params.argmax(-1), self.num_params).to(params.dtype)
        uniform = allowed / allowed.sum(-1, keepdim=True)
        return (1.0 - epsilon) * best + epsilon * uniform

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        p = self.probabilities(params).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return p.log()

    def entropy(self, params: Tensor) -> Tensor:
        return -torch.special.xlogy(p := self.probabilities(params), p).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        p, q = self.probabilities(old), self.probabilities(new)
        return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def _pick(params: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """The allowed actions `[N]` at these fractions `[N]` of all that are allowed, by number."""
    allowed = params > _ALLOWED
    counts = np.cumsum(allowed, axis=-1)
    # A float32 fraction can be rounded up to 1.
    wanted = np.minimum((fraction * counts[..., -1]).astype(np.int64), counts[..., -1] - 1)
    return (counts > wanted[..., None]).argmax(axis=-1)
