"""Closed forms of the gradients of losses, in NumPy, registered by policy class.

The file of each policy defines the loss in torch. The closed forms of A2C, PPO and APPO return
the same statistics as the loss, and the gradients of the loss with respect to log-probability,
entropy, KL and values. The closed forms of DQN (`numpy_q`) and SAC (`numpy_sac`) instead add the
gradients of the weights to the `.grad` of the networks. Tests compare each closed form with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from polopt.common.overrides import Replacement
from polopt.policies.fast_cpu.loss_terms import LossTerms


class LossGradients(NamedTuple):
    """Gradients of a loss with respect to its terms.

    Attributes:
        log_prob: `[B]`, the gradient with respect to the log-probabilities.
        entropy: the gradient with respect to the entropy of each row. It is the same for all rows.
        kl: the gradient with respect to the KL of each row. It is the same for all rows.
        values: `[B]`, the gradient with respect to the values.
    """

    log_prob: np.ndarray
    entropy: float
    kl: float
    values: np.ndarray


#: A function `fn(policy, terms, values [B], rows)`. It returns the gradients, the statistics of
#: `loss`, and `total_loss` among the statistics.
ClosedForm = Callable[
    [Any, LossTerms, np.ndarray, Mapping[str, np.ndarray]], tuple[LossGradients, dict[str, float]]
]
_Form = TypeVar("_Form", bound=Callable[..., Any])


class _Registered(NamedTuple):
    """A closed form, the names of the class members that the loss uses, and `networks` of
    `closed_form_of`."""

    compute: Callable[..., Any]
    members: tuple[str, ...]
    networks: Callable[[Any], tuple[Any, ...] | str]


#: Says in `Policy.learns_with` that a closed form is used.
TITLE = "NumPy"
#: Closed forms of the built-in policies, by `module:Class`.
_BUILT_IN: dict[str, _Registered] = {}
#: Names of members of `ActorCriticPolicy`: the loss, and the members that every loss uses.
_OF_ACTOR_CRITICS = ("loss", "outputs", "entropy_coeff")
#: Names of members of `ReplayPolicy` with which every such policy learns in torch.
OF_REPLAY_POLICIES = ("backward", "backward_in_torch", "add_gradient", "tensors", "training")
#: The attribute in which the policy class of a plugin holds its closed form. So every process that
#: has the class also has the closed form.
_ATTRIBUTE = "_closed_form"


def closed_form_of(
    policy_class: type | str,
    *parts: str,
    of_family: tuple[str, ...] = _OF_ACTOR_CRITICS,
    networks: Callable[[Any], tuple[Any, ...] | str] = lambda policy: (),
) -> Callable[[_Form], _Form]:
    """Returns a decorator that registers a function as the closed form of a policy's loss.

    A subclass of the policy class uses the same closed form, unless the subclass overrides a member
    that `of_family` or `parts` names. A subclass that overrides such a member learns in torch, or
    registers its own closed form.

    Args:
        policy_class: the policy class. The closed form of a subclass of `NetworkPolicy` is a
            `ClosedForm`. The closed form of a subclass of `ReplayPolicy` is a function
            `fn(policy, *networks, rows)`, which adds the gradient, and returns what
            `ReplayPolicy.backward` returns. A built-in class is given as text, `module:Class`.
        parts: names of further methods that the closed form replaces, because only the loss of this
            class calls them.
        of_family: names of the members that the closed forms of all policies of the same family
            replace: the loss, and the members that every such loss uses.
        networks: for a subclass of `ReplayPolicy`, a function that returns the networks of a policy
            in NumPy, or a text that says why the policy learns in torch.
    """

    def register(compute: _Form) -> _Form:
        registered = _Registered(compute, (*of_family, *parts), networks)
        if isinstance(policy_class, str):
            _BUILT_IN[policy_class] = registered
        else:
            setattr(policy_class, _ATTRIBUTE, registered)
        return compute

    return register


def find_closed_form(policy: Any, why_not: str = "") -> Replacement:
    """Returns the closed form of the loss of a policy, which is registered for the class of the
    policy or for one of its base classes. The result says whether the policy learns with it.

    Args:
        policy: the policy.
        why_not: why the policy learns in torch, if the caller already knows a reason.
    """
    owner, found = _registered(policy)
    if found is None:
        return Replacement(policy, owner, (), None, "its loss has no closed form")
    return Replacement(policy, owner, found.members, found.compute, why_not, TITLE)


def gradient_of(policy: Any, why_not: str = "") -> Replacement:
    """Returns the closed form of the gradient of a `ReplayPolicy`, as an implementation of its
    `backward`.

    Args:
        policy: the policy, on the CPU.
        why_not: why the policy learns in torch, if the caller already knows a reason.
    """
    owner, found = _registered(policy)
    if found is None:
        return find_closed_form(policy)
    networks = why_not or found.networks(policy)
    if isinstance(networks, str):
        return Replacement(policy, owner, found.members, None, networks)
    compute = partial(found.compute, policy, *networks)
    return Replacement(policy, owner, found.members, compute, "", TITLE)


def _registered(policy: Any) -> tuple[type, _Registered | None]:
    """The closed form for the class of a policy or for one of its base classes, and the class for
    which it is registered."""
    for base in type(policy).__mro__:
        path = f"{base.__module__}:{base.__qualname__}"
        found: _Registered | None = vars(base).get(_ATTRIBUTE, _BUILT_IN.get(path))
        if found is not None:
            return base, found
    return type(policy), None


@closed_form_of("polopt.policies.a2c:A2CPolicy")
def a2c(
    policy: Any, terms: LossTerms, values: np.ndarray, rows: Mapping[str, np.ndarray]
) -> tuple[LossGradients, dict[str, float]]:
    """The closed form of the loss of A2C, A3C and IMPALA."""
    count, advantages = len(values), rows["advantages"]
    errors = values - rows["value_targets"]
    stats = {
        "policy_loss": -_mean(terms.log_prob * advantages),
        "vf_loss": 0.5 * _mean(errors * errors),
        "entropy": _mean(terms.entropy),
    }
    vf_coeff, entropy_coeff = policy.vf_loss_coeff, policy.entropy_coeff
    loss = stats["policy_loss"] + vf_coeff * stats["vf_loss"]
    stats["total_loss"] = loss - entropy_coeff * stats["entropy"]
    return LossGradients(
        log_prob=-advantages / count,
        entropy=-entropy_coeff / count,
        kl=0.0,
        values=errors * (vf_coeff / count),
    ), stats


@closed_form_of("polopt.policies.ppo:PPOPolicy", "vf_loss")
def ppo(
    policy: Any, terms: LossTerms, values: np.ndarray, rows: Mapping[str, np.ndarray]
) -> tuple[LossGradients, dict[str, float]]:
    """The closed form of the loss of PPO and decoupled PPO."""
    return _clipped_surrogate(policy, terms, _squared_errors(policy.config, values, rows), rows)


@closed_form_of("polopt.policies.appo:AppoPolicy", "vf_loss")
def appo(
    policy: Any, terms: LossTerms, values: np.ndarray, rows: Mapping[str, np.ndarray]
) -> tuple[LossGradients, dict[str, float]]:
    """The closed form of the loss of APPO. This is the loss of PPO with half the value loss."""
    errors, by_values = _squared_errors(policy.config, values, rows)
    return _clipped_surrogate(policy, terms, (0.5 * errors, 0.5 * by_values), rows)


def _clipped_surrogate(
    policy: Any,
    terms: LossTerms,
    vf_errors: tuple[np.ndarray, np.ndarray],
    rows: Mapping[str, np.ndarray],
) -> tuple[LossGradients, dict[str, float]]:
    """The closed form of the loss of `PPOPolicy`.

    Args:
        policy: has the options and coefficients.
        terms: log-probabilities, entropies and KL divergences.
        vf_errors: the errors `[B]` whose mean is the value loss, and the gradients `[B]` of these
            errors with respect to the values.
        rows: columns `[B, ...]` of the minibatch.
    """
    config, advantages = policy.config, rows["advantages"]
    errors, by_values = vf_errors
    count = len(errors)
    ratio = np.exp(terms.log_prob - rows["action_logp"])
    clipped = _clip(ratio, 1.0 - config.clip_param, 1.0 + config.clip_param)
    gain, bounded = ratio * advantages, clipped * advantages
    stats = {
        "policy_loss": -_mean(np.minimum(gain, bounded)),
        "vf_loss": _mean(errors),
        "entropy": _mean(terms.entropy),
        "mean_kl_loss": _mean(terms.kl),
        "clip_fraction": np.count_nonzero(clipped != ratio) / count,
    }
    vf_coeff, entropy_coeff = policy.vf_loss_coeff, policy.entropy_coeff
    kl_coeff = policy.coefficients["kl_coeff"]
    loss = stats["policy_loss"] + vf_coeff * stats["vf_loss"]
    loss += kl_coeff * stats["mean_kl_loss"] - entropy_coeff * stats["entropy"]
    stats["total_loss"] = loss
    return LossGradients(
        # If the clipped objective is smaller, the loss does not depend on the ratio, and the
        # gradient is 0. A comparison with NaN is False, so a NaN stays in the gradient.
        log_prob=np.where(gain > bounded, 0.0, -gain) / count,
        entropy=-entropy_coeff / count,
        kl=kl_coeff / count,
        values=by_values * (vf_coeff / count),
    ), stats


def _squared_errors(
    config: Any, values: np.ndarray, rows: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The errors `[B]` whose mean is `PPOPolicy.vf_loss`, and their gradients `[B]` with respect to
    the values."""
    distance = values - rows["value_targets"]
    errors = distance * distance
    most, limit = config.vf_clip_param, config.vf_clip_range
    if limit is not None:
        moved = values - rows["values"]
        far = rows["values"] + _clip(moved, -limit, limit) - rows["value_targets"]
        larger = far * far > errors
        errors = np.where(larger, far * far, errors)
        distance = np.where(larger, np.where(np.abs(moved) <= limit, far, 0.0), distance)
    if most is not None:
        distance = np.where(errors > most, 0.0, distance)
        errors = np.minimum(errors, most)
    return errors, 2.0 * distance


def _mean(values: np.ndarray) -> float:
    """The mean of `[B]` numbers. For a few hundred numbers, this is faster than `ndarray.mean`."""
    return float(np.add.reduce(values)) / len(values)


def _clip(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Does the same as `np.clip`, but is faster for small arrays."""
    return np.minimum(np.maximum(values, low), high)
