"""`Normalizer`: normalises observations and rewards by running moments, as all workers share them.

Stable-Baselines3's VecNormalize and Gymnasium's wrappers use the same method. The moments belong to
the policy: they are sent with its weights, and saved, loaded and exported with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from polopt.common.action_mask import MASK_KEY
from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer
from polopt.policies.spaces import ObservationEncoder

#: Added to variances.
_EPSILON = 1e-8


class Normalizer:
    """Moments of observations and of discounted returns, and what follows from them.

    - Each element of an observation becomes `(x - mean) / sqrt(variance + 1e-8)`, clipped. Elements
      that are one-hot, bool, uint8 (networks scale images), or an action mask keep their values.
    - A reward becomes `r / sqrt(variance + 1e-8)`, clipped, with the variance of the discounted
      return since the episode began. No mean is subtracted: that would change what is optimal.

    One row enters the moments for each transition: the observation that the action was chosen for,
    and the discounted return after it. So each counts once, in every autoreset mode. Before the
    first row means are 0 and standard deviations 1.

    Args:
        encoder: of the policy.
        clip_observations: bound of normalised observations. None: observations are not normalised.
        clip_rewards: bound of normalised rewards. None: rewards are not normalised.
        gamma: discount factor of the returns.

    Attributes:
        clip_observations, clip_rewards, gamma: the arguments. `gamma` may be changed.

    Raises:
        ConfigError: observations without an element that can be normalised.
    """

    def __init__(
        self,
        encoder: ObservationEncoder,
        clip_observations: float | None,
        clip_rewards: float | None,
        gamma: float,
    ) -> None:
        self.clip_observations = clip_observations
        self.clip_rewards = clip_rewards
        self.gamma = gamma
        self._shape = encoder.shape
        self._dtype = np.result_type(encoder.dtype, np.float32)
        self._elements = np.zeros(0, dtype=np.int64)
        self._limit: Any = np.float32(0.0)
        if clip_observations is not None:
            numeric = _numeric_elements(encoder.space)
            if not numeric.any():
                raise ConfigError(
                    f"key 'normalize_observations': got True for observation space {encoder.space}"
                    f" of dtype {encoder.dtype}. Allowed: spaces with a Box of another dtype than"
                    " uint8 and bool, which networks get as they are, besides categories and masks"
                )
            self._elements = np.flatnonzero(numeric)
            self._limit = self._dtype.type(clip_observations)
            if not numeric.all():  # the others keep their values
                limits = np.where(numeric, clip_observations, np.inf)
                self._limit = limits.reshape(self._shape).astype(self._dtype)
        self.moments = Moments.zero(len(self._elements) + (clip_rewards is not None))

    # ---- moments --------------------------------------------------------------------------------

    @property
    def moments(self) -> Moments:
        """`[S]`: of the normalised elements of the observation, and of the discounted return."""
        return self._moments

    @moments.setter
    def moments(self, moments: Moments) -> None:
        size = len(self._elements) + (self.clip_rewards is not None)
        if moments.mean.shape != (size,) or moments.m2.shape != (size,):
            raise ValueError(
                f"moments must have shape [{size}]; got {list(moments.mean.shape)} and "
                f"{list(moments.m2.shape)}: they belong to another policy"
            )
        # Without rows the variance is 1.
        variance = moments.variance if moments.rows else np.ones(size)
        inverse_std = 1.0 / np.sqrt(variance + (_EPSILON if moments.rows else 0.0))
        present: dict[str, np.ndarray] = {}
        if self.clip_observations is not None:
            used = len(self._elements)
            present["obs_mean"] = self._of_elements(moments.mean[:used], other=0.0)
            present["obs_inverse_std"] = self._of_elements(inverse_std[:used], other=1.0)
        if self.clip_rewards is not None:
            present["reward_scale"] = inverse_std[-1].astype(np.float32)
        # Whole dicts: another thread may collect with the policy.
        self._moments, self._present = moments, present

    def _of_elements(self, values: np.ndarray, other: float) -> np.ndarray:
        """An array in the shape of an observation, of the values of normalised elements."""
        whole = np.full(int(np.prod(self._shape)), other)
        whole[self._elements] = values
        return whole.astype(self._dtype).reshape(self._shape)

    @np.errstate(all="ignore")  # the caller checks that numbers are finite
    def moments_of(self, batch: SampleBatch, returns: np.ndarray) -> Moments:
        """The moments of the transitions of a fragment.

        Args:
            batch: `[T, N]`, as sampled.
            returns: `[T, N]` discounted returns.
        """
        rows = np.flatnonzero(batch.flat("valid"))
        parts = []
        if self.clip_observations is not None:
            # Not -1, which is undefined without rows: all may be resets.
            observations = batch.flat("obs")[rows].reshape(len(rows), math.prod(self._shape))
            parts.append(observations[:, self._elements].astype(np.float64, copy=False))
        if self.clip_rewards is not None:
            parts.append(returns.reshape(-1, 1)[rows])
        return Moments.of(np.concatenate(parts, axis=1))

    # ---- normalisation --------------------------------------------------------------------------

    def per_env(self, envs: int) -> dict[str, np.ndarray]:
        """What a batch of N environments needs for `normalized`, from the present moments: by name
        `[N, ...]`."""
        return {name: np.repeat(one[None], envs, axis=0) for name, one in self._present.items()}

    def observations(self, obs: np.ndarray) -> np.ndarray:
        """`[N, ...]` float32 of encoded observations `[N, ...]`, by the present moments."""
        if self.clip_observations is None:
            return obs
        return self._apply(obs, self._present["obs_mean"], self._present["obs_inverse_std"])

    def _apply(self, obs: np.ndarray, mean: np.ndarray, inverse_std: np.ndarray) -> np.ndarray:
        result = obs - mean
        result *= inverse_std
        np.minimum(result, self._limit, out=result)
        np.maximum(result, -self._limit, out=result)
        return result.astype(np.float32, copy=False)

    def normalized(self, batch: SampleBatch) -> SampleBatch:
        """The batch with observations and rewards normalised by the moments that were in use
        when each environment's actions were chosen. Returns a batch itself that is normalised
        already. Other columns are shared."""
        per_env, columns = dict(batch.per_env), dict(batch.columns)
        all_obs, successors = batch.all_obs, batch.successor_obs
        if "obs_mean" in per_env:
            mean, inverse_std = per_env.pop("obs_mean"), per_env.pop("obs_inverse_std")
            all_obs = self._apply(all_obs, mean, inverse_std)
            envs = batch.successor_index % batch.shape[1]
            successors = self._apply(successors, mean[envs], inverse_std[envs])
        if self.clip_rewards is not None and "reward_scale" in per_env:
            scaled, limit = columns["rewards"] * per_env.pop("reward_scale"), self.clip_rewards
            columns["rewards"] = np.clip(scaled, -limit, limit)
        if len(per_env) == len(batch.per_env):
            return batch
        return dataclasses.replace(
            batch, all_obs=all_obs, successor_obs=successors, columns=columns, per_env=per_env
        )

    def in_torch(self) -> Callable[[Tensor], Tensor]:
        """`observations` as a function of tensors on the CPU, for export. Its constants are the
        present moments."""
        if self.clip_observations is None:
            return lambda obs: obs
        mean, inverse_std = (
            torch.from_numpy(self._present[name]) for name in ("obs_mean", "obs_inverse_std")
        )
        limit = torch.as_tensor(self._limit)
        return lambda obs: torch.clamp((obs - mean) * inverse_std, -limit, limit).float()

    # ---- state ----------------------------------------------------------------------------------

    @property
    def kinds(self) -> str:
        """What is normalised."""
        named = {"observations": self.clip_observations, "rewards": self.clip_rewards}
        return " and ".join(name for name, bound in named.items() if bound is not None)

    def get_state(self) -> dict[str, Any]:
        """The moments: tensors, numbers and strings."""
        moments = self.moments
        mean, m2 = torch.from_numpy(moments.mean.copy()), torch.from_numpy(moments.m2.copy())
        return {"of": self.kinds, "rows": moments.rows, "mean": mean, "m2": m2}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            ValueError: it is of other observations, or no moments have these values.
        """
        rows = int(state["rows"])
        mean, m2 = (state[name].double().numpy().copy() for name in ("mean", "m2"))
        if rows < 0 or (m2 < 0.0).any():
            raise ValueError(f"moments must not be negative; got {rows} rows and m2 {m2}")
        self.moments = Moments(rows, mean, m2)


def kinds_of(state: Mapping[str, Any] | None) -> str:
    """What a state of a `Normalizer` normalises. `nothing` for None."""
    return "nothing" if state is None else str(state["of"])


def sum_moments(moments: Moments, reducer: Reducer) -> Moments:
    """The moments of the rows of all learners together, the same on each of them.

    Two sums: squared deviations are from the mean of all rows, because the difference of large sums
    would lose digits.
    """
    total = torch.from_numpy(np.append(moments.mean * moments.rows, float(moments.rows)))
    reducer.sum_(total)
    count = int(total[-1])
    mean = total[:-1].numpy() / max(count, 1)
    m2 = moments.m2 + moments.rows * np.square(moments.mean - mean)
    squares = torch.from_numpy(m2)
    reducer.sum_(squares)
    return Moments(count, mean, squares.numpy())


def _numeric_elements(space: Space[Any]) -> np.ndarray:
    """`[D]` bool: the elements of an encoded observation, flattened, that are normalised."""
    if isinstance(space, spaces.Dict):
        parts = [_numeric_elements(part) & (key != MASK_KEY) for key, part in space.spaces.items()]
        return np.concatenate(parts)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([_numeric_elements(part) for part in space.spaces])
    numeric = isinstance(space, spaces.Box) and space.dtype not in (np.uint8, np.bool_)
    return np.full(spaces.utils.flatdim(space), numeric)
