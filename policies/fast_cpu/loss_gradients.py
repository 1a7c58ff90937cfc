"""Closed-form gradients of losses, declared next to the losses that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Method = TypeVar("_Method", bound=Callable[..., Any])


class LossGradients(NamedTuple):
    """Gradients of a loss with respect to its terms.

    Attributes:
        log_prob: `[B]`.
        entropy: with respect to each row's entropy.
        kl: with respect to each row's KL.
        values: `[B]`.
    """

    log_prob: np.ndarray
    entropy: float
    kl: float
    values: np.ndarray


def closed_form_of(loss: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Decorator of the method `loss_gradients` of a policy class: declares the `loss` method whose
    gradients it returns.

    A subclass that overrides `loss` alone therefore has no closed form, and learns through torch.
    """

    def declare(method: _Method) -> _Method:
        method.__dict__["closed_form_of"] = loss
        return method

    return declare


def has_closed_form(policy_class: type) -> bool:
    """Whether `policy_class.loss_gradients` is declared for `policy_class.loss`."""
    method = getattr(policy_class, "loss_gradients", None)
    return getattr(method, "closed_form_of", None) is getattr(policy_class, "loss", policy_class)


def mean(values: np.ndarray) -> float:
    """Mean of `[B]`; `ndarray.mean` takes longer for a few hundred elements."""
    return float(np.add.reduce(values)) / len(values)


def clip(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """`np.clip` of small arrays in less time."""
    return np.minimum(np.maximum(values, low), high)
