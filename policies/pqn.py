"""PQN: parallelised Q-networks (Gallici et al., 2024). Uses no replay buffer or target network."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pydantic
from torch import Tensor

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.config import Automatic
from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.epsilon_greedy_policy import EpsilonGreedyConfig, EpsilonGreedyPolicy
from polopt.policies.fragment_policy import FragmentConfig, FragmentPolicy
from polopt.policies.learning.schedules import LearningRate, ProbabilitySchedule
from polopt.policies.networks.network import Network
from polopt.policies.networks.q_network import QModelConfig


class PQNModelConfig(QModelConfig):
    """Options of the network of PQN. These are the options of `QModelConfig`. By default, the
    network has layer normalisation."""

    layer_norm: bool = True


class PQNConfig(EpsilonGreedyConfig, FragmentConfig):
    """Options of `PQNPolicy`. These are the options of `FragmentConfig` and `EpsilonGreedyConfig`.

    `lambda` is the lambda of Q(lambda). CleanRL's PQN has the same defaults for `lambda`,
    `grad_clip` and `num_sgd_iter`.
    """

    lr: LearningRate = 1e-3
    lambda_: float = pydantic.Field(default=0.65, ge=0.0, le=1.0, alias="lambda")
    grad_clip: float | None = pydantic.Field(default=10.0, gt=0.0)
    num_sgd_iter: int = pydantic.Field(default=4, ge=1, le=10**6)
    sgd_minibatch_size: Automatic = pydantic.Field(default=128, ge=0)
    epsilon: ProbabilitySchedule = pydantic.Field(default=[(0, 1.0), (100_000, 0.05)])
    model: PQNModelConfig = PQNModelConfig()


class PQNPolicy(EpsilonGreedyPolicy, FragmentPolicy):
    """Q(lambda) on fragments, without a replay buffer.

    The loss is the mean of `(Q(s, a) - target)^2 / 2`, with

        target_t = r_t + gamma ((1 - lambda) max_a Q(s_{t+1}, a) + lambda target_{t+1})

    At the end of a fragment and of a truncated episode, `target_{t+1}` is `max_a Q(s_{t+1}, a)`.
    After a terminated episode, both `max_a Q(s_{t+1}, a)` and `target_{t+1}` are 0. Layer
    normalisation stabilises learning in place of a target network.
    """

    config_class = PQNConfig
    config: PQNConfig

    def make_network(self) -> Network:
        return self.make_q_network(dueling=False)

    def best_values(self, obs: np.ndarray) -> np.ndarray:
        """Q-values `[B]` of the best actions in encoded and normalised observations `[B, ...]`. The
        value is 0 if the mask of an observation allows no action."""
        best = self.backend.action_params(obs).max(axis=-1)
        return np.where(best > 0.5 * MASKED_LOGIT, best, np.float32(0.0))

    @np.errstate(all="ignore")
    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values` `[T, N]`, the Q-values of the actions, and `value_targets` `[T, N]`."""
        used, config = self.normalized(batch), self.config
        best, following = gae.state_values(used, self.best_values)
        # Q(lambda) is the recursion of GAE with the value of the best action as the state value.
        surplus = gae.advantages(used, best, following, config.gamma, config.lambda_)
        q, actions = batch["action_dist_inputs"], batch["actions"][..., None]
        batch["values"] = np.take_along_axis(q, actions, axis=-1)[..., 0]
        batch["value_targets"] = surplus + best
        return batch

    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        q, _ = self.outputs(rows)
        values = q.gather(-1, rows["actions"][:, None])[:, 0]
        loss = 0.5 * (values - rows["value_targets"]).square().mean()
        return loss, {"vf_loss": loss}
