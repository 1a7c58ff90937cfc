"""V-trace (Espeholt et al., 2018): value targets and advantages from samples of another policy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pydantic

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.actor_critic import ActorCriticConfig


class VTraceConfig(ActorCriticConfig):
    """Options of policies with V-trace. `lambda` is the lambda of V-trace.

    Attributes:
        vtrace_clip_rho_threshold: upper bound of the importance ratio in temporal differences (rho
            bar in the paper). It decides whose values are learned. With 1, they are the values of a
            policy between the policy that acted and the current policy. With an infinitely large
            bound, they are the values of the current policy.
        vtrace_clip_pg_rho_threshold: upper bound of the ratio by which advantages are multiplied.
    """

    vtrace_clip_rho_threshold: float = pydantic.Field(default=1.0, gt=0.0, le=1e6)
    vtrace_clip_pg_rho_threshold: float = pydantic.Field(default=1.0, gt=0.0, le=1e6)


def vtrace(
    batch: SampleBatch,
    log_ratios: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    config: VTraceConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Value targets and advantages, `[T, N]` float32 each.

    With ratios `pi / mu`, `rho = min(rho_bar, ratio)` and `c = lambda min(1, ratio)`, the targets
    are `v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})` with `delta_t = r_t + gamma
    V_{t+1} - V_t`, and the advantages `min(pg_rho_bar, ratio_t) (r_t + gamma v_{t+1} - V_t)`. Where
    the next row does not continue the episode, `v_{t+1}` is the value of the true next observation,
    and 0 after `terminated`.

    Args:
        batch: `[T, N]`.
        log_ratios: `[T, N]` `log(pi / mu)`, where pi and mu are the probabilities of the actions
            under the policy that learns and under the policy that acted.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `gae.next_values`.
        config: discount factor, lambda and bounds.

    Returns:
        targets, which equal the values in rows that are not valid, and advantages, which are 0
        there.
    """
    valid, gamma = batch["valid"], np.float32(config.gamma)
    continues = gae.continuing(batch)
    # 0 * NaN would propagate from rows without a transition to those before.
    log_ratios = np.where(valid, log_ratios, np.float32(0.0))
    rho = _bounded(log_ratios, config.vtrace_clip_rho_threshold)
    errors = rho * (batch["rewards"] + gamma * following - values)
    errors = errors.astype(np.float32, copy=False)
    errors[~valid] = 0.0
    decay = _bounded(log_ratios, 1.0) * (gamma * np.float32(config.lambda_))
    decay[~continues] = 0.0
    running = np.zeros_like(values[0])
    for error, factor in zip(errors[::-1], decay[::-1], strict=True):
        running = np.add(error, factor * running, out=error)  # in place: v - V
    errors[~valid] = 0.0
    next_targets = following.astype(np.float32)
    next_targets[:-1] += continues[:-1] * errors[1:]
    advantages = batch["rewards"] + gamma * next_targets - values
    advantages *= _bounded(log_ratios, config.vtrace_clip_pg_rho_threshold)
    advantages = advantages.astype(np.float32, copy=False)
    advantages[~valid] = 0.0
    return values + errors, advantages


# Overflow makes the gradient non-finite. The weight updater does not apply such gradients.
@np.errstate(all="ignore")
def with_vtrace(
    batch: SampleBatch,
    log_ratios: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    config: VTraceConfig,
) -> SampleBatch:
    """The batch with `values`, `value_targets` and `advantages` of `vtrace`.

    Args:
        batch: `[T, N]`. Not changed.
        log_ratios: see `vtrace`.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `gae.next_values`.
        config: see `vtrace`.
    """
    targets, advantages = vtrace(batch, log_ratios, values, following, config)
    added = {"values": values, "value_targets": targets, "advantages": advantages}
    return dataclasses.replace(batch, columns={**batch.columns, **added})


def _bounded(log_ratios: np.ndarray, bound: float) -> np.ndarray:
    """`min(bound, ratio)`, without overflow of the ratio."""
    return np.exp(np.minimum(log_ratios, np.float32(math.log(bound))))
