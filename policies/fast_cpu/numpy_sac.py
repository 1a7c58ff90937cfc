"""`sac`: the closed form of the gradients of SAC's losses, in NumPy.

The matrix products take as long as in torch, but NumPy does not have the overhead of autograd. The
gradient of the actor needs only the smaller Q-value of each row. So for this gradient, each critic
does the backward pass only for the rows in which its Q-value is the smaller one. This is about half
of all rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.linear_layer import padded
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, is_supported, why_not_small
from polopt.policies.fast_cpu.numpy_mlp import Layers, acting_layers, flat_rows, value_layers
from polopt.policies.fast_cpu.numpy_q import discounted, value_stats_of
from polopt.policies.fast_cpu.side_by_side import side_by_side

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


class _Values(NamedTuple):
    """Q-values of one critic, and of its target critic."""

    targets: np.ndarray  # [B] of the next observations, from the target critic
    of_stored: list[np.ndarray]  # activations for the stored actions
    of_new: list[np.ndarray]  # activations for new actions


def _layers(policy: Any) -> tuple[SACLayers] | str:
    """The layers of the networks of a `SACPolicy`, or why the policy learns in torch."""
    segments = policy.segments
    targets = segments.get("target_critics", segments["critics"])
    both: list[Any] = [part.module.networks for part in (segments["critics"], targets)]
    networks = [policy.model, *both[0], *both[1]]
    if not all(is_supported(network) for network in networks):
        return UNSUPPORTED
    critics, target_critics = ([value_layers(network) for network in part] for part in both)
    layers = SACLayers(acting_layers(policy.model), critics, target_critics)
    return why_not_small(*networks) or (layers,)


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
    obs, next_obs = flat_rows(rows.obs), flat_rows(rows.next_obs)

    noise = [_noise(policy, layers.actor, count) for _ in range(2)]
    following, sample = side_by_side(
        count * layers.actor.work,
        partial(_sampled, policy, layers.actor, next_obs, noise[0]),
        partial(_sampled, policy, layers.actor, obs, noise[1]),
    )

    # Each of the two pieces has the work of one critic.
    next_inputs = np.concatenate([next_obs, following.actions], axis=1)
    inputs = np.concatenate([obs, np.tanh(rows.actions)], axis=1)
    new_inputs = np.concatenate([obs, sample.actions], axis=1)
    critics = layers.critics
    work = 3 * count * critics[0].work
    first, second = side_by_side(
        work,
        *(
            partial(_values, target, critic, next_inputs, inputs, new_inputs)
            for target, critic in zip(layers.target_critics, critics, strict=True)
        ),
    )
    soft = np.minimum(first.targets, second.targets) - alpha * following.log_prob
    targets = rows.rewards + discounted(rows, soft)
    first_is_worst = first.of_new[-1][:, 0] <= second.of_new[-1][:, 0]
    by_actions = np.empty_like(sample.actions)

    def learn(critic: Layers, values: _Values, is_worst: np.ndarray) -> tuple[np.ndarray, float]:
        """Adds the gradient of the loss of a critic. Computes the gradients of its Q-values with
        respect to new actions in the rows in which its Q-value is the smaller one."""
        errors = values.of_stored[-1][:, 0] - targets
        weighted = rows.weights * errors
        critic.backward(values.of_stored, (weighted / np.float32(count))[:, None], needed=False)
        found = np.flatnonzero(is_worst)
        places = np.zeros(padded(len(found)), np.intp)
        places[: len(found)] = found
        own = [part[places] for part in values.of_new]
        by_inputs = critic.backward(own, np.ones((len(places), 1), np.float32), True, learn=False)
        by_actions[found] = by_inputs[: len(found), obs.shape[1] :]
        return errors, 0.5 * float(np.dot(weighted, errors)) / count

    (errors, loss), (other_errors, other_loss) = side_by_side(
        work,
        partial(learn, critics[0], first, first_is_worst),
        partial(learn, critics[1], second, ~first_is_worst),
    )
    vf_loss = loss + other_loss
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
    worst = np.minimum(first.of_new[-1][:, 0], second.of_new[-1][:, 0])
    policy_loss = float(alpha) * log_prob - float(np.add.reduce(worst)) / count
    stats = {"vf_loss": vf_loss, "policy_loss": policy_loss, "entropy": -log_prob}
    stats |= {"total_loss": vf_loss + policy_loss, "alpha_value": float(alpha)}
    mean_errors = 0.5 * (errors + other_errors)
    absolute = 0.5 * (np.abs(errors) + np.abs(other_errors))
    return stats | value_stats_of(mean_errors, targets), absolute


def _noise(policy: Any, actor: Layers, count: int) -> np.ndarray:
    """The noise `[B, A]` that `SACPolicy.sampled` would draw next."""
    size = len(actor.steps[-1].weight) // 2
    noise: np.ndarray = policy.shuffle.standard_normal((count, size), dtype=np.float32)
    return noise


def _sampled(policy: Any, actor: Layers, obs: np.ndarray, noise: np.ndarray) -> _Sample:
    """Does the same as `SACPolicy.sampled` in NumPy, with this noise `[B, A]`."""
    done = actor.forward(obs)
    size = done[-1].shape[1] // 2
    mean, raw_log_std = done[-1][:, :size], done[-1][:, size:]
    log_std = np.clip(raw_log_std, *policy.log_std_bounds)
    deviation = np.exp(log_std) * noise
    raw = mean + deviation
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not overflow.
    log_slope = 2.0 * (np.float32(math.log(2.0)) - raw - np.logaddexp(np.float32(0.0), -2.0 * raw))
    terms = 0.5 * noise * noise + log_std + log_slope
    log_prob = -np.add.reduce(terms, axis=1) - np.float32(size * _HALF_LOG_2PI)
    return _Sample(done, raw_log_std, deviation, np.tanh(raw), log_prob)


def _values(
    target: Layers,
    critic: Layers,
    next_inputs: np.ndarray,
    inputs: np.ndarray,
    new_inputs: np.ndarray,
) -> _Values:
    """Q-values of a critic and of its target critic, for observations with actions `[B, ...]`."""
    return _Values(target(next_inputs)[:, 0], critic.forward(inputs), critic.forward(new_inputs))
