"""APPO: PPO's clipped surrogate with V-trace and a target network (IMPACT, Luo et al., 2020)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
from torch import Tensor

from polopt.common.config import Automatic
from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.ppo import PPOConfig, PPOPolicy
from polopt.policies.vtrace import VTraceConfig, VTracePolicy, with_vtrace

#: Upper bound of the ratio `mu / target`. The numerator is the probability of an action under the
#: policy that acted. The denominator is its probability under the target policy. The paper calls
#: this bound rho, and RLlib calls it `target_worker_clipping`.
_MAX_BEHAVIOUR_RATIO = 2.0


class AppoConfig(VTraceConfig, PPOConfig):
    """Options of `AppoPolicy`, in addition to the options of `PPOConfig` and `VTraceConfig`. Most
    defaults that this class sets are the defaults of RLlib's APPO.

    The value loss is half the mean squared error, as in RLlib's APPO. (In `PPOPolicy`, the value
    loss is the whole mean squared error.)

    Attributes:
        target_network_update_freq: the network is copied to the target network once in this number
            of updates of the weights. (RLlib counts trained environment steps.) If the policy
            learns several epochs from each batch, set this option to the number of updates per
            batch. The target policy then stays the same while the policy learns from one batch, as
            in PPO. With a smaller number, the trust region moves during a batch.
    """

    lr: LearningRate = 5e-4
    lambda_: float = pydantic.Field(default=1.0, ge=0.0, le=1.0, alias="lambda")
    grad_clip: float | None = pydantic.Field(default=40.0, gt=0.0)
    num_sgd_iter: int = pydantic.Field(default=1, ge=1, le=10**6)
    sgd_minibatch_size: Automatic = pydantic.Field(default=None, ge=0)
    standardize_advantages: bool = False
    vf_loss_coeff: float = pydantic.Field(default=0.5, ge=0.0, le=1e6)
    clip_param: float = pydantic.Field(default=0.4, gt=0.0, le=1e6)
    target_network_update_freq: int = pydantic.Field(default=2, ge=1, le=10**9)


class AppoPolicy(VTracePolicy, PPOPolicy):
    """PPO with V-trace and a target network, for samples that are some updates old.

    Every few updates, the policy copies its network to the target network. The main
    differences from `PPOPolicy` are:

    - The clipped ratio divides by the probability under the target policy. `prepare_batch`
      describes the lower bound of this divisor.
    - V-trace computes the advantages and value targets. Its importance ratios are the probability
      under the target policy, divided by the probability under the policy that acted.
    - The KL divergence is measured from the target policy.

    The values come from the network, not from the target network. The ratios, advantages, value
    targets and values are computed for each minibatch, right before its gradient. A minibatch
    consists of all steps of some environments.
    """

    config_class = AppoConfig
    config: AppoConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        target: Any = self.segments["target"].module
        self._target = self.make_backend(target)

    def make_segments(self) -> dict[str, Segment]:
        network = self.masked(self.make_network())
        target = Segment(copy.deepcopy(network), copy_of="network")
        return {"network": Segment(network), "target": target}

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, and `value_targets` and `advantages` from `vtrace`.

        The new `action_dist_inputs` are the parameters of the target policy. The new `action_logp`
        is `log(max(target, mu / 2))`. Here `target` and `mu` are the probabilities of the action
        under the target policy and under the policy that acted. So the ratio in the loss is
        `pi / max(target, mu / 2)`, where `pi` is the probability under the policy that learns. The
        paper writes this ratio as `min(mu / target, rho) pi / mu`.
        """
        batch = self.normalized(batch)
        params = self.dist_inputs(batch, self._target)
        target, acted = self.log_prob(batch, params), batch["action_logp"]
        prepared = with_vtrace(batch, target - acted, *self.state_values(batch), self.config)
        prepared["action_dist_inputs"] = params
        prepared["action_logp"] = np.maximum(target, acted - math.log(_MAX_BEHAVIOUR_RATIO))
        return prepared

    def vf_loss(self, values: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * super().vf_loss(values, rows)

    def on_update(self) -> None:
        """Copies the network to the target network once in every `target_network_update_freq`
        updates."""
        if self.version % self.config.target_network_update_freq == 0:
            self.flat.refresh_copies()
