"""`ActorCriticPolicy`: the family of policies with a policy head, a value head and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.fragment_policy import FragmentConfig, FragmentPolicy
from polopt.policies.learning.reducer import LocalReducer, Reducer
from polopt.policies.learning.schedules import Schedule, ScheduleValue


class ActorCriticConfig(FragmentConfig):
    """Options of actor-critic policies, in addition to the options of `FragmentConfig`. `lambda` is
    the lambda of GAE.

    Attributes:
        vf_loss_coeff: weight of the value loss, which is half the mean squared error, as in RLlib's
            A3C, IMPALA and APPO.
        entropy_coeff: weight of the entropy bonus. A number or a schedule like `lr`.
        standardize_advantages: scale advantages to mean 0 and standard deviation 1 over the whole
            batch.
    """

    vf_loss_coeff: float = pydantic.Field(default=0.5, ge=0.0, le=1e6)
    entropy_coeff: ScheduleValue = 0.01
    standardize_advantages: bool = False

    aliases: ClassVar[Mapping[str, str]] = {
        **FragmentConfig.aliases,
        "entropy_coeff_schedule": "entropy_coeff",
    }


class ActorCriticPolicy(FragmentPolicy):
    """Learns from fragments by minibatch SGD on advantages and value targets.

    A subclass provides `loss`, and optionally the methods that `FragmentPolicy` lists. The second
    output of its network is the values.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig
    config: Any  # see Policy
    loss_columns: ClassVar[tuple[str, ...]] = ("actions", "advantages", "value_targets")

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` float32 of encoded observations `[N, ...]`, of a policy without memory. See
        `state_values`. A policy that normalises rewards returns values of normalised rewards."""
        return self.backend.value(self._normalized_obs(obs))

    # ---- preparing samples ----------------------------------------------------------------------

    @np.errstate(all="ignore")
    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, `advantages` and `value_targets`, computed with the current weights.
        The same weights must have chosen the actions."""
        used = self.normalized(batch)
        values, following = self.state_values(used)
        gae.add_advantages(used, values, following, self.config.gamma, self.config.lambda_)
        for name in ("values", "advantages", "value_targets"):
            batch[name] = used[name]
        return batch

    def state_values(self, batch: SampleBatch) -> tuple[np.ndarray, np.ndarray]:
        """The values `[T, N]` of a batch's observations, and the values `[T, N]` of their true next
        observations. The latter are 0 after `terminated`."""
        batch = self.normalized(batch)
        if not self.state_size:
            return gae.state_values(batch, self.backend.value)
        starts = gae.episode_starts(batch)
        _, values, states = self.backend.unroll(batch.all_obs, batch.per_env["state"], starts)
        successors = np.zeros(0, np.float32)
        if len(batch.successor_index):
            rows = zip(*np.divmod(batch.successor_index, batch.shape[1]), strict=True)
            after = np.stack([states[int(t)][n] for t, n in rows])
            successors = self.backend.unroll(batch.successor_obs[None], after)[1][0]
        return values[:-1], gae.next_values(batch, values, successors)

    # ---- learning -------------------------------------------------------------------------------

    def training_rows(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, np.ndarray]:
        """See `FragmentPolicy`. If the config says so, advantages are standardised over the rows of
        all learners."""
        rows = super().training_rows(batch, reducer)
        if self.config.standardize_advantages:
            rows["advantages"] = gae.standardized(rows["advantages"], reducer or LocalReducer())
        return rows

    @property
    def entropy_coeff(self) -> float:
        """The current entropy coefficient."""
        return Schedule(self.config.entropy_coeff)(self.env_steps)
