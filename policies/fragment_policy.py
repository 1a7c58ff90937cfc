"""`FragmentPolicy`: learns from fragments, in epochs of minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic
from torch import Tensor

from polopt.common.config import Automatic, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.metrics.learner import mean_stats
from polopt.policies import gae
from polopt.policies.learning.minibatches import (
    Minibatches,
    microbatches,
    num_minibatches,
    valid_rows,
)
from polopt.policies.learning.policy_config import NormalizingConfig
from polopt.policies.learning.reducer import LocalReducer, Reducer, value_statistics, value_sums
from polopt.policies.network_policy import NetworkPolicy
from polopt.policies.networks.backend import Rows
from polopt.policies.normalization import Normalizer
from polopt.policies.policy import Policy, reduce_gradient


class FragmentConfig(NormalizingConfig):
    """Options of policies that learn from fragments, in addition to the options of
    `NormalizingConfig`.

    Attributes:
        gamma: the discount factor.
        lambda_: the lambda of lambda-returns (key `lambda`).
        num_sgd_iter: the number of epochs over each batch.
        sgd_minibatch_size: the approximate number of rows of a minibatch. If the workers learn or
            compute gradients, this is the number of rows in each worker. IMPALA, APPO and policies
            with memory do not split the fragment of an environment, so their minibatches can be
            larger. `None` and 0 mean that all rows are one minibatch.
        microbatch_size: the largest number of rows whose gradient is computed at once. The gradient
            of a minibatch is the mean of the gradients of its microbatches, weighted by their
            numbers of rows. Smaller microbatches need less memory. They change the gradient only by
            rounding, unless the network has batch normalisation or dropout. For a policy with
            memory, a microbatch has at least one whole sequence. With `None` or 0, the gradient of
            a minibatch is computed at once. (RLlib 0.8's MicrobatchOptimizer adds up the gradients
            instead of taking their mean.)
        normalize_rewards: whether to divide rewards by the running standard deviation of the
            discounted return. With True, values and value targets refer to the divided rewards. The
            returns in results stay undivided.
        clip_rewards: the largest absolute value of a normalised reward. Larger values are clipped.
    """

    gamma: float = pydantic.Field(default=0.99, ge=0.0, le=1.0)
    lambda_: float = pydantic.Field(default=1.0, ge=0.0, le=1.0, alias="lambda")
    num_sgd_iter: int = pydantic.Field(default=1, ge=1, le=10**6)
    sgd_minibatch_size: Automatic = pydantic.Field(default=None, ge=0)
    microbatch_size: Automatic = pydantic.Field(default=None, ge=0)
    normalize_rewards: bool = False
    clip_rewards: float = pydantic.Field(default=10.0, gt=0.0, le=1e6)

    aliases: ClassVar[Mapping[str, str]] = {**NormalizingConfig.aliases, "lambda_": "lambda"}
    fixed: ClassVar[tuple[str, ...]] = (
        *NormalizingConfig.fixed,
        "normalize_rewards",
        "clip_rewards",
    )


class FragmentPolicy(NetworkPolicy):
    """Learns from fragments, by minibatch SGD on value targets.

    A subclass must define:

    - `postprocess` or `prepare_batch`, which adds the columns `values` and `value_targets`,
    - `loss`, which gets `obs` and the columns `loss_columns` `[B, ...]`, and calls `outputs` with
      all of them.

    A subclass may define `config_class`, `loss_columns`, `whole_columns`, `make_network`,
    `prepare_batch`, `on_epoch` and `on_learned`. A subclass must take `obs` and `rewards` from
    `normalized(batch)`, not from the batch itself.

    `NetworkPolicy` describes the arguments, attributes and errors.
    """

    config_class: ClassVar[type[FragmentConfig]] = FragmentConfig
    config: Any  # see Policy
    #: Columns of a batch from `prepare_batch` that `loss` reads, in addition to `obs`.
    loss_columns: ClassVar[tuple[str, ...]] = ("actions", "value_targets")
    #: Whether a minibatch consists of all T steps of n environments. If True, `prepare_batch` is
    #: called for each minibatch, right before its gradient is computed. If False, `prepare_batch`
    #: is called once, for the whole batch.
    whole_columns: ClassVar[bool] = False

    def make_normalizer(self) -> Normalizer | None:
        config = self.config
        observations = config.clip_observations if config.normalize_observations else None
        rewards = config.clip_rewards if config.normalize_rewards else None
        if observations is None and rewards is None:
            return None
        return Normalizer(self.encoder, observations, rewards, config.gamma)

    def set_option(self, name: str, value: Any) -> None:
        super().set_option(name, value)
        if self.normalizer is not None:
            self.normalizer.gamma = self.config.gamma

    # ---- the loss, and hooks of learning --------------------------------------------------------

    def outputs(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, P]` and values `[B]` of the rows of a minibatch. `loss`
        calls this method."""
        if not self.state_size:
            return self.model(rows["obs"])
        params, values, _ = self.model.unroll(rows["obs"], rows["state"], rows["starts"])
        return params[rows["valid"]], values[rows["valid"]]

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Prepares a postprocessed batch `[T, N]` in the process that computes the gradients. See
        `whole_columns` for the time of the call. The default returns the batch unchanged. A
        subclass that changes a column must return a new batch."""
        return batch

    def on_epoch(self, stats: Mapping[str, float]) -> bool:
        """Decides whether to stop learning from this batch. `learn_on_batch` calls this method
        after each epoch, with the statistics of the epoch over all learners. If this method returns
        True, the remaining epochs are skipped."""
        return False

    def on_learned(self, stats: Mapping[str, float]) -> None:
        """Adapts coefficients. If `learn_on_batch` has made more than one update with a batch, it
        calls this method after the last epoch, with the statistics of that epoch. The default does
        nothing."""
        return

    # ---- learning from a batch ------------------------------------------------------------------

    def training_rows(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the valid rows `[B, ...]` of the columns that `loss` reads.

        For a policy with memory, `obs` holds whole sequences `[T, N, ...]`. The result then has
        three more columns for `outputs`: `starts` `[T, N]`, `valid` `[T, N]`, and `state` `[N, S]`,
        the memory before the first step. The B valid rows are ordered by time, and then by
        environment.

        Args:
            batch: a batch from `prepare_batch`.
            reducer: sums over all learners. `None` means that there is only one learner.
        """
        batch = self.normalized(batch)
        columns = self.loss_columns if self.state_size else ("obs", *self.loss_columns)
        rows = valid_rows(batch, columns)
        if self.state_size:
            rows |= {
                "obs": batch.obs,
                "starts": gae.episode_starts(batch)[:-1],
                "valid": batch["valid"],
                "state": batch.per_env["state"],
            }
        return rows

    def backward(self, rows: Rows) -> dict[str, float]:
        """Writes the gradient of the mean loss over `rows` to `flat.grads`. Returns statistics.

        Args:
            rows: rows from `training_rows`.
        """
        self.flat.zero_grads()
        size, total = self.config.microbatch_size, len(rows["actions"])
        if size is None:
            return self.backend.backward(rows)
        stats = []
        for part in microbatches(rows, size, sequences=bool(self.state_size)):
            if count := len(part["actions"]):
                # `backward` adds the mean gradient of the rows of the part. Because of the scaling
                # before and after this call, the gradient is a sum over the rows of all parts.
                self.flat.scale(1.0 / count)
                stats.append((self.backend.backward(part), count))
                self.flat.scale(count)
        self.flat.scale(1.0 / total)
        return mean_stats(stats)

    @np.errstate(all="ignore")
    def compute_gradients(self, batch: SampleBatch) -> Gradients:
        batch = self.prepare_batch(batch)
        gradients = self._gradients_of(self.training_rows(batch), value_sums(batch))
        return gradients._replace(new_rows=gradients.rows, acted=batch.version)

    def _gradients_of(self, rows: Rows, of_values: list[float]) -> Gradients:
        count = len(rows["actions"])
        if count == 0:
            self.flat.zero_grads()
            return Gradients(self.flat.get_grads(), self.version, 0, {}, acted=self.version)
        buffers = self.flat.get_buffers()
        stats = self.backward(rows)
        if len(buffers) and not np.array_equal(buffers, self.flat.get_buffers(), equal_nan=True):
            raise ConfigError(
                f"learning changes buffers of {type(self.model).__name__}, such as running "
                "statistics of batch normalisation, and a gradient does not hold these buffers. "
                "Allowed: an optimizer that learns from samples (sync_samples, async_samples, "
                "decentralized_allreduce), or a network without such buffers (LayerNorm)"
            )
        stats |= value_statistics(of_values)
        return Gradients(self.flat.get_grads(), self.version, count, stats)

    def minibatch_gradients(self, batch: SampleBatch) -> Iterator[Gradients]:
        """Yields one gradient for each minibatch of each epoch. See `Policy.minibatch_gradients`.

        This method does not call `on_epoch` and `on_learned`, so PPO's `kl_stop` and `kl_target`
        have no effect.
        """
        minibatches = self._minibatches(batch, LocalReducer())
        # `len(batch)` counts valid and invalid rows. So fragments of the same size give the same
        # number of minibatches in all workers, even if their numbers of valid rows differ.
        parts = num_minibatches(len(batch), 1, self.config.sgd_minibatch_size)
        if self.whole_columns or self.state_size:
            parts = min(parts, batch.shape[1])
        epochs = self.config.num_sgd_iter
        for epoch in range(epochs):
            for part, (rows, of_values) in enumerate(minibatches.epoch(parts)):
                gradients = self._gradients_of(rows, of_values)
                new_rows = gradients.rows if epoch == 0 else 0
                is_last = (epoch, part) == (epochs - 1, parts - 1)
                yield gradients._replace(new_rows=new_rows, ends_rollout=is_last)

    def _minibatches(self, batch: SampleBatch, reducer: Reducer) -> Minibatches:
        def prepare(part: SampleBatch) -> tuple[Rows, list[float]]:
            part = self.prepare_batch(part)
            return self.backend.rows(self.training_rows(part, reducer)), value_sums(part)

        unit: Literal["rows", "sequences", "columns"] = "rows"
        if self.whole_columns:
            unit = "columns"
        elif self.state_size:
            unit = "sequences"
        size = self.config.sgd_minibatch_size
        return Minibatches(batch, prepare, unit, size, self.shuffle, reducer)

    @np.errstate(all="ignore")
    def learn_on_batch(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, float]:
        """Learns for `num_sgd_iter` epochs from the rows of all learners.

        All learners make the same updates, even if they have different numbers of rows. In each
        update, every learner uses one of its minibatches. The gradient of the update is the
        gradient of the mean loss over the rows of these minibatches.
        """
        reducer = reducer or LocalReducer()
        minibatches = self._minibatches(batch, reducer)
        parts = minibatches.parts
        if parts == 0:  # no learner has a valid row
            return {}
        epochs: list[dict[str, float]] = []
        values: list[dict[str, float]] = []
        for _ in range(self.config.num_sgd_iter):
            updates = []
            for rows, of_values in minibatches.epoch(parts):
                updates.append(self.update(rows, reducer))
                values.append(value_statistics(of_values))
            epochs.append(_mean(updates))
            if self.on_epoch(epochs[-1]):
                break
        # The KL of a minibatch is measured before its update. So if there was only one update, the
        # measured KL does not show the effect of the update, and coefficients must not be adapted
        # to this KL.
        if parts * len(epochs) > 1:
            self.on_learned(epochs[-1])
        # The result has the KL of the last epoch instead of a mean over epochs, because the KL of
        # the last epoch is closest to the distance between the old policy and the new policy.
        kl = {key: value for key, value in epochs[-1].items() if key == "mean_kl_loss"}
        return _mean(epochs) | kl | _mean(values)

    def update(self, rows: Rows, reducer: Reducer) -> dict[str, float]:
        """Makes one update from one minibatch of each learner.

        Args:
            rows: rows `[B, ...]` of this learner, from `training_rows`. B may be 0.
            reducer: sums over all learners.

        Returns:
            learner statistics, which are means over the rows of all learners. If there is only one
            learner and B is 0, they are empty.
        """
        count = len(rows["actions"])
        if count == 0 and reducer.world_size == 1:
            return {}
        stats = self.backward(rows) if count else {}
        self.progress.gradient_rows = count
        if reducer.world_size > 1:
            stats = reduce_gradient(self, count, stats, reducer)
        return stats | self.apply_flat()


def _mean(parts: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    result = {}
    for key in keys:
        values = [part[key] for part in parts if key in part]
        result[key] = sum(values) / len(values)
    return result


class MinibatchGradients:
    """Computes the gradients of `Policy.minibatch_gradients`, one per call of `next_gradients`.

    Each gradient is computed with the weights that the policy has at the time of the call. The
    caller applies the gradient, in this process or in another one.

    Args:
        policy: the policy that computes the gradients. See `Policy.minibatch_gradients`.
        batch: a postprocessed batch.

    Attributes:
        version: version of the weights that chose the actions of the batch. If several versions
            chose actions, this is the oldest version.
        done: whether `next_gradients` has returned the last gradient of the batch.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        self._gradients = policy.minibatch_gradients(batch)
        self.version = batch.version
        self.done = False

    @np.errstate(all="ignore")
    def next_gradients(self) -> Gradients:
        """Computes the next gradient. The gradient is not clipped.

        Raises:
            ValueError: the batch has no more minibatches.
        """
        if self.done:
            raise ValueError("all minibatches of the batch are used")
        gradients = next(self._gradients)
        self.done = gradients.ends_rollout
        return gradients._replace(acted=self.version)
