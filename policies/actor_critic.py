"""`ActorCriticPolicy`: base class of policies with a policy head and a value head."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pydantic

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.fragment_policy import FragmentConfig, FragmentPolicy
from polopt.policies.learning.reducer import LocalReducer, Reducer
from polopt.policies.learning.schedules import Schedule, ScheduleValue


class ActorCriticConfig(FragmentConfig):
    """Options of `ActorCriticPolicy`, in addition to the options of `FragmentConfig`. `lambda` is
    the lambda of GAE.

    Attributes:
        vf_loss_coeff: the weight of the value loss, which is half the mean squared error. (In
            RLlib, the value losses of A3C, IMPALA and APPO also have the factor 1/2.)
        entropy_coeff: the weight of the entropy bonus: a number, or a schedule like `lr`.
        standardize_advantages: whether to shift and scale advantages to mean 0 and standard
            deviation 1 over the whole batch. IMPALA and APPO do this for each minibatch instead.
        use_critic: whether advantages use the values of the network. If False, an advantage is the
            discounted return up to the end of the episode or of the fragment, without a baseline
            and without a bootstrap value. `lambda` and `vf_loss_coeff` then have no effect, because
            the values are not learned. A2C with False is REINFORCE (Williams, 1992).
    """

    vf_loss_coeff: float = pydantic.Field(default=0.5, ge=0.0, le=1e6)
    entropy_coeff: ScheduleValue = 0.01
    standardize_advantages: bool = False
    use_critic: bool = True


class ActorCriticPolicy(FragmentPolicy):
    """Learns from fragments by minibatch SGD on advantages and value targets.

    A subclass must define `loss`, and may define the methods that `FragmentPolicy` lists. The
    second output of the network is the values.
    """

    config_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig
    config: Any  # see Policy
    loss_columns: ClassVar[tuple[str, ...]] = ("actions", "advantages", "value_targets")

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` float32 of encoded observations `[N, ...]`, for a policy without memory.

        If the policy normalises rewards, the values refer to normalised rewards. For a policy with
        memory, call `state_values`.
        """
        return self.backend.value(self._normalized_obs(obs))

    # ---- preparing samples ----------------------------------------------------------------------

    @np.errstate(all="ignore")
    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `values`, `advantages` and `value_targets`, computed with the current weights. These
        weights must be the weights that chose the actions."""
        used = self.normalized(batch)
        if self.config.use_critic:
            values, following = self.state_values(used)
            gae.add_advantages(used, values, following, self.config.gamma, self.config.lambda_)
        else:
            no_values = np.zeros(used.shape, dtype=np.float32)
            gae.add_advantages(used, no_values, no_values, self.config.gamma, 1.0)
            used["value_targets"] = no_values
        for name in ("values", "advantages", "value_targets"):
            batch[name] = used[name]
        return batch

    def state_values(self, batch: SampleBatch) -> tuple[np.ndarray, np.ndarray]:
        """Values `[T, N]` of the observations of a batch, and values `[T, N]` of the true next
        observations. See `gae.next_values`."""
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
        """See `FragmentPolicy`. If the option `standardize_advantages` is True, this method also
        standardises the advantages over the rows of all learners."""
        rows = super().training_rows(batch, reducer)
        if self.config.standardize_advantages:
            rows["advantages"] = gae.standardized(rows["advantages"], reducer or LocalReducer())
        return rows

    @property
    def vf_loss_coeff(self) -> float:
        """The weight of the value loss: the option of this name, or 0 without a critic."""
        coeff: float = self.config.vf_loss_coeff
        return coeff if self.config.use_critic else 0.0

    @property
    def entropy_coeff(self) -> float:
        """The current entropy coefficient."""
        return Schedule(self.config.entropy_coeff)(self.env_steps)
