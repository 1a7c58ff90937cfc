"""`EpsilonGreedyPolicy`: base class of policies that choose actions by Q-values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pydantic
from gymnasium import spaces

from polopt.common.config import ConfigError
from polopt.metrics.number import declare
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.epsilon_greedy import EpsilonGreedy
from polopt.policies.learning.policy_config import NormalizingConfig
from polopt.policies.learning.schedules import ProbabilitySchedule, Schedule
from polopt.policies.networks.network import Network
from polopt.policies.networks.q_network import make_q_network
from polopt.policies.policy import Policy

#: The largest epsilon of an environment, and the range of the exponent (Horgan et al., 2018).
_APEX_EPSILON, _APEX_ALPHA = 0.4, 7.0


class EpsilonGreedyConfig(NormalizingConfig):
    """Options of policies with Q-values, in addition to the options of `NormalizingConfig`.

    Attributes:
        epsilon: the probability of a random action: a number, or a schedule `[[environment steps,
            value], ...]`.
        per_worker_epsilon: whether each environment of each worker has its own constant epsilon.
            The n environments of all workers are counted from 0. The epsilon of environment i is
            `0.4^(1 + 7 i / (n - 1))` (Horgan et al., 2018). In evaluation and without remote
            workers, this option has no effect, and `epsilon` is used.
    """

    epsilon: ProbabilitySchedule = pydantic.Field(default=[(0, 1.0), (10_000, 0.05)])
    per_worker_epsilon: bool = False


class EpsilonGreedyPolicy(Policy):
    """Chooses a random action with probability epsilon, and otherwise the action with the highest
    Q-value. The action space is Discrete. With an action mask, the policy chooses only from the
    allowed actions."""

    config: Any  # see Policy
    numbers = declare("""
        epsilon (share): epsilon at the last update, the share of random actions. NaN if each
            environment has its own epsilon
    """)

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        stats = super().apply_flat(lr_scale)
        own = self.config.per_worker_epsilon
        return stats if own else {**stats, "epsilon": Schedule(self.config.epsilon)(self.env_steps)}

    def make_distribution(self) -> ActionDistribution:
        space = self.action_space
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"action space {space} is not supported by policy {type(self).__name__}. Allowed: "
                "Discrete, because the policy computes a value for each action. Policies for other "
                "spaces: 'sac' and 'td3' (bounded Box of floats), 'ppo' (Box of floats, "
                "MultiDiscrete)"
            )
        return EpsilonGreedy(space, self.epsilons)

    def epsilons(self, envs: int) -> float | np.ndarray:
        """The current epsilon of the environments of this worker: `[N]`, or one number that holds
        for all environments.

        Args:
            envs: N, number of environments of this worker.
        """
        if self.config.per_worker_epsilon and self.worker_index:
            first, all_envs = (self.worker_index - 1) * envs, self.num_workers * envs
            place = np.arange(first, first + envs) / max(all_envs - 1, 1)
            return _APEX_EPSILON ** (1.0 + _APEX_ALPHA * place)
        return Schedule(self.config.epsilon)(self.env_steps)

    def make_q_network(self, dueling: bool) -> Network:
        """Makes a Q-network for `encoder`, `mask`, `dist` and `config.model`. See `QNetwork`."""
        spaces: tuple[Any, Any] = (self.encoder.space, self.action_space)
        num_actions = self.dist.num_params
        return make_q_network(*spaces, self.mask, num_actions, dueling, self.config.model)
