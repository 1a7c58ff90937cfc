"""`ReplayPolicy`: the family of policies that learn from transitions of a replay buffer."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from polopt.common.transitions import Sequences, Transitions
from polopt.common.weights import Gradients
from polopt.policies.fast_cpu.numpy_backend import is_supported
from polopt.policies.fast_cpu.numpy_mlp import NumpyMLP
from polopt.policies.learning.policy_config import NormalizingConfig
from polopt.policies.learning.reducer import Reducer
from polopt.policies.networks.backend import aligned, as_tensor
from polopt.policies.networks.network import Network
from polopt.policies.normalization import Normalizer
from polopt.policies.policy import Policy, reduce_gradient


class ReplayConfig(NormalizingConfig):
    """Options of policies that learn from replayed transitions, in addition to the options of
    `NormalizingConfig`.

    Attributes:
        gamma: discount factor.
        n_step: steps of a transition. Its reward is the sum of the discounted rewards of as many
            steps, or of fewer where the episode ends before.
        tau: share of the way that a target network moves towards its network at a time: 1 makes it
            a copy.
        target_network_update_freq: number of updates of the weights after which target networks
            move. (RLlib and Stable-Baselines3 count environment steps.)
        random_timesteps: environment steps at the beginning of a run whose actions are uniform
            over the action space, whatever the policy is.
    """

    adam_epsilon: float = pydantic.Field(default=1e-8, ge=1e-30, le=1e6)
    gamma: float = pydantic.Field(default=0.99, ge=0.0, le=1.0)
    n_step: int = pydantic.Field(default=1, ge=1, le=10_000)
    tau: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    target_network_update_freq: int = pydantic.Field(default=1, ge=1, le=10**9)
    random_timesteps: int = pydantic.Field(default=0, ge=0, le=2**62)

    fixed: ClassVar[tuple[str, ...]] = (*NormalizingConfig.fixed, "gamma", "n_step")


class ReplayPolicy(Policy):
    """Learns from n-step transitions, with target networks that follow its networks.

        rows = buffer.sample(batch_size)                       # Transitions, B rows
        stats, errors = policy.learn_on_transitions(rows)      # one update
        buffer.update_priorities(rows.indices, errors)         # [B]

    Whoever makes the rows uses `config.gamma` and `config.n_step` for their rewards and discounts.
    Observations are as the environment returned them: the policy normalises them with the moments
    that it has when it learns.

    A subclass provides `make_segments`, `backward` and `errors_of`. A policy with memory sets
    `learns_from = Sequences`: then `rows` are B sequences everywhere, and errors `[B]` are one
    number for each of them.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: an instance of `config_class`.
        seed: seed of the initial weights.
        device: torch device of the networks.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    config_class: ClassVar[type[ReplayConfig]] = ReplayConfig
    learns_from: ClassVar[type] = Transitions
    config: Any  # see Policy
    model: Network

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._acts_fast: NumpyMLP | None = None
        if self.config.fast_cpu and is_supported(self.model):
            self._acts_fast = NumpyMLP(self.model)

    def make_normalizer(self) -> Normalizer | None:
        config = self.config
        if not config.normalize_observations:
            return None
        return Normalizer(self.encoder, config.clip_observations, None, config.gamma)

    @property
    def samples_uniformly(self) -> bool:
        return self.env_steps < self.config.random_timesteps

    # ---- acting ---------------------------------------------------------------------------------

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        if self.normalizer is not None:
            obs = self.normalizer.observations(obs)
        return self.network_params(obs)

    def network_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of normalised observations `[N, ...]`."""
        if self._acts_fast is not None:
            return self._acts_fast.action_params(obs)
        with torch.inference_mode():
            params = self.model.action_params(as_tensor(aligned(obs), self.device))
        return params.cpu().numpy()

    def params_in_torch(self, network: Any, obs: Tensor) -> Tensor:
        """As `network_params`, of tensors and another network of the same shape, with gradients."""
        params: Tensor = network.action_params(obs)
        return params

    def act_in_torch(self, network: Any, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.normalizer is not None:
            obs = self.normalizer.in_torch()(obs)
        return self.params_in_torch(network, obs), state

    # ---- learning -------------------------------------------------------------------------------

    @abstractmethod
    def backward(self, rows: Transitions) -> tuple[dict[str, float], np.ndarray]:
        """Adds the gradient of the weighted mean loss to `flat.grads`, which is 0 before.

        Args:
            rows: B rows, normalised.

        Returns:
            learner statistics, and the absolute TD errors `[B]` before the update.
        """

    @abstractmethod
    def errors_of(self, rows: Transitions) -> np.ndarray:
        """The absolute TD errors `[B]` float32 of normalised rows, with the present weights."""

    @np.errstate(all="ignore")
    def td_errors(self, rows: Transitions) -> np.ndarray:
        """The absolute TD errors `[B]` float32 of rows, with the present weights: the priorities of
        new transitions where they are made (Horgan et al., 2018)."""
        return _finite(self.errors_of(self.normalized(rows)))

    @np.errstate(all="ignore")
    def learn_on_transitions(
        self, rows: Transitions, reducer: Reducer | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """Makes one update, with the gradient of the weighted mean loss of B rows.

        Args:
            rows: of this learner.
            reducer: sums over all learners, which make the same update. None for one learner.

        Returns:
            learner statistics, means over the rows. And the absolute TD errors `[B]` before the
            update, which are the new priorities of the rows. An error that is not finite is 0: the
            row is not drawn again soon.
        """
        self.flat.zero_grads()
        stats, errors = self.backward(self.normalized(rows))
        self.progress.gradient_rows = rows.num_rows
        if reducer is not None and reducer.world_size > 1:
            stats = reduce_gradient(self, rows.num_rows, stats, reducer)
        return stats | self.apply_flat(), _finite(errors)

    def learn_on_batch(
        self, batch: Transitions, reducer: Reducer | None = None
    ) -> dict[str, float]:
        return self.learn_on_transitions(batch, reducer)[0]

    @np.errstate(all="ignore")
    def compute_gradients(self, batch: Transitions) -> Gradients:
        """The gradient that `learn_on_transitions` would apply. `apply_gradients` applies it."""
        self.flat.zero_grads()
        stats, _ = self.backward(self.normalized(batch))
        count = batch.num_rows
        return Gradients(self.flat.get_grads(), self.version, count, stats, count)

    def normalized(self, rows: Any) -> Any:
        """The rows with observations as the networks use them."""
        if self.normalizer is None:
            return rows
        observations = self.normalizer.observations
        if isinstance(rows, Sequences):
            obs, successors = observations(rows.batch.all_obs), rows.batch.successor_obs
            successors = observations(successors) if len(successors) else successors
            batch = dataclasses.replace(rows.batch, all_obs=obs, successor_obs=successors)
            return rows._replace(batch=batch)
        return rows._replace(obs=observations(rows.obs), next_obs=observations(rows.next_obs))

    def tensors(self, rows: Transitions) -> Any:
        """The rows with tensors on the device of the networks in place of arrays."""
        return Transitions._make(as_tensor(array, self.device) for array in rows)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Networks with a gradient are in training mode meanwhile, and else in evaluation mode."""
        modules = [self.segments[name].module for name in self.flat.trained]
        for module in modules:
            module.train()
        try:
            yield
        finally:
            for module in modules:
                module.eval()

    def on_update(self) -> None:
        """Moves target networks, every `target_network_update_freq` updates."""
        if self.version % self.config.target_network_update_freq == 0:
            self.flat.refresh_copies(self.config.tau)


def bootstrapped(rows: Any, values: Tensor) -> Tensor:
    """Targets `[B]`: the rewards of rows, and discounted values `[B]` of their next observations.
    Where the discount is 0, the next observation is meaningless, and its value may be NaN."""
    return rows.rewards + torch.where(rows.discounts > 0.0, rows.discounts * values, 0.0)


def as_floats(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """Statistics `[]` as numbers, with one transfer from the device."""
    numbers = torch.stack([value.detach() for value in stats.values()]).tolist()
    return dict(zip(stats, numbers, strict=True))


def _finite(errors: np.ndarray) -> np.ndarray:
    """Errors `[B]`, with 0 in place of what is not finite."""
    if math.isfinite(float(np.add.reduce(errors))):
        return errors
    return np.nan_to_num(errors, nan=0.0, posinf=0.0, neginf=0.0)
