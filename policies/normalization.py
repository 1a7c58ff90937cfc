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
from gymnasium import spaces
from torch import Tensor

from polopt.common.action_mask import MASK_KEY
from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer
from polopt.policies.spaces import Leaf, ObservationEncoder

#: Added to variances.
_EPSILON = 1e-8
#: Float32 holds all whole numbers up to this number.
_EXACT = 2**24


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
        dtype: the dtype in which observations are normalised.

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
        self._encoder = encoder
        self._leaves: list[Leaf] = []
        if clip_observations is not None:
            self._leaves = [leaf for leaf in encoder.leaves if _is_numeric(leaf)]
            if not self._leaves:
                raise ConfigError(
                    f"key 'normalize_observations': got True for observation space {encoder.space}"
                    f", encoded as {encoder.dtype}. Allowed: spaces with a Box whose dtype is not"
                    " uint8 or bool. Images, categories and masks are not normalised"
                )
        places = [np.arange(leaf.place.start, leaf.place.stop) for leaf in self._leaves]
        self._elements = np.concatenate([np.zeros(0, dtype=np.int64), *places])
        self._shape = encoder.shape if encoder.is_box else self._elements.shape
        # Large numbers of 64 bits may differ by less than float32 can tell apart, so they become
        # float32 only after the normalisation.
        self.dtype = np.result_type(np.float32, *map(self._dtype_of, self._leaves))
        self._limit = self.dtype.type(clip_observations or 0.0)
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
            present["obs_mean"] = self._of_elements(moments.mean[:used])
            present["obs_inverse_std"] = self._of_elements(inverse_std[:used])
        if self.clip_rewards is not None:
            present["reward_scale"] = inverse_std[-1].astype(np.float32)
        # Replaces the whole dict at once, because another thread may sample with the policy.
        self._moments, self._present = moments, present

    def _dtype_of(self, leaf: Leaf) -> np.dtype[Any]:
        """The dtype in which the elements of a leaf are normalised."""
        space: Any = leaf.space
        fits = not self._encoder.is_box and np.dtype(space.dtype).kind in "iu"
        if (
            fits
            and max(-float(space.low.min(initial=0)), float(space.high.max(initial=0))) <= _EXACT
        ):
            return np.dtype(np.float32)
        return np.result_type(space.dtype, np.float32)

    def _of_elements(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype).reshape(self._shape)

    def _numbers(self, obs: np.ndarray) -> np.ndarray:
        """The normalised elements of rows or encoded observations. For a Box, these are the
        observations themselves. For other spaces, the result is `[..., E]`."""
        if self._encoder.is_box:
            return obs
        if obs.dtype != self._encoder.row_dtype:  # already encoded
            return obs[..., self._elements]
        numbers = np.empty((*obs.shape, len(self._elements)), self.dtype)
        start = 0
        for leaf in self._leaves:
            values = leaf.of(obs)
            stop = start + leaf.place.stop - leaf.place.start
            numbers[..., start:stop].reshape(values.shape)[...] = values  # a view
            start = stop
        return numbers

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
            observations = self._numbers(batch.flat("obs")[rows])
            observations = observations.reshape(len(rows), math.prod(self._shape))
            # NumPy sums contiguous numbers in pairs, which rounds less than one after the other.
            parts.append(np.asfortranarray(observations, dtype=np.float64))
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
        """Encodes and normalises observations with the current moments.

        Args:
            obs: rows `[..., *row_shape]` or encoded observations `[..., *shape]` (see
                `ObservationEncoder`). Numbers that float32 cannot hold, such as large numbers of 64
                bits in a Dict, are exact only in rows.

        Returns: the encoded observations `[..., *shape]`. If they are normalised, they are float32.
        """
        if self.clip_observations is None:
            return self._encoder.encode(obs)
        return self._apply(obs, self._present["obs_mean"], self._present["obs_inverse_std"])

    def _apply(self, obs: np.ndarray, mean: np.ndarray, inverse_std: np.ndarray) -> np.ndarray:
        result = self._numbers(obs) - mean
        result *= inverse_std
        np.minimum(result, self._limit, out=result)
        np.maximum(result, -self._limit, out=result)
        result = result.astype(np.float32, copy=False)
        if self._encoder.is_box:
            return result
        encoded = self._encoder.encode(obs)
        encoded = obs.astype(np.float32) if encoded is obs else encoded
        encoded[..., self._elements] = result
        return encoded

    def normalized(self, batch: SampleBatch) -> SampleBatch:
        """Returns the batch with encoded and normalised observations, and normalised rewards.

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
            return self._encoder.encode_batch(batch)
        return self._encoder.encode_batch(
            dataclasses.replace(
                batch, all_obs=all_obs, successor_obs=successors, columns=columns, per_env=per_env
            )
        )

    def in_torch(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that does the same as `observations` with tensors on the CPU, for
        export. The function takes encoded observations `[N, ...]`, in `dtype` or float32. The
        current moments are constants in the function."""
        if self.clip_observations is None:
            return lambda obs: obs
        present = self._present

        def whole(values: np.ndarray, other: float) -> Tensor:
            """A tensor `[*shape]` that has `values` for normalised elements, and `other` for all
            other elements."""
            array = np.full(math.prod(self._encoder.shape), other, self.dtype)
            array[self._elements] = np.reshape(values, -1)
            return torch.from_numpy(array.reshape(self._encoder.shape))

        mean, inverse_std = whole(present["obs_mean"], 0.0), whole(present["obs_inverse_std"], 1.0)
        limit = whole(self._limit, np.inf)
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


def _is_numeric(leaf: Leaf) -> bool:
    """Whether the elements of a leaf are normalised."""
    is_number = isinstance(leaf.space, spaces.Box) and leaf.space.dtype not in (np.uint8, np.bool_)
    return is_number and MASK_KEY not in leaf.keys and leaf.place.stop > leaf.place.start
