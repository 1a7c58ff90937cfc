"""`sac`: the closed form of the gradients of SAC's losses, in NumPy.

The matrix products take as long as in torch, but NumPy does not have the overhead of autograd. The
gradient of the actor needs only the smaller Q-value of each row. So for this gradient, each critic
does the backward pass only for the rows in which its Q-value is the smaller one. This is about half
of all rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, is_supported, why_not_threads
from polopt.policies.fast_cpu.numpy_mlp import Layers, acting_layers, value_layers
from polopt.policies.fast_cpu.numpy_q import value_stats_of

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class SACLayers(NamedTuple):
    """The layers of the networks of a `SACPolicy`. The layers share the memory of the torch
    modules."""

    actor: Layers
    critics: list[Layers]
    target_critics: list[Layers]


class _Sample(NamedTuple):
    """New actions of a policy, and intermediate results for their gradients."""

    done: list[np.ndarray]  # activations of the actor
    raw_log_std: np.ndarray  # [B, A] before the bounds
    deviation: np.ndarray  # [B, A] standard deviation times noise
    actions: np.ndarray  # [B, A] in [-1, 1]
    log_prob: np.ndarray  # [B]


def _layers(policy: Any) -> tuple[SACLayers] | str:
    """The layers of the networks of a `SACPolicy`, or why the policy learns in torch."""
    segments = policy.segments
    targets = segments.get("target_critics", segments["critics"])
    both: list[Any] = [part.module.networks for part in (segments["critics"], targets)]
    if not all(is_supported(network) for network in [policy.model, *both[0], *both[1]]):
        return UNSUPPORTED
    critics, target_critics = ([value_layers(network) for network in part] for part in both)
    return why_not_threads() or (SACLayers(acting_layers(policy.model), critics, target_critics),)


@closed_form_of(
    "polopt.policies.sac:SACPolicy",
    *("critic_loss", "targets", "add_actor_gradient", "actor_loss", "alpha_loss"),
    *("sampled", "params_in_torch", "normal", "drawn"),
    of_family=OF_REPLAY_POLICIES,
    networks=_layers,
)
def sac(policy: Any, layers: SACLayers, rows: Any) -> tuple[dict[str, float], np.ndarray]:
    """Adds the gradients of the losses of a `SACPolicy` to the `.grad` of its networks.

    Args:
        policy: has the options, the temperature, and the random generator of the noise.
        layers: the layers of the networks of the policy.
        rows: normalised `Transitions`.

    Returns:
        the statistics, and the absolute TD errors `[B]`, which are means over the critics.
    """
    count = len(rows.rewards)
    log_alpha = policy.log_alpha.detach().numpy()
    alpha = np.float32(np.exp(log_alpha[0]))
    obs, next_obs = (_flat(part) for part in (rows.obs, rows.next_obs))

    following = _sampled(policy, layers.actor, next_obs)
    inputs = np.concatenate([next_obs, following.actions], axis=1)
    best = np.minimum(*(critic(inputs)[:, 0] for critic in layers.target_critics))
    values = rows.discounts * (best - alpha * following.log_prob)
    if not np.isfinite(np.add.reduce(values)):
        # If the discount is 0, the next observation is meaningless, and its value may be NaN.
        values = np.where(rows.discounts > 0.0, values, np.float32(0.0))
    targets = rows.rewards + values

    inputs = np.concatenate([obs, np.tanh(rows.actions)], axis=1)
    errors, vf_loss = [], 0.0
    for critic in layers.critics:
        done = critic.forward(inputs)
        errors.append(done[-1][:, 0] - targets)
        weighted = rows.weights * errors[-1]
        vf_loss += 0.5 * float(np.dot(weighted, errors[-1])) / count
        critic.backward(done, (weighted / np.float32(count))[:, None], needed=False)

    sample = _sampled(policy, layers.actor, obs)
    worst, by_actions = _worst_values(layers.critics, obs, sample.actions)
    # `by_raw` is the gradient of the actor's loss with respect to the actions before tanh. It is
    # also the gradient with respect to the means. `by_log_std` is the gradient with respect to the
    # log standard deviations.
    each = np.float32(alpha / count)
    by_raw = 2.0 * each * sample.actions
    by_raw -= by_actions / np.float32(count) * (1.0 - sample.actions * sample.actions)
    by_log_std = by_raw * sample.deviation - each
    low, high = policy.log_std_bounds
    by_log_std *= (sample.raw_log_std >= low) & (sample.raw_log_std <= high)
    layers.actor.backward(sample.done, np.concatenate([by_raw, by_log_std], axis=1), needed=False)

    log_prob = float(np.add.reduce(sample.log_prob)) / count
    if policy.target_entropy is not None:
        policy.log_alpha.grad -= log_prob + policy.target_entropy
    policy_loss = float(alpha) * log_prob - float(np.add.reduce(worst)) / count
    stats = {"vf_loss": vf_loss, "policy_loss": policy_loss, "entropy": -log_prob}
    stats |= {"total_loss": vf_loss + policy_loss, "alpha_value": float(alpha)}
    mean_errors = 0.5 * (errors[0] + errors[1])
    absolute = 0.5 * (np.abs(errors[0]) + np.abs(errors[1]))
    return stats | value_stats_of(mean_errors, targets), absolute


def _flat(obs: np.ndarray) -> np.ndarray:
    return obs.reshape(len(obs), math.prod(obs.shape[1:])).astype(np.float32, copy=False)


def _sampled(policy: Any, actor: Layers, obs: np.ndarray) -> _Sample:
    """Does the same as `SACPolicy.sampled` in NumPy, with the same noise."""
    done = actor.forward(obs)
    size = done[-1].shape[1] // 2
    mean, raw_log_std = done[-1][:, :size], done[-1][:, size:]
    log_std = np.clip(raw_log_std, *policy.log_std_bounds)
    noise = policy.shuffle.standard_normal(mean.shape, dtype=np.float32)
    deviation = np.exp(log_std) * noise
    raw = mean + deviation
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not overflow.
    log_slope = 2.0 * (np.float32(math.log(2.0)) - raw - np.logaddexp(np.float32(0.0), -2.0 * raw))
    terms = 0.5 * noise * noise + log_std + log_slope
    log_prob = -np.add.reduce(terms, axis=1) - np.float32(size * _HALF_LOG_2PI)
    return _Sample(done, raw_log_std, deviation, np.tanh(raw), log_prob)


def _worst_values(
    critics: list[Layers], obs: np.ndarray, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The smaller of the Q-values of the two critics in each row `[B]`, and the gradients of these
    smaller Q-values with respect to the actions `[B, A]`."""
    inputs = np.concatenate([obs, actions], axis=1)
    both = [critic.forward(inputs) for critic in critics]
    first, second = (done[-1][:, 0] for done in both)
    by_actions = np.empty_like(actions)
    for critic, done, places in zip(
        critics,
        both,
        (np.flatnonzero(first <= second), np.flatnonzero(first > second)),
        strict=True,
    ):
        own = [part[places] for part in done]
        by_inputs = critic.backward(own, np.ones((len(places), 1), np.float32), True, learn=False)
        by_actions[places] = by_inputs[:, obs.shape[1] :]
    return np.minimum(first, second), by_actions
