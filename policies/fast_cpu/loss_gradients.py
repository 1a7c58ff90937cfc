"""What losses are made of, in NumPy, with slopes in closed form.

autograd spends most of its time on the bookkeeping of some fifty operations on a few hundred
numbers. A policy that gives `slopes` beside its `loss` spares it that; tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from polopt.policies.distributions.distributions import (
    ActionDistribution,
    Categorical,
    DiagGaussian,
    MultiCategorical,
)


class Terms(NamedTuple):
    """Of the distributions that `params` `[B, P]` are of.

    Attributes:
        log_prob: `[B]`, of the actions taken.
        entropy: `[B]`.
        kl: `[B]`, KL(old || new).
        pull: from the loss's slopes by each of the three, `[B]` or one for all, to those by the
            parameters, `[B, P]`.
    """

    log_prob: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    pull: Callable[[np.ndarray, float, float], np.ndarray]


class Slopes(NamedTuple):
    """Of a loss, by what it is made of.

    Attributes:
        log_prob: `[B]`.
        entropy: by that of each row.
        kl: likewise.
        values: `[B]`.
    """

    log_prob: np.ndarray
    entropy: float
    kl: float
    values: np.ndarray


def categorical(params: np.ndarray, actions: np.ndarray, old: np.ndarray | None) -> Terms:
    """Of logits `[B, n]` and actions `[B]`; without `old` logits, KL is 0."""
    rows = np.arange(len(params))
    log_p = _log_softmax(params)
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(axis=-1)
    kl, old_p = np.zeros_like(entropy), p
    if old is not None:
        log_old = _log_softmax(old)
        old_p = np.exp(log_old)
        kl = (old_p * (log_old - log_p)).sum(axis=-1)

    def pull(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        slopes = -p * by_log_prob[:, None]
        slopes[rows, actions] += by_log_prob
        if by_entropy:
            slopes -= by_entropy * p * (log_p + entropy[:, None])
        if by_kl:
            slopes += by_kl * (p - old_p)
        return slopes

    return Terms(log_p[rows, actions], entropy, kl, pull)


def multi_categorical(
    sizes: list[int], params: np.ndarray, actions: np.ndarray, old: np.ndarray | None
) -> Terms:
    """Of logits side by side `[B, sum of sizes]` and actions `[B, number of sizes]`."""
    cuts = np.cumsum(sizes)[:-1]
    olds = [None] * len(sizes) if old is None else np.split(old, cuts, axis=-1)
    logits = np.split(params, cuts, axis=-1)
    parts = [categorical(logits[i], actions[:, i], olds[i]) for i in range(len(sizes))]

    def pull(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        return np.concatenate([p.pull(by_log_prob, by_entropy, by_kl) for p in parts], axis=-1)

    return Terms(
        np.sum([part.log_prob for part in parts], axis=0),
        np.sum([part.entropy for part in parts], axis=0),
        np.sum([part.kl for part in parts], axis=0),
        pull,
    )


def diag_gaussian(params: np.ndarray, actions: np.ndarray, old: np.ndarray | None) -> Terms:
    """Of means and log standard deviations `[B, 2 A]` and actions `[B, A]`."""
    size = params.shape[-1] // 2
    mean, log_std = params[:, :size], params[:, size:]
    inverse = np.exp(-log_std)
    z = (actions - mean) * inverse
    log_prob = -(0.5 * z * z + log_std).sum(axis=-1) - size * _HALF_LOG_2PI
    entropy = log_std.sum(axis=-1) + size * (0.5 + _HALF_LOG_2PI)
    kl, ratio, shift = np.zeros_like(entropy), None, None
    if old is not None:
        ratio = np.exp(2.0 * (old[:, size:] - log_std))
        shift = (mean - old[:, :size]) * inverse
        kl = (log_std - old[:, size:] + 0.5 * (ratio + shift * shift - 1.0)).sum(axis=-1)

    def pull(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        slopes = np.empty_like(params)
        slopes[:, :size] = by_log_prob[:, None] * z * inverse
        slopes[:, size:] = by_log_prob[:, None] * (z * z - 1.0) + by_entropy
        if by_kl and ratio is not None and shift is not None:
            slopes[:, :size] += by_kl * shift * inverse
            slopes[:, size:] += by_kl * (1.0 - ratio - shift * shift)
        return slopes

    return Terms(log_prob, entropy, kl, pull)


def terms_of(dist: ActionDistribution) -> Callable[..., Terms] | None:
    """What makes `Terms` for a distribution; None where there is no closed form here."""
    if type(dist) is MultiCategorical:
        return partial(multi_categorical, dist.sizes)
    # By the very class: one derived from it may have another density.
    return {Categorical: categorical, DiagGaussian: diag_gaussian}.get(type(dist))


def mean(values: np.ndarray) -> float:
    """Of `[B]`, as `values.mean()`, whose way through Python takes longer than the sum."""
    return float(np.add.reduce(values)) / len(values)


def clip(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """As `np.clip`, likewise."""
    return np.minimum(np.maximum(values, low), high)


def defined_together(cls: type, one: str, other: str) -> bool:
    """Whether the same class of its ancestors defines both: else one of them was overridden, and
    they say different things."""
    owners = [next((c for c in cls.__mro__ if name in vars(c)), None) for name in (one, other)]
    return owners[0] is not None and owners[0] is owners[1]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


_HALF_LOG_2PI = 0.5 * float(np.log(2.0 * np.pi))
