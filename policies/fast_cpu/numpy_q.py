"""`NumpyQNetwork`: a Q-network in NumPy. `dqn`: the closed form of DQN's gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import nn

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.overrides import runs_as_written
from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, is_supported, why_not_small
from polopt.policies.fast_cpu.numpy_masked import NumpyMasked
from polopt.policies.fast_cpu.numpy_network import Activations, NumpyNetwork
from polopt.policies.fast_cpu.side_by_side import side_by_side
from polopt.policies.networks.actor_critics import MaskedNetwork
from polopt.policies.networks.q_network import QNetwork


class NumpyQNetwork:
    """Computes the outputs and the gradients of a `QNetwork`.

    Args:
        network: a Q-network on the CPU over a network that `NumpyNetwork` supports.
    """

    def __init__(self, network: QNetwork) -> None:
        self._network = NumpyNetwork(network.network)  # type: ignore[arg-type]
        self.work = self._network.work
        self._dueling = network.dueling
        size: Any = network.network.policy_head.out_features  # type: ignore[union-attr]
        # A product with one of these vectors is faster than a sum or mean over the second axis.
        self._ones = np.ones(size, np.float32)
        self._average = self._ones / np.float32(size)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Q-values `[N, n]` float32 of observations `[N, ...]`."""
        return self.forward(obs)[0] if self._dueling else self._network.action_params(obs)

    def forward(self, obs: np.ndarray) -> tuple[np.ndarray, Activations]:
        """Computes Q-values `[B, n]`, and the activations for `backward`."""
        q, values, done = self._network.forward(obs)
        if self._dueling:
            q += (values - q.dot(self._average))[:, None]
        return q, done

    def backward(self, done: Activations, by_q: np.ndarray) -> None:
        """Adds the gradients of all weights to the `.grad` of the weights.

        Args:
            done: activations from `forward`.
            by_q: gradient of the loss with respect to the Q-values, `[B, n]`.
        """
        if not self._dueling:
            self._network.backward(done, by_q, None)
            return
        by_advantages = by_q - by_q.dot(self._average)[:, None]
        self._network.backward(done, by_advantages, by_q.dot(self._ones))


def numpy_q_network(network: nn.Module) -> NumpyQNetwork | NumpyMasked | None:
    """Returns a NumPy version of a Q-network with or without an action mask. Returns None if NumPy
    does not support the network."""
    if type(network) is MaskedNetwork:
        inner = numpy_q_network(network.network)
        return None if inner is None else NumpyMasked(inner, network)
    if type(network) is not QNetwork or not runs_as_written(network):
        return None
    return NumpyQNetwork(network) if is_supported(network.network) else None


def acting_network(network: nn.Module) -> NumpyQNetwork | NumpyMasked | NumpyNetwork | None:
    """Returns a NumPy version of the network with which a `ReplayPolicy` acts, or None if NumPy
    does not support the network."""
    return NumpyNetwork(network) if is_supported(network) else numpy_q_network(network)


def _networks(policy: Any) -> tuple[Any, ...] | str:
    """The network that learns and the target network of a `DQNPolicy`, or why the policy learns in
    torch."""
    both = [policy.segments[name].module for name in ("network", "target")]
    found = tuple(numpy_q_network(network) for network in both)
    return UNSUPPORTED if None in found else why_not_small(both[0]) or found


@closed_form_of(
    "polopt.policies.dqn:DQNPolicy",
    *("loss", "targets"),
    of_family=OF_REPLAY_POLICIES,
    networks=_networks,
)
def dqn(
    policy: Any,
    online: NumpyQNetwork | NumpyMasked,
    target: NumpyQNetwork | NumpyMasked,
    rows: Any,
) -> tuple[dict[str, float], np.ndarray]:
    """Adds the gradient of `DQNPolicy.loss` to the `.grad` of the online network.

    Args:
        policy: has the options.
        online: the network that learns.
        target: the target network.
        rows: normalised `Transitions`.

    Returns:
        the statistics of `loss`, and the absolute TD errors `[B]`.
    """
    count = len(rows.rewards)
    targets, (q, done) = side_by_side(
        count * online.work,
        partial(dqn_targets, policy, online, target, rows),
        partial(online.forward, rows.obs),
    )
    places = np.arange(count), rows.actions
    values = q[places]
    errors = values - targets
    slopes = errors
    if policy.config.td_error_loss_fn == "huber":
        slopes = np.minimum(np.maximum(errors, -1.0), 1.0)
    # Both the Huber loss and half the squared error equal slope * (error - slope / 2).
    loss = float(np.dot(rows.weights, slopes * (errors - 0.5 * slopes))) / count
    by_q = np.zeros_like(q)
    by_q[places] = rows.weights * slopes / np.float32(count)
    online.backward(done, by_q)
    stats = {"vf_loss": loss, "total_loss": loss, **value_stats_of(errors, targets)}
    return stats, np.abs(errors)


def dqn_targets(
    policy: Any,
    online: NumpyQNetwork | NumpyMasked,
    target: NumpyQNetwork | NumpyMasked,
    rows: Any,
) -> np.ndarray:
    """Computes `DQNPolicy.targets` `[B]` in NumPy. `dqn` describes the arguments."""
    q = target.action_params(rows.next_obs)
    if policy.config.double_q:
        best = q[np.arange(len(q)), online.action_params(rows.next_obs).argmax(axis=1)]
    else:
        best = q.max(axis=1)
    if policy.mask is not None:  # an observation that allows no action has the value 0
        best = np.where(best > 0.5 * MASKED_LOGIT, best, np.float32(0.0))
    targets: np.ndarray = rows.rewards + discounted(rows, best)
    return targets


def discounted(rows: Any, values: np.ndarray) -> np.ndarray:
    """The discounted values of the next observations `[B]`.

    If the discount of a row is 0, its next observation is meaningless, and its value may be NaN.
    The result is then 0.
    """
    following: np.ndarray = rows.discounts * values
    if not np.isfinite(np.add.reduce(following)):
        following = np.where(rows.discounts > 0.0, following, np.float32(0.0))
    return following


def value_stats_of(errors: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Computes `value_stats` in NumPy.

    Args:
        errors: `[B]`, values minus targets.
        targets: `[B]`.
    """
    count = len(errors)
    target, error = float(np.add.reduce(targets)) / count, float(np.add.reduce(errors)) / count
    centred = targets - np.float32(target)
    variance = float(np.dot(centred, centred)) / count
    unexplained = float(np.dot(errors, errors)) / count - error * error
    return {
        "vf_explained_var": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
        "vf_predicted_mean": target + error,
        "vf_target_mean": target,
    }
