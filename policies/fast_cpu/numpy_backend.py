"""`NumpyBackend`: computes outputs and gradients of small networks on the CPU in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
from torch import nn

from polopt.common.overrides import runs_as_written
from polopt.common.threads import blas_threads
from polopt.policies.fast_cpu.closed_forms import find_closed_form
from polopt.policies.fast_cpu.conv_layer import are_supported, image_shape
from polopt.policies.fast_cpu.loss_terms import loss_terms_of
from polopt.policies.fast_cpu.numpy_masked import NumpyMasked
from polopt.policies.fast_cpu.numpy_network import NumpyNetwork
from polopt.policies.networks.actor_critics import CNNNetwork, MaskedNetwork, MLPNetwork
from polopt.policies.networks.backend import Backend, Rows
from polopt.policies.networks.network import Network

#: Largest number of parameters of a network that learns in NumPy. In one thread, the gradient of
#: PPO with 64 to 2,048 rows took 1.1 to 4.9 times as long in torch, for networks up to this size.
#: For a larger network, torch may use more threads than NumPy.
MAX_PARAMETERS = 2_000_000
#: Why a policy learns in torch.
UNSUPPORTED = "NumPy does not support the network"
#: The modules of the networks that NumPy supports.
_MODULES = (
    *(MLPNetwork, CNNNetwork, nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU),
    *(nn.Conv2d, nn.Flatten),
)


def is_supported(network: nn.Module) -> TypeGuard[MLPNetwork | CNNNetwork]:
    """Whether `NumpyNetwork` supports `network`.

    The network must be an `MLPNetwork` with tanh or ReLU, or a `CNNNetwork` with small images,
    on the CPU, and without memory and layer normalisation. A subclass of a network or of a layer is
    not supported, because it may compute something else. A network with hooks is not supported
    either.
    """
    if type(network) not in (MLPNetwork, CNNNetwork) or network.state_size:
        return False
    on_cpu = next(network.parameters()).device.type == "cpu"
    if not on_cpu or not all(type(m) in _MODULES and runs_as_written(m) for m in network.modules()):
        return False
    if not isinstance(network, CNNNetwork):
        return True
    shape = image_shape(network.encoder)
    return all(
        are_supported((m for m in trunk if isinstance(m, nn.Conv2d)), shape)
        for trunk in (network.policy_trunk, network.value_trunk)
    )


def is_mlp(network: nn.Module) -> TypeGuard[MLPNetwork]:
    """Whether `network` is an MLP that `NumpyNetwork` supports."""
    return type(network) is MLPNetwork and is_supported(network)


def why_not_small(*networks: nn.Module) -> str:
    """Why networks that NumPy supports learn in torch. Empty if they learn in NumPy: they must be
    small, and BLAS must have only one thread."""
    sizes = (sum(p.numel() for p in network.parameters()) for network in networks)
    if max(sizes) > MAX_PARAMETERS:
        return f"the network has more than {MAX_PARAMETERS:,} parameters"
    # The idle threads of BLAS would use processor time.
    return "BLAS has several threads" if blas_threads() != 1 else ""


def numpy_network(network: nn.Module) -> NumpyNetwork | NumpyMasked | None:
    """Returns a NumPy version of a network with or without an action mask. Returns None if NumPy
    does not support the network."""
    if type(network) is MaskedNetwork:
        inner = numpy_network(network.network)
        return None if inner is None else NumpyMasked(inner, network)
    return NumpyNetwork(network) if is_supported(network) else None


def numpy_backend(policy: Any) -> Callable[[Network], Backend]:
    """Returns a function that makes the backend of a network of a policy on the CPU. If NumPy does
    not support the network, the backend computes in torch."""

    def make(network: Network) -> Backend:
        in_numpy = numpy_network(network)
        if in_numpy is None:
            return Backend(network, policy, UNSUPPORTED)
        return NumpyBackend(network, in_numpy, policy)

    return make


class NumpyBackend(Backend):
    """A `Backend` that computes outputs in NumPy, and gradients in NumPy if possible.

    `backward` computes in NumPy if the distribution and the loss have closed forms, and
    `why_not_small` knows no reason against it. Otherwise `backward` computes in torch, as in
    `Backend`.

    Args:
        network: the network in torch, on the CPU.
        in_numpy: the same network in NumPy, from `numpy_network`.
        policy: the policy that acts or learns with the network.
    """

    def __init__(self, network: Network, in_numpy: NumpyNetwork | NumpyMasked, policy: Any) -> None:
        super().__init__(network, policy)
        self._network = in_numpy
        self._terms_of = loss_terms_of(policy.dist)
        why_not = "" if self._terms_of else "its action distribution has no closed form"
        self._closed_form = find_closed_form(policy, why_not or why_not_small(network))

    @property
    def learns_with(self) -> str:
        """See `Backend`."""
        return self._closed_form.described

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return self._network.action_params(obs)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return self._network.value(obs)

    def rows(self, columns: Rows) -> Rows:
        """See `Backend`. If the policy learns in NumPy, this method returns the arrays
        unchanged."""
        return columns if self._closed_form.active() else super().rows(columns)

    # An overflow here makes the gradient non-finite, and the weight updater skips such gradients.
    @np.errstate(all="ignore")
    def backward(self, rows: Rows) -> dict[str, float]:
        """See `Backend`."""
        closed_form = self._closed_form.active()
        if closed_form is None or self._terms_of is None:
            return super().backward(rows)
        params, values, done = self._network.forward(rows["obs"])
        terms = self._terms_of(params, rows["actions"], rows.get("action_dist_inputs"))
        gradients, stats = closed_form(self._policy, terms, values, rows)
        by_params = terms.vjp(gradients.log_prob, gradients.entropy, gradients.kl)
        self._network.backward(done, by_params, gradients.values)
        return dict(stats)
