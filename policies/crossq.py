"""CrossQ (Bhatt et al., 2024): SAC with batch normalisation and without target networks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.networks.batch_renorm import add_batch_renorm
from polopt.policies.replay_policy import bootstrapped, critics_loss
from polopt.policies.sac import SACConfig, SACPolicy


class CrossQConfig(SACConfig):
    """Options of `CrossQPolicy`, in addition to the options of `SACConfig`.

    `tau` and `target_network_update_freq` have no effect, because CrossQ does not have target
    networks.

    Attributes:
        lr: the learning rate of the actor, the critics and the temperature.
        policy_delay: the number of updates of the critics for each update of the actor and the
            temperature.
    """

    lr: LearningRate = 1e-3
    adam_beta1: float = pydantic.Field(default=0.5, ge=0.0, lt=1.0)
    policy_delay: int = pydantic.Field(default=3, ge=1, le=10**9)


class CrossQPolicy(SACPolicy):
    """Soft actor-critic with batch normalisation in the actor and the critics, and without target
    networks. The losses are the losses of `SACPolicy`, with the critics themselves in place of the
    target critics.

    The critics compute the values of both observations of each row in one batch, so batch
    normalisation sees stored actions and new actions together. (Batch renormalisation replaces
    batch normalisation after 100,000 batches. See `BatchRenorm`.) The actor and the temperature
    learn in every `policy_delay`-th update. The paper has critics of width 2,048. The default here
    is 256, as in `SACPolicy`.

    Raises:
        ConfigError: for the action spaces that `SACPolicy` does not support, and for networks that
            are not multi-layer perceptrons, or have layer normalisation.
    """

    config_class = CrossQConfig
    config: CrossQConfig

    def make_networks(self) -> tuple[nn.Module, Any]:
        actor, critics = super().make_networks()
        for network in (actor, *critics.networks):
            add_batch_renorm(network)
        return actor, critics

    def make_segments(self) -> dict[str, Segment]:
        segments = super().make_segments()
        del segments["target_critics"]
        return segments

    @property
    def resting(self) -> Collection[str]:
        """The names of the segments that the next update does not change: actor and temperature,
        except in every `policy_delay`-th update."""
        learns = (self.version + 1) % self.config.policy_delay == 0
        return () if learns else ("network", "temperature")

    def critic_loss(self, rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes the loss `[]` of the K critics, their TD errors `[K, B]`, and statistics
        `[]`."""
        # The next observation of a row with a discount of 0 is meaningless. It must not change the
        # statistics of the batch.
        goes_on = (rows.discounts > 0.0).reshape(-1, *[1] * (rows.obs.dim() - 1))
        next_obs = torch.where(goes_on, rows.next_obs, rows.obs)
        with torch.no_grad():
            actions, log_prob = self.sampled(next_obs)
        both = self.critics(
            torch.cat([rows.obs, next_obs]), torch.cat([torch.tanh(rows.actions), actions])
        )
        values, following = both.chunk(2, dim=1)
        with torch.no_grad():
            soft = following.amin(0) - self.log_alpha.exp() * log_prob
            targets = bootstrapped(rows, soft)
        return critics_loss(rows, values, targets)

    def add_gradient(self, rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        with self.training("critics"):
            critic_loss, errors, stats = self.critic_loss(rows)
            critic_loss.backward()
        stats["total_loss"] = critic_loss
        if not self.resting:
            with self.training("network"):
                stats |= self.add_actor_gradient(rows)
            stats["total_loss"] = critic_loss + stats["policy_loss"]
        stats["alpha_value"] = self.log_alpha[0].exp()
        return stats, errors.detach().abs().mean(0)
