"""`Categorical`: the distribution of Discrete actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.policies.distributions.action_distribution import ActionDistribution, gumbel


class Categorical(ActionDistribution):
    """A categorical distribution over Discrete actions. `params` are logits `[B, n]`. `sample` uses
    the Gumbel-max trick."""

    def __init__(self, space: spaces.Discrete[Any]) -> None:
        self.num_params = int(space.n)
        self.sizes = [self.num_params]
        self.action_shape = ()
        self.action_dtype = np.dtype(np.int64)
        self._start = int(space.start)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return gumbel(rng, (*leading, self.num_params))

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        return (params if noise is None else params + noise).argmax(axis=-1)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return rng.integers(self.num_params, size=leading)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return actions if self._start == 0 else actions + self._start

    def mode_for_env(self, params: Tensor) -> Tensor:
        return params.argmax(-1) + self._start

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return F.log_softmax(params, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_p = F.log_softmax(params, dim=-1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        log_old = F.log_softmax(old, dim=-1)
        return (log_old.exp() * (log_old - F.log_softmax(new, dim=-1))).sum(-1)
