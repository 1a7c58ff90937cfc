"""`td3`: the closed form of the gradients of TD3's losses, in NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, is_mlp, why_not_small
from polopt.policies.fast_cpu.numpy_network import Layers, acting_layers, flat_rows, value_layers
from polopt.policies.fast_cpu.numpy_q import discounted, value_stats_of
from polopt.policies.fast_cpu.side_by_side import side_by_side


class TD3Layers(NamedTuple):
    """The layers of the networks of a `TD3Policy`. The layers share the memory of the torch
    modules."""

    actor: Layers
    target_actor: Layers
    critics: list[Layers]
    target_critics: list[Layers]


def _layers(policy: Any) -> tuple[TD3Layers] | str:
    """The layers of the networks of a `TD3Policy`, or why the policy learns in torch."""
    actor, target_actor, critics, target_critics = (
        policy.segments[name].module
        for name in ("network", "target_network", "critics", "target_critics")
    )
    networks = [*critics.networks, *target_critics.networks]
    if not all(is_mlp(network) for network in (actor, target_actor, *networks)):
        return UNSUPPORTED
    of_critics, of_targets = (
        [value_layers(network) for network in part.networks] for part in (critics, target_critics)
    )
    layers = TD3Layers(acting_layers(actor), acting_layers(target_actor), of_critics, of_targets)
    return why_not_small(actor, *networks) or (layers,)


@closed_form_of(
    "polopt.policies.td3:TD3Policy",
    *("critic_loss", "targets", "actor_loss", "normal", "drawn"),
    of_family=OF_REPLAY_POLICIES,
    networks=_layers,
)
def td3(policy: Any, layers: TD3Layers, rows: Any) -> tuple[dict[str, float], np.ndarray]:
    """Adds the gradients of the losses of a `TD3Policy` to the `.grad` of its networks.

    Args:
        policy: has the options, and the random generator of the noise.
        layers: the layers of the networks of the policy.
        rows: normalised `Transitions`.

    Returns:
        the statistics, and the absolute TD errors `[B]`, which are means over the critics.
    """
    config, count = policy.config, len(rows.rewards)
    actor, critics = layers.actor, layers.critics
    learns_actor = not policy.resting
    obs, next_obs = flat_rows(rows.obs), flat_rows(rows.next_obs)

    forward: list[Any] = [partial(layers.target_actor, next_obs)]
    if learns_actor:
        forward.append(partial(actor.forward, obs))
    raw, *done = side_by_side(count * actor.work, *forward)
    noise = policy.shuffle.standard_normal(raw.shape, dtype=np.float32) * config.target_noise
    limit = config.target_noise_clip
    next_actions = np.clip(np.tanh(raw) + np.clip(noise, -limit, limit), -1.0, 1.0)

    next_inputs = np.concatenate([next_obs, next_actions], axis=1)
    inputs = np.concatenate([obs, rows.actions], axis=1)
    work = 2 * count * critics[0].work
    first, second = side_by_side(
        work,
        *(
            partial(_values, target, critic, next_inputs, inputs)
            for target, critic in zip(layers.target_critics, critics, strict=True)
        ),
    )
    targets = rows.rewards + discounted(rows, np.minimum(first.targets, second.targets))

    def learn(critic: Layers, values: _Values) -> tuple[np.ndarray, float]:
        """Adds the gradient of the loss of a critic. Returns its errors `[B]` and its loss."""
        errors = values.of_stored[-1][:, 0] - targets
        weighted = rows.weights * errors
        critic.backward(values.of_stored, (weighted / np.float32(count))[:, None], needed=False)
        return errors, 0.5 * float(np.dot(weighted, errors)) / count

    # The actor's gradient takes as long as the gradients of both critics.
    pieces: list[Any] = []
    if learns_actor:
        pieces.append(partial(_learn_actor, actor, critics[0], obs, done[0]))
    pieces += [partial(learn, critics[0], first), partial(learn, critics[1], second)]
    *of_actor, (errors, loss), (other_errors, other_loss) = side_by_side(work, *pieces)
    vf_loss = loss + other_loss
    stats = {"vf_loss": vf_loss, "total_loss": vf_loss}
    if learns_actor:
        stats |= {"policy_loss": of_actor[0], "total_loss": vf_loss + of_actor[0]}
    absolute = 0.5 * (np.abs(errors) + np.abs(other_errors))
    return stats | value_stats_of(0.5 * (errors + other_errors), targets), absolute


class _Values(NamedTuple):
    """Q-values of one critic, and of its target critic."""

    targets: np.ndarray  # [B] of the next observations, from the target critic
    of_stored: list[np.ndarray]  # activations for the stored actions


def _values(target: Layers, critic: Layers, next_inputs: np.ndarray, inputs: np.ndarray) -> _Values:
    """Q-values of a critic and of its target critic, for observations with actions `[B, ...]`."""
    return _Values(target(next_inputs)[:, 0], critic.forward(inputs))


def _learn_actor(actor: Layers, critic: Layers, obs: np.ndarray, done: list[np.ndarray]) -> float:
    """Adds the gradient of the loss of the actor, and returns the loss.

    Args:
        actor: the actor.
        critic: the critic whose Q-values the actor increases.
        obs: `[B, O]`.
        done: activations of the actor for `obs`.
    """
    count = len(obs)
    actions = np.tanh(done[-1])
    of_new = critic.forward(np.concatenate([obs, actions], axis=1))
    by_values = np.full((count, 1), -1.0 / count, np.float32)
    by_inputs = critic.backward(of_new, by_values, needed=True, learn=False)
    by_actions = by_inputs[:, obs.shape[1] :]
    actor.backward(done, by_actions * (1.0 - actions * actions), needed=False)
    return -float(np.add.reduce(of_new[-1][:, 0])) / count
