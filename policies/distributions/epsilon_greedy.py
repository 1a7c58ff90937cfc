"""`EpsilonGreedy`: the distribution of Discrete actions of an epsilon-greedy policy."""

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

#: Q-values below this bound belong to actions that a mask does not allow.
_ALLOWED = 0.5 * MASKED_LOGIT


class EpsilonGreedy(Categorical):
    """Epsilon-greedy Discrete actions. `params` are Q-values `[B, n]`.

    With probability epsilon, the action is drawn uniformly from all allowed actions, including the
    best action. Otherwise, the action is the best action.

    Args:
        space: action space of one environment.
        epsilon: a function that gets N, the number of environments. It returns one epsilon, or
            epsilons `[N]`. `draw_noise` calls this function, so epsilon is constant within a
            fragment.
    """

    def __init__(
        self, space: spaces.Discrete[Any], epsilon: Callable[[int], float | np.ndarray]
    ) -> None:
        super().__init__(space)
        self._epsilon = epsilon

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Draws `[*leading, 2]`. The first number is 1 for a random action and 0 for the best
        action. The second number, from 0 to 1, selects the random action from the allowed
        actions."""
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
        """The probabilities `[..., n]` of all actions, from Q-values `[..., n]` and the current
        epsilon. If each environment has its own epsilon, the Q-values must have the shape
        `[..., N, n]` for the N environments of this worker."""
        allowed = (params > _ALLOWED).float()
        epsilons = self._epsilon(params.shape[-2])
        epsilon = torch.as_tensor(epsilons, dtype=params.dtype).reshape(-1, 1)
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
    """Selects one allowed action per row, `[N]`. A fraction of 0 selects the first allowed action,
    and a fraction near 1 selects the last one."""
    allowed = params > _ALLOWED
    counts = np.cumsum(allowed, axis=-1)
    # The minimum makes a fraction of 1 valid. It selects the last allowed action.
    wanted = np.minimum((fraction * counts[..., -1]).astype(np.int64), counts[..., -1] - 1)
    return (counts > wanted[..., None]).argmax(axis=-1)
