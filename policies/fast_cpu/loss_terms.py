"""Log-probability, entropy and KL in NumPy, with vector-Jacobian products in closed form.

For a few hundred rows, the overhead of autograd costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.categorical import Categorical, MultiCategorical
from polopt.policies.distributions.gaussians import DiagGaussian, SquashedGaussian

_HALF_LOG_2PI = 0.5 * float(np.log(2.0 * np.pi))


class LossTerms(NamedTuple):
    """The values that a loss computes from distributions with parameters `[B, P]`.

    Attributes:
        log_prob: log-probabilities `[B]` of the actions.
        entropy: entropies `[B]`.
        kl: KL(old || new) `[B]`. Zeros if no old parameters are given.
        vjp: the vector-Jacobian product, a function of three gradients of the loss. The first is
            the gradient with respect to `log_prob`, `[B]`. The others are the gradients with
            respect to each element of `entropy` and of `kl`, one number each. The function returns
            the gradient with respect to the parameters, `[B, P]`.
    """

    log_prob: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    vjp: Callable[[np.ndarray, float, float], np.ndarray]


def categorical(params: np.ndarray, actions: np.ndarray, old: np.ndarray | None) -> LossTerms:
    """Terms of `Categorical` from logits `[B, n]` and actions `[B]`."""
    rows = np.arange(len(params))
    log_p = _log_softmax(params)
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(axis=-1)
    kl, old_p = np.zeros_like(entropy), p
    if old is not None:
        log_old = _log_softmax(old)
        old_p = np.exp(log_old)
        kl = (old_p * (log_old - log_p)).sum(axis=-1)

    def vjp(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        grads = -p * by_log_prob[:, None]
        grads[rows, actions] += by_log_prob
        if by_entropy:
            grads -= by_entropy * p * (log_p + entropy[:, None])
        if by_kl:
            grads += by_kl * (p - old_p)
        return grads

    return LossTerms(log_p[rows, actions], entropy, kl, vjp)


def multi_categorical(
    sizes: list[int], params: np.ndarray, actions: np.ndarray, old: np.ndarray | None
) -> LossTerms:
    """Terms of `MultiCategorical` from logits `[B, sum of sizes]` and actions `[B, len(sizes)]`."""
    cuts = np.cumsum(sizes)[:-1]
    olds = [None] * len(sizes) if old is None else np.split(old, cuts, axis=-1)
    logits = np.split(params, cuts, axis=-1)
    parts = [categorical(logits[i], actions[:, i], olds[i]) for i in range(len(sizes))]

    def vjp(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        return np.concatenate([p.vjp(by_log_prob, by_entropy, by_kl) for p in parts], axis=-1)

    return LossTerms(
        np.sum([part.log_prob for part in parts], axis=0),
        np.sum([part.entropy for part in parts], axis=0),
        np.sum([part.kl for part in parts], axis=0),
        vjp,
    )


def diag_gaussian(params: np.ndarray, actions: np.ndarray, old: np.ndarray | None) -> LossTerms:
    """Terms of `DiagGaussian` from means and log standard deviations `[B, 2 A]`."""
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

    def vjp(by_log_prob: np.ndarray, by_entropy: float, by_kl: float) -> np.ndarray:
        grads = np.empty_like(params)
        grads[:, :size] = by_log_prob[:, None] * z * inverse
        grads[:, size:] = by_log_prob[:, None] * (z * z - 1.0) + by_entropy
        if by_kl and ratio is not None and shift is not None:
            grads[:, :size] += by_kl * shift * inverse
            grads[:, size:] += by_kl * (1.0 - ratio - shift * shift)
        return grads

    return LossTerms(log_prob, entropy, kl, vjp)


def squashed_gaussian(
    log_half_width: float, params: np.ndarray, actions: np.ndarray, old: np.ndarray | None
) -> LossTerms:
    """Terms of `SquashedGaussian`. The density is the density of `DiagGaussian` times a factor that
    does not depend on the parameters, so the gradients are the same."""
    terms = diag_gaussian(params, actions, old)
    log_slope = 2.0 * (np.log(np.float32(2.0)) - actions - np.logaddexp(0.0, -2.0 * actions))
    return terms._replace(log_prob=terms.log_prob - log_slope.sum(axis=-1) - log_half_width)


def loss_terms_of(dist: ActionDistribution) -> Callable[..., LossTerms] | None:
    """Returns the function `(params, actions, old params or None) -> LossTerms` for a distribution.
    Returns None if this file has no closed form for the distribution.

    The class must match exactly, because a subclass may have another density.
    """
    if type(dist) is MultiCategorical:
        return partial(multi_categorical, dist.sizes)
    if type(dist) is SquashedGaussian:
        return partial(squashed_gaussian, dist.log_half_width)
    return {Categorical: categorical, DiagGaussian: diag_gaussian}.get(type(dist))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
