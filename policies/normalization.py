"""`Normalizer`: normalises observations and rewards by running means and variances.

These means and variances, with the number of rows from which they were computed, are called the
moments. All workers share them. Stable-Baselines3's VecNormalize and Gymnasium's wrappers use a
similar method. The moments belong to the policy. The weights of the policy carry the moments, and
the moments are saved, loaded and exported with the policy.
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
    """Holds the moments of observations and of discounted returns, and normalises with these
    moments.

    - Each element of an observation becomes `(x - mean) / sqrt(variance + 1e-8)`, and is then
      clipped. Only elements of Box spaces are normalised. Bools, uint8 values (networks scale
      images), action masks and the elements of all other spaces keep their values.
    - A reward becomes `r / sqrt(variance + 1e-8)`, and is then clipped. The variance is the
      variance of the discounted return since the start of the episode. The mean is not subtracted
      from rewards, because this would change which policy is optimal.

    The moments are computed from one row for each transition. The row is the observation from which
    the policy chose the action, and the discounted return after the action. So each transition
    counts exactly once in every autoreset mode. Before the first row, the means are 0 and the
    standard deviations are 1.

    Args:
        encoder: the encoder of the policy.
        clip_observations: bound of normalised observations. `None` means that observations are not
            normalised.
        clip_rewards: bound of normalised rewards. `None` means that rewards are not normalised.
        gamma: discount factor of the returns.

    Attributes:
        clip_observations, clip_rewards, gamma: the arguments. `gamma` may be changed.

    Raises:
        ConfigError: no element of the observations can be normalised.
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
                    f", encoded as {encoder.dtype}. Allowed: spaces with a Box whose dtype is not"
                    " uint8 or bool. Images, categories and masks are not normalised"
                )
            self._elements = np.flatnonzero(numeric)
            self._limit = self._dtype.type(clip_observations)
            if not numeric.all():  # an infinite limit does not clip, so these elements keep values
                limits = np.where(numeric, clip_observations, np.inf)
                self._limit = limits.reshape(self._shape).astype(self._dtype)
        self.moments = Moments.zero(len(self._elements) + (clip_rewards is not None))

    # ---- moments --------------------------------------------------------------------------------

    @property
    def moments(self) -> Moments:
        """The moments `[S]` of the normalised elements of observations. If rewards are normalised,
        the moments of the discounted return follow.

        Raises:
            ValueError: the moments that are set have another size.
        """
        return self._moments

    @moments.setter
    def moments(self, moments: Moments) -> None:
        size = len(self._elements) + (self.clip_rewards is not None)
        if moments.mean.shape != (size,) or moments.m2.shape != (size,):
            raise ValueError(
                f"the normaliser's mean and m2 must have shape [{size}]; got "
                f"{list(moments.mean.shape)} and {list(moments.m2.shape)}: they belong to another "
                "policy"
            )
        # Before the first row, the variance is 1.
        variance = moments.variance if moments.rows else np.ones(size)
        inverse_std = 1.0 / np.sqrt(variance + (_EPSILON if moments.rows else 0.0))
        present: dict[str, np.ndarray] = {}
        if self.clip_observations is not None:
            used = len(self._elements)
            present["obs_mean"] = self._of_elements(moments.mean[:used], other=0.0)
            present["obs_inverse_std"] = self._of_elements(inverse_std[:used], other=1.0)
        if self.clip_rewards is not None:
            present["reward_scale"] = inverse_std[-1].astype(np.float32)
        # Replaces the whole dict at once, because another thread may sample with the policy.
        self._moments, self._present = moments, present

    def _of_elements(self, values: np.ndarray, other: float) -> np.ndarray:
        """An array in the shape of an observation. Normalised elements have `values`, and all
        others have `other`."""
        whole = np.full(int(np.prod(self._shape)), other)
        whole[self._elements] = values
        return whole.astype(self._dtype).reshape(self._shape)

    @np.errstate(all="ignore")  # the caller checks that the moments are finite
    def moments_of(self, batch: SampleBatch, returns: np.ndarray) -> Moments:
        """The moments of the transitions of a fragment.

        Args:
            batch: `[T, N]`, not normalised.
            returns: `[T, N]` discounted returns.
        """
        rows = np.flatnonzero(batch.flat("valid"))
        parts = []
        if self.clip_observations is not None:
            # `reshape(0, -1)` raises, and a fragment without a transition has 0 rows.
            observations = batch.flat("obs")[rows].reshape(len(rows), math.prod(self._shape))
            parts.append(observations[:, self._elements].astype(np.float64, copy=False))
        if self.clip_rewards is not None:
            parts.append(returns.reshape(-1, 1)[rows])
        return Moments.of(np.concatenate(parts, axis=1))

    # ---- normalisation --------------------------------------------------------------------------

    def per_env(self, envs: int) -> dict[str, np.ndarray]:
        """Means and scales for a batch of `envs` environments, from the current moments. Each array
        is `[N, ...]`. The sampler writes these arrays to `SampleBatch.per_env`, and `normalized`
        reads them there."""
        return {name: np.repeat(one[None], envs, axis=0) for name, one in self._present.items()}

    def observations(self, obs: np.ndarray) -> np.ndarray:
        """Normalises encoded observations `[N, ...]` with the current moments. Returns float32. If
        observations are not normalised, returns them unchanged."""
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
        """Returns the batch with normalised observations and rewards.

        For each environment, this method uses the means and scales in `batch.per_env`. These are
        the values with which the actions were chosen. If the batch is already normalised, this
        method returns the same batch. The new batch shares the other columns with the old batch.
        """
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
        """Returns a function that does the same as `observations` with tensors on the CPU, for
        export. The current moments are constants in the function."""
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
        """The names of the normalised data: `observations`, `rewards`, or both."""
        named = {"observations": self.clip_observations, "rewards": self.clip_rewards}
        return " and ".join(name for name, bound in named.items() if bound is not None)

    def get_state(self) -> dict[str, Any]:
        """The moments, as tensors, numbers and strings."""
        moments = self.moments
        mean, m2 = torch.from_numpy(moments.mean.copy()), torch.from_numpy(moments.m2.copy())
        return {"of": self.kinds, "rows": moments.rows, "mean": mean, "m2": m2}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            ValueError: the state belongs to observations of another size, or its row count or
                squared deviations are negative.
        """
        rows = int(state["rows"])
        mean, m2 = (state[name].double().numpy().copy() for name in ("mean", "m2"))
        if rows < 0 or (m2 < 0.0).any():
            raise ValueError(
                "the normaliser's row count and m2 (sums of squared deviations) must not be "
                f"negative; got {rows} rows and m2 {m2}"
            )
        self.moments = Moments(rows, mean, m2)


def kinds_of(state: Mapping[str, Any] | None) -> str:
    """The names of the data that a `Normalizer` with this state normalises. For None, this is
    `nothing`."""
    return "nothing" if state is None else str(state["of"])


def sum_moments(moments: Moments, reducer: Reducer) -> Moments:
    """Combines the moments of all learners. Every learner gets the same result.

    The function sums over the learners twice. The first sum gives the mean of all rows. The second
    sum adds squared deviations from that mean. A variance computed as the difference of two large
    sums would lose digits.
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
    """`[D]` bool: whether each element of a flattened observation is normalised."""
    if isinstance(space, spaces.Dict):
        parts = [_numeric_elements(part) & (key != MASK_KEY) for key, part in space.spaces.items()]
        return np.concatenate(parts)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([_numeric_elements(part) for part in space.spaces])
    numeric = isinstance(space, spaces.Box) and space.dtype not in (np.uint8, np.bool_)
    return np.full(spaces.utils.flatdim(space), numeric)
