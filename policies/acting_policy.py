"""`ActingPolicy`: base class of everything that chooses actions, whether it learns or not."""

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
    """Holds weights, chooses actions with them, and prepares samples.

        actions, extras = policy.compute_actions(policy.encoder.encode(observations))
        policy.set_weights(weights)

    Samplers, workers and a `Collector` use only these methods of a policy. `Policy` also learns.
    `NonLearningPolicy` adapts the user's own function or module. A subclass provides
    `make_distribution`, `action_params` (or `act`), and the methods for weights and state.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: options. See the subclass.
        seed: seed of the shuffling of minibatches. See also the subclass.
        device: torch device of networks.

    Attributes:
        encoder: converts observations of the environment to arrays.
        action_space: action space of one environment.
        normalizer: normalises observations and rewards. None: they are used as they are.
        dist: the action distribution.
        mask: the place of the action mask in observations. None: observations have no mask.
        version: number of updates applied to the weights. Written to each batch.
        env_steps: environment steps sampled so far by all workers. The argument of all schedules.
        shuffle: random numbers for the order of minibatches. Workers save and restore it.
        state_size: S, size of the memory of one environment, a vector. 0 without memory.
        worker_index: index of the worker that samples with this policy, from 1. 0: the driver, or
            no worker.
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
        """Whether sampled actions are uniformly random at the moment, as at the start of a run with
        replay. Then every allowed action has the same probability."""
        return False

    @abstractmethod
    def make_distribution(self) -> ActionDistribution:
        """A new action distribution for `action_space`, `mask` and `config`."""

    def make_normalizer(self) -> Normalizer | None:
        """A new normaliser for `encoder` and `config`. None: observations and rewards are used as
        they are. A policy that returns one calls its methods where it uses either.

        Raises:
            ConfigError: for observations that cannot be normalised.
        """
        return None

    # ---- acting ---------------------------------------------------------------------------------

    @abstractmethod
    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`. Of a policy
        with memory, for environments whose episode begins with them."""

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distribution parameters of observations, and the memory after them. A policy with memory
        overrides it, and sets `state_size`.

        Args:
            obs: encoded observations `[N, ...]`.
            state: memory `[N, S]` float32 before. Zeros at the start of an episode.

        Returns:
            parameters `[N, P]` float32, and memory `[N, S]` float32.
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
            obs: encoded observations `[N, ...]`.
            explore: sample the actions. False takes the mode.
            rng: source of random numbers. By default a new generator.
            state: memory `[N, S]`. None: episodes begin.

        Returns:
            actions for the environment `[N, ...]`, and `{"action_dist_inputs": [N, P], "actions":
            [N, ...], "state": [N, S]}` with the actions as sampled from the distribution, and the
            memory after them.
        """
        if state is None:
            state = np.zeros((len(obs), self.state_size), dtype=np.float32)
        params, state = self.act(obs, state)
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
        """Chooses the action for one observation of the environment, or for a batch of them.

        Args:
            observations: an observation as the environment returns it, or a batch: an array `[N,
                ...]`, for a Dict or Tuple space a dict or tuple of those. The shape tells which.
            state: memory `[S]`, of a batch `[N, S]`, that the call before returned. None: episodes
                begin. Where one environment of a batch begins an episode, set its row to 0.
            deterministic: take the mode of the distribution. False samples.
            rng: source of random numbers of sampled actions. None: a new generator.

        Returns:
            the action for `env.step`, of a batch `[N, ...]`. And the state for the next call, None
            for policies without memory.

        Raises:
            ValueError: an observation of another structure or shape. An action mask that allows no
                action. A state of another shape, or one that is not None for a policy without
                memory.
        """
        if state is not None and not self.state_size:
            raise ValueError(f"{type(self).__name__} has no memory: state must be None")
        encoded, is_batch = self.encoder.encode_some(observations)
        if self.mask is not None:
            self.mask.check(encoded[:, self.mask.place])
        if state is not None:
            state = self._checked_state(state, len(encoded), is_batch)
        actions, extras = self.compute_actions(encoded, not deterministic, rng, state)
        after = extras["state"] if self.state_size else None
        if is_batch:
            return actions, after
        return actions[0], None if after is None else after[0]

    def _checked_state(self, state: Any, count: int, is_batch: bool) -> np.ndarray:
        """A caller's state as `[N, S]`."""
        array = np.asarray(state, dtype=np.float32)
        expected = (count, self.state_size) if is_batch else (self.state_size,)
        if array.shape != expected:
            raise ValueError(f"state must have shape {list(expected)}; got {list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError("state must be finite")
        return array.reshape(count, self.state_size)

    def act_in_torch(self, network: Any, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Optional, for `export_onnx`: as `act`, computed by torch operations.

        Args:
            network: a copy of `model` on the CPU.
            obs: encoded observations `[N, ...]`.
            state: memory `[N, S]`.

        Raises:
            ConfigError: the policy does not have it.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be exported: it does not define act_in_torch"
        )

    # ---- sampling, weights and state ------------------------------------------------------------

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Prepares a sample `[T, N]` in the worker that made it, before the
        weights that chose the actions are replaced."""
        return batch

    @abstractmethod
    def get_weights(self) -> Weights:
        """A copy of the weights `[P]`, and of all else on which acting depends."""

    @abstractmethod
    def set_weights(self, weights: Weights) -> None:
        """Replaces the weights with which the policy acts.

        Raises:
            ValueError: if they belong to another network.
        """

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The state for checkpoints: tensors, numbers, strings, and lists and dicts of these."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            ValueError: if it belongs to another network.
        """
