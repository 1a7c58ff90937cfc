"""`sac`: the closed form of the gradients of SAC's losses, in NumPy.

NumPy does not have the overhead of autograd. The gradient of the actor needs only the smaller
Q-value of each row. So for this gradient, each critic does the backward pass only for the rows in
which its Q-value is the smaller one. This is about half of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.linear_layer import padded
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, is_mlp, why_not_small
from polopt.policies.fast_cpu.numpy_network import Layers, acting_layers, flat_rows, value_layers
from polopt.policies.fast_cpu.numpy_q import discounted, value_stats_of
from polopt.policies.fast_cpu.side_by_side import side_by_side

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class SACLayers(NamedTuple):
    """The layers of the networks of a `SACPolicy`. The layers share the memory of the torch
    modules."""

    actor: Layers
    critics: list[Layers]
    target_critics: list[Layers]


class Sample(NamedTuple):
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
    if not all(is_mlp(network) for network in networks):
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
    alpha = alpha_of(policy)
    obs, next_obs = flat_rows(rows.obs), flat_rows(rows.next_obs)

    noise = [drawn_noise(policy, layers.actor.steps[-1].weight, count) for _ in range(2)]
    following, sample = side_by_side(
        count * layers.actor.work,
        partial(sampled, policy, layers.actor.forward, next_obs, noise[0]),
        partial(sampled, policy, layers.actor.forward, obs, noise[1]),
    )

    # Each of the two pieces has the work of one critic.
    next_inputs = np.concatenate([next_obs, following.actions], axis=1)
    width = obs.shape[1]
    inputs = np.empty((2 * count, next_inputs.shape[1]), np.float32)
    inputs[:count, :width] = inputs[count:, :width] = obs
    np.tanh(rows.actions, out=inputs[:count, width:])
    inputs[count:, width:] = sample.actions
    critics = layers.critics
    work = 3 * count * critics[0].work
    first, second = side_by_side(
        work,
        *(
            partial(_values, target, critic, next_inputs, inputs)
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
        set_by_actions(
            by_actions,
            np.flatnonzero(is_worst),
            values.of_new,
            partial(critic.backward, needed=True, learn=False),
        )
        return errors, 0.5 * float(np.dot(weighted, errors)) / count

    (errors, loss), (other_errors, other_loss) = side_by_side(
        work,
        partial(learn, critics[0], first, first_is_worst),
        partial(learn, critics[1], second, ~first_is_worst),
    )
    layers.actor.backward(
        sample.done, by_params_of(policy, alpha, sample, by_actions), needed=False
    )
    worst = np.minimum(first.of_new[-1][:, 0], second.of_new[-1][:, 0])
    stats = learn_temperature(policy, alpha, sample, worst)
    vf_loss = loss + other_loss
    stats |= {"vf_loss": vf_loss, "total_loss": vf_loss + stats["policy_loss"]}
    stats["alpha_value"] = float(alpha)
    mean_errors = 0.5 * (errors + other_errors)
    absolute = 0.5 * (np.abs(errors) + np.abs(other_errors))
    return stats | value_stats_of(mean_errors, targets), absolute


def alpha_of(policy: Any) -> np.float32:
    """The temperature."""
    return np.float32(np.exp(policy.log_alpha.detach().numpy()[0]))


def drawn_noise(policy: Any, head: np.ndarray, count: int) -> np.ndarray:
    """The noise `[B, A]` that `SACPolicy.sampled` would draw next.

    Args:
        policy: has the random generator.
        head: weights `[2 A, ...]` of the last layer of the actor.
        count: B.
    """
    noise: np.ndarray = policy.shuffle.standard_normal((count, len(head) // 2), dtype=np.float32)
    return noise


def sampled(
    policy: Any,
    forward: Callable[[np.ndarray], list[np.ndarray]],
    obs: np.ndarray,
    noise: np.ndarray,
) -> Sample:
    """Does the same as `SACPolicy.sampled` in NumPy.

    Args:
        policy: has the bounds of log standard deviations.
        forward: returns a list of arrays. The last one is the outputs `[B, 2 A]` of the actor.
        obs: `[B, O]`.
        noise: `[B, A]`.
    """
    done = forward(obs)
    size = done[-1].shape[1] // 2
    mean, raw_log_std = done[-1][:, :size], done[-1][:, size:]
    log_std = np.clip(raw_log_std, *policy.log_std_bounds)
    deviation = np.exp(log_std) * noise
    raw = mean + deviation
    # log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2|u|))), which does not overflow.
    size_of_raw = np.abs(raw)
    tails = np.log1p(np.exp(-2.0 * size_of_raw))
    log_slope = 2.0 * (np.float32(math.log(2.0)) - size_of_raw - tails)
    terms = 0.5 * noise * noise + log_std + log_slope
    log_prob = -np.add.reduce(terms, axis=1) - np.float32(size * _HALF_LOG_2PI)
    return Sample(done, raw_log_std, deviation, np.tanh(raw), log_prob)


def set_by_actions(
    by_actions: np.ndarray,
    places: np.ndarray,
    of_new: list[np.ndarray],
    backward: Callable[[list[np.ndarray], np.ndarray], np.ndarray],
) -> None:
    """Sets the rows `places` of `by_actions` to the gradients of the Q-values of a critic.

    Args:
        by_actions: `[B, A]`.
        places: numbers of rows, in which this critic has the smallest Q-value.
        of_new: activations of the critic for new actions, `[B, ...]`.
        backward: computes the gradient with respect to the inputs of the critic, from activations
            and the gradient with respect to its outputs.
    """
    count = len(places)
    filled = np.zeros(padded(count), np.intp)
    filled[:count] = places
    # The backward pass reads the outputs of the hidden layers only.
    hidden = [part.take(filled, axis=0) for part in of_new[1:-1]]
    own = [of_new[0], *hidden, of_new[-1]]
    by_inputs = backward(own, np.ones((len(filled), 1), np.float32))
    by_actions[places] = by_inputs[:count, -by_actions.shape[1] :]


def by_params_of(
    policy: Any, alpha: np.float32, sample: Sample, by_actions: np.ndarray
) -> np.ndarray:
    """The gradient of the loss of the actor with respect to its outputs, `[B, 2 A]`.

    Args:
        policy: has the bounds of log standard deviations.
        alpha: the temperature.
        sample: new actions.
        by_actions: gradients of the smallest Q-values with respect to these actions, `[B, A]`.
    """
    count = np.float32(len(by_actions))
    each = alpha / count
    # `by_raw` is the gradient with respect to the actions before tanh. It is also the gradient with
    # respect to the means. `by_log_std` is the gradient with respect to the log standard
    # deviations.
    by_raw = 2.0 * each * sample.actions
    by_raw -= by_actions / count * (1.0 - sample.actions * sample.actions)
    by_log_std = by_raw * sample.deviation - each
    low, high = policy.log_std_bounds
    by_log_std *= (sample.raw_log_std >= low) & (sample.raw_log_std <= high)
    return np.concatenate([by_raw, by_log_std], axis=1)


def learn_temperature(
    policy: Any, alpha: np.float32, sample: Sample, values: np.ndarray
) -> dict[str, float]:
    """Adds the gradient of the temperature. Returns the statistics of the actor.

    Args:
        policy: has the target entropy, and the parameter of the temperature.
        alpha: the temperature.
        sample: new actions.
        values: the smallest Q-values of these actions, `[B]`.
    """
    count = len(values)
    log_prob = float(np.add.reduce(sample.log_prob)) / count
    if policy.target_entropy is not None:
        by_log_alpha = policy.log_alpha.grad.numpy()
        by_log_alpha -= log_prob + policy.target_entropy
    loss = float(alpha) * log_prob - float(np.add.reduce(values)) / count
    return {"policy_loss": loss, "entropy": -log_prob}


def _values(target: Layers, critic: Layers, next_inputs: np.ndarray, inputs: np.ndarray) -> _Values:
    """Q-values of a critic and of its target critic.

    Args:
        target: the target critic.
        critic: the critic.
        next_inputs: the next observations with actions, `[B, O + A]`.
        inputs: the observations with the stored actions, and then with new actions,
            `[2 B, O + A]`. One pass for both takes less time than two.
    """
    done, count = critic.forward(inputs), len(next_inputs)
    of_stored, of_new = [part[:count] for part in done], [part[count:] for part in done]
    return _Values(target(next_inputs)[:, 0], of_stored, of_new)
