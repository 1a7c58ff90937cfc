"""Decoupled PPO (Hilton et al., 2022): PPO for samples of a policy that is many updates old."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer
from polopt.policies.ppo import PPOPolicy

#: Upper bound of the importance weights, against overflow. That of the paper's program.
_MAX_WEIGHT = 100.0


class DecoupledPPOPolicy(PPOPolicy):
    """PPO with a proximal policy beside the policy that acted, for samples that are updates old.

    Two policies take the place of the old one. The ratio that is clipped, and the KL divergence,
    are relative to the proximal policy: that of the learner when it begins with a batch. So the
    size of an update does not depend on the age of the samples. Advantages are multiplied by the
    importance weight, the probability of the action under the proximal policy divided by that under
    the policy that chose it. Without lag both are the same, and so is the loss that of `PPOPolicy`.
    """

    loss_columns = (*PPOPolicy.loss_columns, "importance_weights")

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Adds `importance_weights` `[T, N]`. `action_dist_inputs` and `action_logp` become those
        of the proximal policy. Values and advantages stay those of the policy that acted."""
        batch = self.normalized(batch)
        params = self.dist_inputs(batch)
        proximal = self.log_prob(batch, params)
        log_weights = np.minimum(proximal - batch["action_logp"], math.log(_MAX_WEIGHT))
        added = {
            "action_dist_inputs": params,
            "action_logp": proximal,
            "importance_weights": np.exp(log_weights),
        }
        return dataclasses.replace(batch, columns={**batch.columns, **added})

    def training_rows(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, np.ndarray]:
        rows = super().training_rows(batch, reducer)
        rows["advantages"] = rows["advantages"] * rows.pop("importance_weights")
        return rows
