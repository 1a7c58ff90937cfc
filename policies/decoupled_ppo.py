"""Decoupled PPO (Hilton et al., 2022): PPO for samples of a policy that is many updates old."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer
from polopt.policies.ppo import PPOPolicy

#: Upper bound of the importance weights, against overflow. The paper's program has the same bound.
_MAX_WEIGHT = 100.0


class DecoupledPPOPolicy(PPOPolicy):
    """PPO with a proximal policy beside the policy that acted, for samples that are updates old.

    PPO's old policy has two roles. It limits the update, and it chose the actions. Here each role
    has a policy of its own. The proximal policy limits the update: it is the learner's policy when
    it begins with a batch, and the clipped ratio and the KL divergence are relative to it. So the
    size of an update does not depend on the age of the samples. For the policy that acted, each
    advantage is multiplied by an importance weight: the probability of the action under the
    proximal policy, divided by its probability under the policy that acted. Without lag the two
    policies are the same, and the loss equals the loss of `PPOPolicy`.
    """

    loss_columns = (*PPOPolicy.loss_columns, "importance_weights")

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Adds `importance_weights` `[T, N]`. Computes `action_dist_inputs` and `action_logp` anew
        with the proximal policy. Keeps the values and advantages, which the sampler computed."""
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
