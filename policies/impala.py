"""IMPALA (Espeholt et al., 2018): actor-critic with V-trace."""

from __future__ import annotations

from typing import Literal

from polopt.common.sample_batch import SampleBatch
from polopt.policies.a2c import A2CPolicy
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.vtrace import VTraceConfig, VTracePolicy, with_vtrace


class ImpalaConfig(VTraceConfig):
    """Options of `ImpalaPolicy`. These are the options of `VTraceConfig`.

    The default `torch_optimizer` is RMSprop, as in the paper. The learning rate of the paper does
    not fit here, because the loss in the paper is a sum over rows, and the loss of `ImpalaPolicy`
    is a mean.
    """

    lr: LearningRate = 6e-4
    torch_optimizer: Literal["adam", "rmsprop"] = "rmsprop"


class ImpalaPolicy(VTracePolicy, A2CPolicy):
    """Actor-critic with V-trace, for samples that are some updates old.

    The loss is the loss of `A2CPolicy`. Value targets and advantages are computed by V-trace with
    the current weights, for each minibatch, right before its gradient. A minibatch consists of all
    steps of some environments.
    """

    config_class = ImpalaConfig
    config: ImpalaConfig

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, and `value_targets` and `advantages` from `vtrace`."""
        batch = self.normalized(batch)
        log_ratios = self.log_prob(batch, self.dist_inputs(batch)) - batch["action_logp"]
        return with_vtrace(batch, log_ratios, *self.state_values(batch), self.config)
