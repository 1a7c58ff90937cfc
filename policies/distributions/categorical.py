"""`Categorical` and `MultiCategorical`: the distributions of Discrete and MultiDiscrete actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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


class MultiCategorical(ActionDistribution):
    """Independent categorical distributions. `params` are the concatenated logits of all of them,
    `[B, sum of sizes]`."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        self.sizes: list[int] = [int(n) for n in space.nvec.reshape(-1)]
        self._space_shape = tuple(space.shape)
        self._start = space.start.reshape(-1)
        self._offsets = np.cumsum([0, *self.sizes])
        self.num_params = sum(self.sizes)
        self.action_shape = (len(self.sizes),)
        self.action_dtype = np.dtype(np.int64)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return gumbel(rng, (*leading, self.num_params))

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        scores = params if noise is None else params + noise
        parts = [
            scores[..., low:high].argmax(axis=-1)
            for low, high in zip(self._offsets[:-1], self._offsets[1:], strict=True)
        ]
        return np.stack(parts, axis=-1)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return rng.integers(self.sizes, size=(*leading, len(self.sizes)))

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return (actions + self._start).reshape(-1, *self._space_shape)

    def mode_for_env(self, params: Tensor) -> Tensor:
        parts = [scores.argmax(-1) for scores in params.split(self.sizes, dim=-1)]
        actions = torch.stack(parts, dim=-1) + torch.from_numpy(self._start.astype(np.int64))
        return actions.reshape(-1, *self._space_shape)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        parts = [
            F.log_softmax(logits, dim=-1).gather(-1, actions[..., i : i + 1]).squeeze(-1)
            for i, logits in enumerate(params.split(self.sizes, dim=-1))
        ]
        return torch.stack(parts, dim=-1).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        parts = []
        for logits in params.split(self.sizes, dim=-1):
            log_p = F.log_softmax(logits, dim=-1)
            parts.append(-(log_p.exp() * log_p).sum(-1))
        return torch.stack(parts, dim=-1).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        parts = []
        pairs = zip(old.split(self.sizes, dim=-1), new.split(self.sizes, dim=-1), strict=True)
        for old_logits, new_logits in pairs:
            log_old = F.log_softmax(old_logits, dim=-1)
            parts.append((log_old.exp() * (log_old - F.log_softmax(new_logits, dim=-1))).sum(-1))
        return torch.stack(parts, dim=-1).sum(-1)
