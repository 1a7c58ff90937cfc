"""Decoupled PPO (Hilton et al., 2022): PPO for samples that are many updates old."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer
from polopt.policies.ppo import PPOPolicy

#: Upper bound of the importance weights. It prevents overflow. The code of the paper's authors has
#: the same bound.
_MAX_WEIGHT = 100.0


class DecoupledPPOPolicy(PPOPolicy):
    """PPO with a separate proximal policy, for samples that are many updates old.

    In PPO, the old policy has two roles. It chose the actions, and it limits the size of an update.
    Decoupled PPO uses a different policy for each role:

    - The proximal policy limits the size of an update. This is the policy that the learner has when
      it begins to learn from a batch. The clipped ratio and the KL divergence are relative to the
      proximal policy, so the size of an update does not depend on the age of the samples.
    - The policy that acted chose the actions. Each advantage is multiplied by an importance weight,
      which corrects for the difference between the two policies. The weight is the probability of
      the action under the proximal policy, divided by its probability under the policy that acted.

    Without policy lag, both policies are the same, and the loss equals the loss of `PPOPolicy`.
    """

    loss_columns = (*PPOPolicy.loss_columns, "importance_weights")

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Adds `importance_weights` `[T, N]`. Recomputes `action_dist_inputs` and `action_logp`
        with the proximal policy. The worker has computed values and advantages, and this method
        keeps them."""
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
