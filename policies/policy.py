"""`Policy`: the loss of one algorithm, and everything done to the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.policies import gae
from polopt.policies.acting import ActorCritic, PolicyConfig
from polopt.policies.adam import FlatAdam
from polopt.policies.fast_cpu.loss_gradients import Slopes, Terms, defined_together, terms_of
from polopt.policies.fast_cpu.numpy_mlp import NumpyActorCritic
from polopt.policies.schedules import Schedule
from polopt.policies.sgd import (
    LocalReducer,
    Reducer,
    explained_variance,
    sgd,
    standardized,
)

#: The square of a larger number is infinite in float32.
_MAX_NORM = 1e18


class Policy(ActorCritic, ABC):
    """Acts, and learns from batches.

    A subclass gives `config_class` and `loss`, and if it needs to `on_epoch` and `on_learned`;
    `slopes` makes small networks learn in a third of the time.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        config: an instance of `config_class`.
        seed: of the initial weights and of the shuffling of minibatches.
        device: where to learn; see `ActorCritic`.

    Attributes:
        version: updates applied to the weights so far.
        env_steps: environment steps sampled by all workers so far; the clock of all schedules.
        coefficients: scalars that learning adapts; they travel with the weights.
        skipped_updates: those that were left out because the gradient was not finite.
        non_finite_gradients: non-finite gradients that this learner itself computed.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    #: Columns of a postprocessed batch that `loss` reads.
    loss_columns: ClassVar[tuple[str, ...]] = ("actions", "advantages", "value_targets")

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: PolicyConfig,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(observation_space, action_space, config, seed, device)
        self._terms = terms_of(self.dist)
        self._has_slopes = defined_together(type(self), "loss", "slopes")
        self._adam = FlatAdam(self.flat.params, self.flat.grads, config.adam_epsilon)
        self._lr = Schedule(config.lr)
        self._entropy_coeff = Schedule(config.entropy_coeff)
        self.shuffle = np.random.default_rng([seed, 1])
        self.version = 0
        self.env_steps = 0
        self.coefficients: dict[str, float] = {}
        self.skipped_updates = 0
        self.non_finite_gradients = 0

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, `advantages` and `value_targets`, from the weights of this moment.

        To be called where and when the batch was made, so that these are the weights that acted.
        """
        steps, envs = batch.shape
        flat_obs = batch.all_obs.reshape((steps + 1) * envs, *batch.all_obs.shape[2:])
        all_values = self.value(flat_obs).reshape(steps + 1, envs)
        successors = self.value(batch.successor_obs) if len(batch.successor_index) else np.zeros(0)
        following = gae.next_values(batch, all_values, successors)
        values = all_values[:-1]
        config = self.config
        advantages = gae.advantages(batch, values, following, config.gamma, config.lambda_)
        batch["values"] = values
        batch["advantages"] = advantages
        batch["value_targets"] = advantages + values
        return batch

    @abstractmethod
    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a mean over rows, so that its gradient does not grow with the batch.

        Args:
            rows: `obs` `[B, ...]` and each of `loss_columns` `[B, ...]`; valid rows only.

        Returns:
            the loss `[]` and learner statistics `[]` (means over the same rows).
        """

    def training_rows(self, batch: SampleBatch) -> dict[str, Tensor]:
        """The valid rows `[B, ...]` of the columns that `loss` reads, as tensors."""
        names = ("obs", *self.loss_columns)
        valid = batch.flat("valid")
        if valid.all():
            arrays = {name: batch.flat(name) for name in names}
        else:
            rows = np.flatnonzero(valid)
            arrays = {name: batch.flat(name)[rows] for name in names}
        # A fragment that came through Ray alone is read-only, which torch warns of.
        owned = {name: a if a.flags.writeable else a.copy() for name, a in arrays.items()}
        return {name: torch.as_tensor(a, device=self.device) for name, a in owned.items()}

    def compute_gradients(self, batch: SampleBatch) -> Gradients:
        """The gradient of the loss of a postprocessed batch, not clipped, not applied."""
        rows = self.training_rows(batch)
        count = len(rows["obs"])
        if count == 0:
            return self.no_gradients()
        if self.config.standardize_advantages:
            rows["advantages"] = standardized(rows["advantages"], LocalReducer())
        stats = self.backward(rows)
        stats["vf_explained_var"] = explained_variance(batch)
        return Gradients(self.flat.get_grads(), self.version, count, stats)

    def no_gradients(self) -> Gradients:
        """The gradient of nothing: zeros of no rows."""
        return Gradients(np.zeros(len(self.flat.grads), np.float32), self.version, 0, {})

    def slopes(
        self, terms: Terms, values: np.ndarray, rows: Mapping[str, np.ndarray]
    ) -> tuple[Slopes, dict[str, float]]:
        """The closed form of `loss`, where a policy gives one: spares small networks autograd. A
        subclass that changes `loss` alone goes without.

        Args:
            terms: of the distributions of `rows`.
            values: `[B]`.
            rows: as `loss` gets them, in NumPy.

        Returns:
            slopes of the loss, and the same statistics as `loss` with `total_loss`.
        """
        raise NotImplementedError

    def backward(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Leaves the gradient of the mean loss of `rows` in `flat.grads`; returns statistics."""
        self.flat.zero_grads()
        if self._numpy is not None and self._numpy.learns and self._terms and self._has_slopes:
            return self._backward_in_numpy(self._numpy, self._terms, rows)
        loss, stats = self.loss(rows)
        loss.backward()
        stats["total_loss"] = loss
        return dict(zip(stats, torch.stack([*stats.values()]).tolist(), strict=True))

    @np.errstate(over="ignore", invalid="ignore")  # whoever applies it looks at the gradient
    def _backward_in_numpy(
        self,
        network: NumpyActorCritic,
        terms_of: Callable[..., Terms],
        rows: Mapping[str, Tensor],
    ) -> dict[str, float]:
        columns = {name: column.numpy() for name, column in rows.items()}
        params, values, done = network.forward(columns["obs"])
        terms = terms_of(params, columns["actions"], columns.get("action_dist_inputs"))
        slopes, stats = self.slopes(terms, values, columns)
        by_params = terms.pull(slopes.log_prob, slopes.entropy, slopes.kl)
        network.backward(done, by_params, slopes.values)
        return stats

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies a gradient computed here or elsewhere; see `apply_flat`."""
        self.flat.set_grads(gradients.flat)
        return self.apply_flat(lr_scale)

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        """One update with the gradient in `flat.grads`: clip by global norm, then Adam.

        Args:
            lr_scale: multiplies the learning rate of this update (Adam would undo most of a
                factor on the gradient).

        A gradient that is not finite is not applied: one such would make every weight NaN, for
        ever. Nor is one whose squares are too large for Adam, which would never move again. They
        are counted in `skipped_updates`.

        Returns:
            `{"grad_norm", "default_optimizer_learning_rate"}`, the norm before clipping.
        """
        norm = self.flat.norm()
        lr = self._lr(self.env_steps) * lr_scale
        clip = self.config.grad_clip
        if not np.isfinite(norm) or min(norm, clip or norm) > _MAX_NORM:
            self.skipped_updates += 1
            return {"default_optimizer_learning_rate": lr}
        if clip is not None and norm > clip:
            self.flat.grads.mul_(clip / norm)
        self._adam.step(lr)
        self.version += 1
        return {"grad_norm": norm, "default_optimizer_learning_rate": lr}

    def learn_on_batch(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, float]:
        """`num_sgd_iter` epochs of minibatch SGD on a postprocessed batch.

        Args:
            batch: of this learner; where several learn together, each has its own.
            reducer: sums over those learners; None where there is one.

        Returns:
            learner statistics, means over rows (of all learners) and minibatches.
        """
        stats = sgd(self, batch, reducer or LocalReducer())
        stats["vf_explained_var"] = explained_variance(batch)
        return stats

    def on_epoch(self, stats: Mapping[str, float]) -> bool:
        """Called after each epoch with its statistics over all learners; True stops learning."""
        return False

    def on_learned(self, stats: Mapping[str, float]) -> None:
        """Called once after the last epoch, with its statistics; adapts coefficients."""
        return

    @property
    def entropy_coeff(self) -> float:
        """The entropy coefficient now."""
        return self._entropy_coeff(self.env_steps)

    def set_option(self, name: str, value: Any) -> None:
        """Changes an option while training: the config, and whatever was made from it.

        Args:
            name: key of an option of `config_class`, as users write it; not `model`.
            value: checked as the config's own.

        Raises:
            ConfigError: for an unknown option, a wrong value, or one that needs another network.
        """
        name = self.config_class.aliases.get(name, name)
        if name == "model":
            raise ConfigError("key 'model' can not be changed: weights are of one network")
        options = {**self.config.to_dict(), name: value}
        self.config = self.config_class.parse(options, "policy")
        self._lr = Schedule(self.config.lr)
        self._entropy_coeff = Schedule(self.config.entropy_coeff)
        self._adam.epsilon = self.config.adam_epsilon
        if name in self.coefficients:
            self.coefficients[name] = float(value)

    # ---- weights and state --------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """A copy of the weights `[P]`, with what schedules and losses depend on."""
        flat = self.flat.get_params()
        return Weights(flat, self.version, self.env_steps, dict(self.coefficients))

    def set_weights(self, weights: Weights) -> None:
        """Takes over weights, their version, the clock and the coefficients.

        Raises:
            ValueError: if they are of another network.
        """
        if weights.flat.shape != tuple(self.flat.params.shape):
            raise ValueError(
                f"weights must have shape {list(self.flat.params.shape)}; "
                f"got {list(weights.flat.shape)}: they are of another network"
            )
        self.flat.set_params(weights.flat)
        self.version = weights.version
        self.env_steps = weights.env_steps
        self.coefficients = dict(weights.coefficients)

    def _network(self) -> str:
        """The network in one line, to tell it from others with as many parameters."""
        return " ".join(str(self.model).split())

    def get_state(self) -> dict[str, Any]:
        """All that learning depends on: tensors, numbers, strings, and lists and dicts of those."""
        return {
            "network": self._network(),
            "params": self.flat.params.detach().cpu().clone(),
            "adam": self._adam.get_state(),
            "version": self.version,
            "env_steps": self.env_steps,
            "coefficients": dict(self.coefficients),
            "shuffle": self.shuffle.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `get_state` gave.

        Raises:
            ValueError: if it is of another network.
        """
        if state["network"] != self._network():
            raise ValueError(
                f"the state must be of network {self._network()}; got {state['network']}: "
                "they are of another network"
            )
        flat = state["params"].numpy()
        coefficients = {**self.coefficients, **state["coefficients"]}
        self.set_weights(Weights(flat, state["version"], state["env_steps"], coefficients))
        self._adam.set_state(state["adam"])
        self.shuffle.bit_generator.state = state["shuffle"]
