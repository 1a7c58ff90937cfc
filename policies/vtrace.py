"""V-trace (Espeholt et al., 2018): off-policy value targets and advantages."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import pydantic

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.actor_critic import ActorCriticConfig, ActorCriticPolicy


class VTraceConfig(ActorCriticConfig):
    """Options of policies with V-trace, in addition to the options of `ActorCriticConfig`. `lambda`
    is the lambda of V-trace.

    Attributes:
        vtrace_clip_rho_threshold: the upper bound of the importance ratio in temporal differences
            (rho bar in the paper). The bound determines the policy whose values are learned. With
            1, this is a policy between the policy that acted and the current policy. With a very
            large bound, it is the current policy.
        vtrace_clip_pg_rho_threshold: the upper bound of the importance ratio that multiplies
            advantages.
        use_critic: True, because V-trace needs the values.
    """

    use_critic: Literal[True] = True
    vtrace_clip_rho_threshold: float = pydantic.Field(default=1.0, gt=0.0, le=1e6)
    vtrace_clip_pg_rho_threshold: float = pydantic.Field(default=1.0, gt=0.0, le=1e6)


class VTracePolicy(ActorCriticPolicy):
    """Base class of policies with V-trace, for samples that are some updates old. A subclass adds
    the columns of `with_vtrace` in `prepare_batch`. A minibatch consists of all steps of some
    environments, and is prepared right before its gradient."""

    whole_columns = True

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds `action_logp` `[T, N]`, the log-probabilities of the actions under the weights that
        chose them."""
        batch["action_logp"] = self.log_prob(batch, batch["action_dist_inputs"])
        return batch


def vtrace(
    batch: SampleBatch,
    log_ratios: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    config: VTraceConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes value targets and advantages, `[T, N]` float32 each.

        ratio = pi / mu
        rho = min(rho_bar, ratio)
        c = lambda min(1, ratio)
        delta_t = r_t + gamma V_{t+1} - V_t
        targets: v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})
        advantages: min(pg_rho_bar, ratio_t) (r_t + gamma v_{t+1} - V_t)

    Here pi is the probability of an action under the policy that learns, and mu is its probability
    under the policy that acted. `rho_bar` and `pg_rho_bar` are the two bounds of `VTraceConfig`.
    `V_{t+1}` is in `following`. If the next row does not continue the episode, and in the last row
    of the fragment, `v_{t+1}` equals `V_{t+1}`.

    Args:
        batch: `[T, N]`.
        log_ratios: `[T, N]` `log(pi / mu)`.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `gae.next_values`.
        config: discount factor, lambda and bounds.

    Returns:
        targets and advantages. In an invalid row, the target equals the value, and the advantage is
        0.
    """
    valid, gamma = batch["valid"], np.float32(config.gamma)
    continues = gae.continuing(batch)
    # A NaN in a row without a transition would reach earlier rows, because 0 * NaN is NaN.
    log_ratios = np.where(valid, log_ratios, np.float32(0.0))
    rho = _bounded(log_ratios, config.vtrace_clip_rho_threshold)
    errors = rho * (batch["rewards"] + gamma * following - values)
    errors = errors.astype(np.float32, copy=False)
    errors[~valid] = 0.0
    decay = _bounded(log_ratios, 1.0) * (gamma * np.float32(config.lambda_))
    decay[~continues] = 0.0
    running = np.zeros_like(values[0])
    for error, factor in zip(errors[::-1], decay[::-1], strict=True):
        running = np.add(error, factor * running, out=error)  # errors become v - V in place
    errors[~valid] = 0.0
    next_targets = following.astype(np.float32)
    next_targets[:-1] += continues[:-1] * errors[1:]
    advantages = batch["rewards"] + gamma * next_targets - values
    advantages *= _bounded(log_ratios, config.vtrace_clip_pg_rho_threshold)
    advantages = advantages.astype(np.float32, copy=False)
    advantages[~valid] = 0.0
    return values + errors, advantages


# An overflow here makes the gradient non-finite, and the weight updater skips such gradients.
@np.errstate(all="ignore")
def with_vtrace(
    batch: SampleBatch,
    log_ratios: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    config: VTraceConfig,
) -> SampleBatch:
    """Returns a batch with the columns `values`, `value_targets` and `advantages` of `vtrace`.

    Args:
        batch: `[T, N]`. The function does not change this batch.
        log_ratios: see `vtrace`.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `gae.next_values`.
        config: see `vtrace`.
    """
    targets, advantages = vtrace(batch, log_ratios, values, following, config)
    added = {"values": values, "value_targets": targets, "advantages": advantages}
    return dataclasses.replace(batch, columns={**batch.columns, **added})


def _bounded(log_ratios: np.ndarray, bound: float) -> np.ndarray:
    """Computes `min(bound, ratio)` from log ratios, without an overflow of the ratio."""
    return np.exp(np.minimum(log_ratios, np.float32(math.log(bound))))
