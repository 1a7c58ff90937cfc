"""Advantage actor-critic (Mnih et al., 2016): the loss of A2C and A3C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polopt.policies.actor_critic import ActorCriticConfig, ActorCriticPolicy


class A2CConfig(ActorCriticConfig):
    """Options of `A2CPolicy`. These are the options of `ActorCriticConfig`."""


class A2CPolicy(ActorCriticPolicy):
    """Learns with the loss `-log pi(a|s) A + vf_loss_coeff (V(s) - target)^2 / 2 - entropy_coeff
    H(pi)`.

    The loss is the mean over valid rows. The paper and RLlib 0.8 use the sum, so the size of their
    gradients depends on the batch size.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = A2CConfig

    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        params, values = self.outputs(rows)
        log_prob = self.dist.log_prob(params, rows["actions"])
        policy_loss = -(log_prob * rows["advantages"]).mean()
        vf_loss = 0.5 * (values - rows["value_targets"]).square().mean()
        entropy = self.dist.entropy(params).mean()
        loss = policy_loss + self.vf_loss_coeff * vf_loss - self.entropy_coeff * entropy
        return loss, {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
