"""`Policy`: network, distribution and loss of one algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics.learner import LEARNER_KEYS
from polopt.policies import gae
from polopt.policies.distributions.diag_gaussian import DiagGaussian
from polopt.policies.distributions.factory import make_distribution
from polopt.policies.fast_cpu.loss_gradients import LossGradients, has_closed_form
from polopt.policies.fast_cpu.loss_terms import LossTerms, loss_terms_of
from polopt.policies.fast_cpu.numpy_backend import NumpyBackend, is_supported
from polopt.policies.learning.config import PolicyConfig
from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.minibatches import explained_variance, standardized, valid_rows
from polopt.policies.learning.reducer import LocalReducer, Reducer
from polopt.policies.learning.schedules import Schedule
from polopt.policies.learning.sgd import sgd
from polopt.policies.learning.weight_updater import WeightUpdater
from polopt.policies.networks.backend import Backend, TorchBackend
from polopt.policies.networks.base import ActorCriticNetwork
from polopt.policies.networks.factory import make_network
from polopt.policies.spaces import ObservationEncoder

#: Options that are fixed once the policy exists.
_FIXED_OPTIONS = ("model", "torch_optimizer", "fast_cpu")


class Policy(ABC):
    """Chooses actions, and learns from batches.

    A subclass provides `loss`, and optionally `config_class`, `loss_columns`, `make_network`,
    `on_epoch`, `on_learned` and `loss_gradients`.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: an instance of `config_class`.
        seed: seed of the initial weights and of the shuffling of minibatches.
        device: torch device of the network.

    Attributes:
        encoder: converts observations of the environment to arrays.
        dist: the action distribution.
        model: the network; its parameters are views of `flat.params`.
        flat: all parameters and all gradients, one tensor each.
        shuffle: random numbers for the order of minibatches.
        version: number of updates applied to the weights.
        env_steps: environment steps sampled so far by all workers; the argument of all schedules.
        coefficients: scalars that learning adapts; they are sent with the weights.
        non_finite_gradients: non-finite gradients computed here while several learners cooperate.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    #: Columns of a postprocessed batch that `loss` reads, besides `obs`.
    loss_columns: ClassVar[tuple[str, ...]] = ("actions", "advantages", "value_targets")

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: PolicyConfig,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.encoder = ObservationEncoder(observation_space)
        self.dist = make_distribution(action_space, config.model.squash_actions)
        self.device = torch.device(device)
        # The initial weights depend on `seed` only, and torch's global generator is not changed.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = self.make_network().to(self.device)
        self.flat = FlatParameters(self.model, tail=len(LEARNER_KEYS) + 1)
        self._backend = self._make_backend()
        self._updater = WeightUpdater(self.flat, config)
        self.shuffle = np.random.default_rng([seed, 1])
        self.version = 0
        self.env_steps = 0
        self.coefficients: dict[str, float] = {}
        self.non_finite_gradients = 0

    def make_network(self) -> ActorCriticNetwork:
        """A new network for `encoder`, `dist` and `config.model`, with random weights."""
        gaussian = isinstance(self.dist, DiagGaussian)
        encoder, model = self.encoder, self.config.model
        return make_network(encoder.shape, encoder.dtype, self.dist.num_params, gaussian, model)

    def _make_backend(self) -> Backend:
        torch_backend = TorchBackend(self.model, self.device, self.loss)
        if not (self.config.fast_cpu and is_supported(self.model)):
            return torch_backend
        closed_form = self.loss_gradients if has_closed_form(type(self)) else None
        return NumpyBackend(self.model, loss_terms_of(self.dist), closed_form, torch_backend)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""
        return self._backend.action_params(obs)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` float32 of encoded observations `[N, ...]`."""
        return self._backend.value(obs)

    def compute_actions(
        self,
        obs: np.ndarray,
        state: Any = None,
        explore: bool = True,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        """Chooses one action for each observation.

        Args:
            obs: encoded observations `[N, ...]`.
            state: state of a recurrent policy; returned unchanged.
            explore: sample the actions; False takes the mode.
            rng: source of random numbers; by default a new generator.

        Returns:
            actions for the environment `[N, ...]`, the state, and `{"action_dist_inputs": [N, P],
            "actions": [N, ...]}` with the actions as sampled from the distribution.
        """
        params = self.action_params(obs)
        noise = None
        if explore:
            noise = self.dist.draw_noise(rng or np.random.default_rng(), len(obs))
        actions = self.dist.sample(params, noise)
        extra = {"action_dist_inputs": params, "actions": actions}
        return self.dist.to_env(actions), state, extra

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, `advantages` and `value_targets`, computed with the current weights, which
        must be those that chose the actions."""
        gae.add_advantages(batch, self.value, self.config.gamma, self.config.lambda_)
        return batch

    @abstractmethod
    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a mean over rows, so that its gradient does not grow with the batch.

        Args:
            rows: `obs` `[B, ...]` and each of `loss_columns` `[B, ...]`; valid rows only.

        Returns: the loss `[]` and learner statistics `[]` (means over the same rows).
        """

    def loss_gradients(
        self, terms: LossTerms, values: np.ndarray, rows: Mapping[str, np.ndarray]
    ) -> tuple[LossGradients, dict[str, float]]:
        """Optional: the gradients of `loss` in closed form, and the statistics of `loss` with
        `total_loss`. The method must be decorated with `@closed_form_of(loss)`."""
        raise NotImplementedError

    def training_rows(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, Tensor]:
        """The valid rows `[B, ...]` of the columns that `loss` reads, as tensors. If the config
        says so, advantages are standardised over the rows of all learners (see `Reducer`)."""
        rows = valid_rows(batch, ("obs", *self.loss_columns), self.device)
        if self.config.standardize_advantages:
            rows["advantages"] = standardized(rows["advantages"], reducer or LocalReducer())
        return rows

    def compute_gradients(self, batch: SampleBatch) -> Gradients:
        """The gradient of the loss of a postprocessed batch, not clipped, not applied."""
        rows = self.training_rows(batch)
        count = len(rows["obs"])
        if count == 0:
            return self.no_gradients()
        stats = self.backward(rows)
        stats["vf_explained_var"] = explained_variance(batch)
        return Gradients(self.flat.get_grads(), self.version, count, stats)

    def no_gradients(self) -> Gradients:
        """The gradient of zero rows: zeros."""
        return Gradients(np.zeros(len(self.flat.grads), np.float32), self.version, 0, {})

    def backward(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Writes the gradient of the mean loss of `rows` to `flat.grads`; returns statistics."""
        self.flat.zero_grads()
        return self._backend.backward(rows)

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies a gradient, computed by this policy or another; see `apply_flat`."""
        self.flat.set_grads(gradients.flat)
        return self.apply_flat(lr_scale)

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies the gradient in `flat.grads`; see `WeightUpdater.apply`.

        Returns `grad_norm` (before clipping) and `default_optimizer_learning_rate`; without
        `grad_norm` if the gradient was not finite and was skipped.
        """
        applied, stats = self._updater.apply(self.env_steps, lr_scale)
        self.version += applied
        return stats

    def learn_on_batch(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, float]:
        """`num_sgd_iter` epochs of minibatch SGD on a postprocessed batch of this learner.

        Args:
            batch: postprocessed.
            reducer: sums over all learners; None for one learner.

        Returns: learner statistics, means over rows (of all learners) and minibatches.
        """
        stats = sgd(self, batch, reducer or LocalReducer())
        stats["vf_explained_var"] = explained_variance(batch)
        return stats

    def on_epoch(self, stats: Mapping[str, float]) -> bool:
        """Called after each epoch with its statistics over all learners; True stops learning."""
        return False

    def on_learned(self, stats: Mapping[str, float]) -> None:
        """Called after the last epoch with its statistics, to adapt coefficients."""
        return

    @property
    def skipped_updates(self) -> int:
        """Number of gradients that were not applied because they were not finite."""
        return self._updater.skipped

    @property
    def entropy_coeff(self) -> float:
        """The current entropy coefficient."""
        return Schedule(self.config.entropy_coeff)(self.env_steps)

    def set_option(self, name: str, value: Any) -> None:
        """Changes an option of the config during training.

        Raises:
            ConfigError: for an unknown option, a wrong value, or an option that is fixed.
        """
        name = self.config_class.aliases.get(name, name)
        if name in _FIXED_OPTIONS:
            raise ConfigError(f"key {name!r} cannot be changed while the policy exists")
        options = {**self.config.to_dict(), name: value}
        self.config = self.config_class.parse(options, "policy")
        self._updater.configure(self.config)
        if name in self.coefficients:
            self.coefficients[name] = float(value)

    def get_weights(self) -> Weights:
        """A copy of the weights `[P]`, with the arguments of schedules and losses."""
        flat = self.flat.get_params()
        return Weights(flat, self.version, self.env_steps, dict(self.coefficients))

    def set_weights(self, weights: Weights) -> None:
        """Copies weights, their version, environment steps and coefficients.

        Raises:
            ValueError: if the weights belong to another network.
        """
        self.flat.set_params(weights.flat)
        self.version = weights.version
        self.env_steps = weights.env_steps
        self.coefficients = dict(weights.coefficients)

    def get_state(self) -> dict[str, Any]:
        """The state of learning: tensors, numbers, strings, and lists and dicts of these."""
        return {
            "network": self.model.describe(),
            "params": self.flat.params.detach().cpu().clone(),
            **self._updater.get_state(),
            "version": self.version,
            "env_steps": self.env_steps,
            "coefficients": dict(self.coefficients),
            "shuffle": self.shuffle.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            ValueError: if it belongs to another network or another torch optimizer.
        """
        self.model.check_description(state["network"])
        flat = state["params"].numpy()
        coefficients = {**self.coefficients, **state["coefficients"]}
        self.set_weights(Weights(flat, state["version"], state["env_steps"], coefficients))
        self._updater.set_state(state)
        self.shuffle.bit_generator.state = state["shuffle"]
