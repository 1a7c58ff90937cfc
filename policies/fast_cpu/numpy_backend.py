"""`NumpyBackend`: a small policy on the CPU acts and learns in NumPy."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from torch import nn

from polopt.common.threads import blas_threads
from polopt.policies.fast_cpu.closed_forms import find_closed_form
from polopt.policies.fast_cpu.loss_terms import loss_terms_of
from polopt.policies.fast_cpu.numpy_masked import NumpyMasked
from polopt.policies.fast_cpu.numpy_mlp import NumpyMLP
from polopt.policies.networks.backend import Backend, Rows
from polopt.policies.networks.masked import MaskedNetwork
from polopt.policies.networks.mlp import MLPNetwork
from polopt.policies.networks.network import Network

#: Largest number of parameters of a network that learns in NumPy. Arithmetic dominates the cost of
#: a larger one, and torch may use several threads for it.
MAX_PARAMETERS = 100_000


def is_supported(network: nn.Module) -> TypeGuard[MLPNetwork]:
    """Whether `NumpyMLP` supports `network`: an `MLPNetwork` without memory, with tanh or ReLU,
    on the CPU, but no subclass, which may compute something else."""
    if type(network) is not MLPNetwork or network.state_size:
        return False
    on_cpu = next(network.parameters()).device.type == "cpu"
    return on_cpu and all(
        isinstance(m, nn.Linear | nn.Tanh | nn.ReLU) for m in network.policy_trunk
    )


def numpy_network(network: nn.Module) -> NumpyMLP | NumpyMasked | None:
    """A network in NumPy: one that `is_supported`, or its masked form. None for others."""
    if type(network) is MaskedNetwork:
        inner = numpy_network(network.network)
        return None if inner is None else NumpyMasked(inner, network)
    return NumpyMLP(network) if is_supported(network) else None


class NumpyBackend(Backend):
    """A `Backend` that computes in NumPy what has a closed form there.

    Acting always does. `backward` does if the distribution and the loss have closed forms, the
    network is small, and BLAS has one thread (with more, its idle threads spin). All else is that
    of `Backend`.

    Args:
        network: on the CPU.
        in_numpy: the same network, from `numpy_network`.
        policy: the `ActorCriticPolicy` that acts or learns with the network.
    """

    def __init__(self, network: Network, in_numpy: NumpyMLP | NumpyMasked, policy: Any) -> None:
        super().__init__(network, policy.device, policy.loss)
        self._network = in_numpy
        self._policy = policy
        self._terms_of = loss_terms_of(policy.dist)
        self._closed_form = find_closed_form(type(policy))
        size = sum(parameter.numel() for parameter in network.parameters())
        closed = self._terms_of is not None and self._closed_form is not None
        self._learns = closed and size <= MAX_PARAMETERS and blas_threads() == 1

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return self._network.action_params(obs)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return self._network.value(obs)

    def rows(self, columns: Rows) -> Rows:
        """See `Backend`. Arrays stay arrays."""
        return columns if self._learns else super().rows(columns)

    # Overflow makes the gradient non-finite. The weight updater does not apply such gradients.
    @np.errstate(all="ignore")
    def backward(self, rows: Rows) -> dict[str, float]:
        """See `Backend`."""
        if not (self._learns and self._terms_of and self._closed_form):
            return super().backward(rows)
        params, values, done = self._network.forward(rows["obs"])
        terms = self._terms_of(params, rows["actions"], rows.get("action_dist_inputs"))
        gradients, stats = self._closed_form(self._policy, terms, values, rows)
        by_params = terms.vjp(gradients.log_prob, gradients.entropy, gradients.kl)
        self._network.backward(done, by_params, gradients.values)
        return stats
