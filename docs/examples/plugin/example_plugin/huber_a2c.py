"""A2C with the Huber loss for values."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic
from torch import Tensor
from torch.nn.functional import huber_loss

import polopt


class HuberA2CConfig(polopt.ActorCriticConfig):
    """Options of `HuberA2C`.

    Attributes:
        huber_delta: error above which the loss of a value grows linearly.
    """

    huber_delta: float = pydantic.Field(default=1.0, gt=0.0)


class HuberA2C(polopt.ActorCriticPolicy):
    """A2C with the Huber loss for values, whose gradient for one value is at most `huber_delta`, so
    outliers among the returns have a limited effect."""

    config_class = HuberA2CConfig
    config: HuberA2CConfig

    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        params, values = self.model(rows["obs"])  # [B, P], [B]
        log_prob = self.dist.log_prob(params, rows["actions"])  # [B]
        policy_loss = -(log_prob * rows["advantages"]).mean()
        vf_loss = huber_loss(values, rows["value_targets"], delta=self.config.huber_delta)
        entropy = self.dist.entropy(params).mean()
        loss = policy_loss + self.vf_loss_coeff * vf_loss - self.entropy_coeff * entropy
        return loss, {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
