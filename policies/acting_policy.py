"""`ActingPolicy`: base class of all policies, including policies that never learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from polopt.common.action_mask import find_action_mask
from polopt.common.config import Config, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.normalization import Normalizer
from polopt.policies.spaces import ObservationEncoder


class ActingPolicy(ABC):
    """Holds weights, chooses actions with them, and prepares sampled batches for learning.

        actions, extras = policy.compute_actions(policy.encoder.rows(observations))
        policy.set_weights(weights)

    A sampler needs only the methods and attributes of this class. The subclass `Policy` also
    learns. The subclass `NonLearningPolicy` wraps a function or a module of the user, or chooses
    random actions. A subclass must define `make_distribution`, `action_params`, and the methods for
    weights and state. A policy with memory must also define `act`.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: options. See the subclass.
        seed: seed of the shuffling of minibatches. A subclass may use the seed for more.
        device: torch device of networks.

    Attributes:
        encoder: converts observations of the environment to rows, and rows to arrays for networks.
        action_space: action space of one environment.
        normalizer: normalises observations and rewards. `None` means that the policy does not
            normalise.
        dist: the action distribution.
        mask: the position of the action mask in observations. `None` means that observations have
            no mask.
        version: number of updates applied to the weights. The sampler writes this number to each
            batch.
        env_steps: number of environment steps that all workers have sampled so far. All schedules
            depend on this number.
        shuffle: random generator for the order of minibatches, and for the noise in the losses of
            SAC and TD3. Checkpoints of a `Policy` contain the state of this generator.
        state_size: S, size of the policy's memory for one environment. 0 for a policy without
            memory.
        worker_index: index of the worker that samples with this policy, from 1. 0 if the policy
            belongs to the driver, to an evaluation worker or to no worker.
        num_workers: number of workers that sample.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    state_size: int = 0

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: Config,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config: Any = config
        self.encoder = ObservationEncoder(observation_space)
        self.action_space = action_space
        self.normalizer = self.make_normalizer()
        self.mask = find_action_mask(observation_space, action_space)
        self.dist = self.make_distribution()
        self.device = torch.device(device)
        self.shuffle = np.random.default_rng([seed, 1])
        self.version = 0
        self.env_steps = 0
        self.worker_index = 0
        self.num_workers = 0

    @property
    def samples_uniformly(self) -> bool:
        """Whether a sampler that explores currently draws all actions uniformly from the allowed
        actions. For a `ReplayPolicy`, this is True for the first `random_timesteps` environment
        steps."""
        return False

    @abstractmethod
    def make_distribution(self) -> ActionDistribution:
        """A new action distribution for `action_space`, `mask` and `config`."""

    def make_normalizer(self) -> Normalizer | None:
        """A new normaliser for `encoder` and `config`, or `None` if the policy does not normalise.

        A subclass that returns a normaliser must itself normalise observations and rewards wherever
        it uses them.

        Raises:
            ConfigError: for observations that cannot be normalised.
        """
        return None

    # ---- acting ---------------------------------------------------------------------------------

    @abstractmethod
    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of observations `[N, ...]` from `to_act_on`. A
        policy with memory treats each observation as the first of an episode."""

    def to_act_on(self, obs: np.ndarray) -> np.ndarray:
        """Converts rows or encoded observations `[N, ...]` (see `ObservationEncoder`) for `act`.

        A policy with a normaliser gets `obs` itself, because the normaliser encodes. Other policies
        get encoded observations.
        """
        return obs if self.normalizer is not None else self.encoder.encode(obs)

    def encode_batch(self, batch: SampleBatch) -> SampleBatch:
        """Returns the batch with encoded observations that are not normalised, for code of the
        user. The observations are as exact as the normaliser needs them. If they are already
        encoded, returns the same batch."""
        dtype = np.float32 if self.normalizer is None else self.normalizer.dtype
        return self.encoder.encode_batch(batch, dtype)

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes distribution parameters of observations, and the new memory.

        A policy with memory overrides this method and sets `state_size`.

        Args:
            obs: observations `[N, ...]` from `to_act_on`.
            state: memory `[N, S]` float32 before these observations. Zeros at the start of an
                episode.

        Returns:
            parameters `[N, P]` float32, and the memory `[N, S]` float32 after these observations.
        """
        return self.action_params(obs), state

    @np.errstate(all="ignore")
    def compute_actions(
        self,
        obs: np.ndarray,
        explore: bool = True,
        rng: np.random.Generator | None = None,
        state: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Chooses one action for each observation.

        Args:
            obs: rows or encoded observations `[N, ...]`. See `ObservationEncoder`.
            explore: True samples the actions. False takes the mode of the distribution.
            rng: random generator. `None` makes a new generator.
            state: memory `[N, S]`. `None` means that an episode begins in each environment.

        Returns:
            actions for the environment `[N, ...]`, and a dict `{"action_dist_inputs": [N, P],
            "actions": [N, ...], "state": [N, S]}`. `actions` in the dict are the actions before
            the conversion to the environment's action space. `state` is the new memory.
        """
        if state is None:
            state = np.zeros((len(obs), self.state_size), dtype=np.float32)
        params, state = self.act(self.to_act_on(obs), state)
        noise = None
        if explore:
            noise = self.dist.draw_noise(rng or np.random.default_rng(), len(obs))
        actions = self.dist.sample(params, noise)
        extras = {"action_dist_inputs": params, "actions": actions, "state": state}
        return self.dist.to_env(actions), extras

    @np.errstate(all="ignore")
    def predict(
        self,
        observations: Any,
        state: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Chooses the action for one observation of the environment, or for a batch of
        observations.

        Args:
            observations: one observation as the environment returns it, or a batch of observations.
                A batch is an array `[N, ...]`. For a Dict or Tuple space, a batch is a dict or
                tuple of such arrays. The shape decides whether this is one observation or a batch.
            state: the memory that the previous call returned, `[S]`, or `[N, S]` for a batch.
                `None` means that an episode begins in each environment. To begin an episode in only
                one environment of a batch, set the row of this environment to 0.
            deterministic: True takes the mode of the distribution. False samples the actions.
            rng: random generator for sampled actions. `None` makes a new generator.

        Returns:
            the action for `env.step`, or the actions `[N, ...]` for a batch. The second value is
            the state for the next call, or `None` for policies without memory.

        Raises:
            ValueError: the errors of `ObservationEncoder.some_rows`. An action mask allows no
                action, or has values other than 0 and 1. The state has a wrong shape or is not
                finite, or it is not None although the policy has no memory.
        """
        if state is not None and not self.state_size:
            raise ValueError(f"{type(self).__name__} has no memory: state must be None")
        rows, is_batch = self.encoder.some_rows(observations)
        if self.mask is not None:
            self.mask.check(self.encoder.encode(rows)[:, self.mask.place])
        if state is not None:
            state = self._checked_state(state, len(rows), is_batch)
        actions, extras = self.compute_actions(rows, not deterministic, rng, state)
        after = extras["state"] if self.state_size else None
        if is_batch:
            return actions, after
        return actions[0], None if after is None else after[0]

    def _checked_state(self, state: Any, count: int, is_batch: bool) -> np.ndarray:
        """Checks the state that the caller of `predict` passed, and returns it as `[N, S]`."""
        expected = (count, self.state_size) if is_batch else (self.state_size,)
        try:
            array = np.asarray(state, dtype=np.float32)
        except (TypeError, ValueError):
            raise ValueError(
                f"state must be an array of shape {list(expected)}; got {state!r:.80}. At the "
                "beginning of an episode, pass None"
            ) from None
        if array.shape != expected:
            raise ValueError(f"state must have shape {list(expected)}; got {list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError("state must be finite")
        return array.reshape(count, self.state_size)

    def act_in_torch(self, network: Any, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the same as `act`, with torch operations only. A policy needs this method only
        for `export_onnx`.

        Args:
            network: a copy of the network that acts, on the CPU.
            obs: encoded observations `[N, ...]`.
            state: memory `[N, S]`.

        Raises:
            ConfigError: the policy does not define this method.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be exported: it does not define act_in_torch"
        )

    # ---- sampling, weights and state ------------------------------------------------------------

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Prepares a batch `[T, N]` for learning. The worker calls this method right after it has
        sampled the batch, while the policy still has the weights that chose the actions."""
        return batch

    @abstractmethod
    def get_weights(self) -> Weights:
        """Returns a copy of the weights `[P]` and of all other values that determine actions."""

    @abstractmethod
    def set_weights(self, weights: Weights) -> None:
        """Replaces the weights with which the policy acts.

        Raises:
            ValueError: the weights belong to another network.
        """

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the state for checkpoints. The state consists of tensors, numbers, bools,
        strings, None, and lists and dicts of these."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            ValueError: the state belongs to another network.
        """
