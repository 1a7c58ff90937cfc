"""Proximal policy optimisation (Schulman et al., 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
import torch
from torch import Tensor

from polopt.common.config import Automatic
from polopt.common.sample_batch import SampleBatch
from polopt.policies.actor_critic import ActorCriticConfig, ActorCriticPolicy

#: Upper bound of the adapted KL coefficient. Without this bound, the coefficient would grow as long
#: as the KL is too large.
MAX_KL_COEFF = 1e6
#: Infinity means no bound, so infinity becomes None.
_Bound = Annotated[
    float | None, pydantic.BeforeValidator(lambda bound: None if bound == math.inf else bound)
]


class PPOConfig(ActorCriticConfig):
    """Options of `PPOPolicy`, in addition to the options of `ActorCriticConfig`.

    With `async_gradients` and `sync_gradients`, `kl_target` and `kl_stop` have no effect. The
    weight of the KL penalty stays `kl_coeff`, and the policy learns for all epochs.

    Attributes:
        clip_param: the ratio of new to old probability is clipped to the range from
            `1 - clip_param` to `1 + clip_param`.
        vf_loss_coeff: the weight of the value loss. The value loss is the mean squared error, as in
            RLlib's PPO and in Stable-Baselines3.
        vf_clip_param: the largest squared error in the value loss. A value with a larger squared
            error gets no gradient. `None` means that errors are not bounded. (RLlib's default is
            10.)
        vf_clip_range: the largest change of a value since sampling. The value loss takes the larger
            of the squared errors with and without clipping of the change. (With `clip_range_vf`,
            Stable-Baselines3 takes only the error with clipping.) `None` means that changes are not
            clipped. In APPO, this option has no effect, because APPO computes the values again
            right before each update.
        kl_coeff: the initial weight of the KL penalty. 0 disables the penalty.
        kl_target: the target of the mean KL between the old and the new policy. After each batch
            with more than one update, the policy adapts the weight of the KL penalty. If the KL is
            more than twice the target, the weight is multiplied by 1.5. If the KL is less than half
            the target, the weight is halved.
        kl_stop: the largest mean KL of an epoch. After an epoch with a larger mean KL, the policy
            stops learning from the batch. `None` means that the policy always learns for all
            epochs.
    """

    lambda_: float = pydantic.Field(default=0.95, ge=0.0, le=1.0, alias="lambda")
    grad_clip: float | None = pydantic.Field(default=0.5, gt=0.0)
    num_sgd_iter: int = pydantic.Field(default=10, ge=1, le=10**6)
    sgd_minibatch_size: Automatic = pydantic.Field(default=128, ge=0)
    standardize_advantages: bool = True
    clip_param: float = pydantic.Field(default=0.2, gt=0.0, le=1e6)
    vf_loss_coeff: float = pydantic.Field(default=0.25, ge=0.0, le=1e6)
    vf_clip_param: _Bound = pydantic.Field(default=None, gt=0.0, le=1e18)
    vf_clip_range: float | None = pydantic.Field(default=None, gt=0.0, le=1e18)
    kl_coeff: float = pydantic.Field(default=0.0, ge=0.0, le=MAX_KL_COEFF)
    kl_target: float = pydantic.Field(default=0.01, gt=0.0)
    kl_stop: float | None = pydantic.Field(default=None, gt=0.0)


class PPOPolicy(ActorCriticPolicy):
    """Learns with the clipped surrogate objective. Clipping of values, a KL penalty, and an early
    stop by KL are optional."""

    config_class = PPOConfig
    config: PPOConfig
    loss_columns: ClassVar[tuple[str, ...]] = (
        "actions",
        "advantages",
        "value_targets",
        "values",
        "action_logp",
        "action_dist_inputs",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coefficients["kl_coeff"] = self.config.kl_coeff

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds the columns of `ActorCriticPolicy.postprocess`, and `action_logp` `[T, N]`, the
        log-probabilities of the actions under the weights that chose them."""
        batch["action_logp"] = self.log_prob(batch, batch["action_dist_inputs"])
        return super().postprocess(batch)

    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config, advantages = self.config, rows["advantages"]
        params, values = self.outputs(rows)
        ratio = (self.dist.log_prob(params, rows["actions"]) - rows["action_logp"]).exp()
        clipped = ratio.clamp(1.0 - config.clip_param, 1.0 + config.clip_param)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        vf_loss = self.vf_loss(values, rows)
        entropy = self.dist.entropy(params).mean()
        kl = self.dist.kl(rows["action_dist_inputs"], params).mean()
        loss = policy_loss + self.vf_loss_coeff * vf_loss - self.entropy_coeff * entropy
        kl_coeff = self.coefficients["kl_coeff"]
        if kl_coeff > 0.0:
            loss = loss + kl_coeff * kl
        stats = {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
        clip_fraction = (clipped != ratio).float().mean()
        return loss, stats | {"mean_kl_loss": kl, "clip_fraction": clip_fraction}

    def vf_loss(self, values: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Computes the value loss `[]` of values `[B]`. The loss is the mean of the squared errors,
        with the bounds `vf_clip_param` and `vf_clip_range`."""
        errors = (values - rows["value_targets"]).square()
        most, limit = self.config.vf_clip_param, self.config.vf_clip_range
        if limit is not None:
            # The loss takes the larger of the errors with and without clipping. Where the clipped
            # error is larger and the value is clipped, the gradient is 0. So clipping only makes
            # updates of values smaller.
            near = rows["values"] + (values - rows["values"]).clamp(-limit, limit)
            errors = torch.maximum(errors, (near - rows["value_targets"]).square())
        return (errors if most is None else errors.clamp(max=most)).mean()

    def on_epoch(self, stats: Mapping[str, float]) -> bool:
        """Returns True, which stops learning from this batch, if the mean KL of the epoch exceeds
        `kl_stop`."""
        limit = self.config.kl_stop
        return limit is not None and stats.get("mean_kl_loss", math.nan) > limit

    def on_learned(self, stats: Mapping[str, float]) -> None:
        """Adapts the KL coefficient to `kl_target` (section 4 of the paper). The thresholds and
        factors are RLlib's."""
        kl, target = stats.get("mean_kl_loss", math.nan), self.config.kl_target
        if kl > 2.0 * target:
            self.coefficients["kl_coeff"] = min(1.5 * self.coefficients["kl_coeff"], MAX_KL_COEFF)
        elif kl < 0.5 * target:
            self.coefficients["kl_coeff"] *= 0.5
