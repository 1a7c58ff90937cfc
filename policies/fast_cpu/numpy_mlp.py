"""`NumpyMLP`: the forward and backward pass of an `MLPNetwork` in NumPy.

The weights and gradients in NumPy share the memory of the torch tensors. For a small network, the
overhead of torch per operation costs several times as much as the arithmetic.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from polopt.policies.fast_cpu.linear_layer import LinearLayer
from polopt.policies.fast_cpu.side_by_side import side_by_side
from polopt.policies.networks.actor_critics import MLPNetwork


class Activations(NamedTuple):
    """The results of a forward pass, for the backward pass. There is one list each for the shared
    layers, the policy layers and the value layers. A list holds the input of the first layer, and
    the outputs of all layers, each `[B, width]`."""

    shared: list[np.ndarray]
    policy: list[np.ndarray]
    value: list[np.ndarray]


class NumpyMLP:
    """Computes the outputs and the gradients of an `MLPNetwork`.

    Args:
        network: a network on the CPU. If `backward` will be called, the parameters must already
            have a `.grad`. `FlatParameters` creates the `.grad` of all trained segments.
    """

    def __init__(self, network: MLPNetwork) -> None:
        relu = any(isinstance(module, nn.ReLU) for module in network.policy_trunk)
        policy, value = _linears(network.policy_trunk), _linears(network.value_trunk)
        self._shared = Layers(policy if network.shared else [], relu, activate_last=True)
        self._acting = Layers([*policy, network.policy_head], relu)
        own = slice(len(policy) if network.shared else 0, None)
        self._policy = Layers([*policy[own], network.policy_head], relu)
        self._value = Layers([*value[own], network.value_head], relu)
        #: The number of multiplications of a forward pass for one row.
        self.work = self._shared.work + self._policy.work + self._value.work
        self._image = network.image
        self._log_std: np.ndarray | None = None
        if network.log_std is not None:
            self._log_std = network.log_std.detach().numpy()
            if network.log_std.grad is not None:
                self._log_std_grad = network.log_std.grad.numpy()

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` of observations `[N, ...]`."""
        return self._with_log_std(self._acting(self._flat(obs)))

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` of observations `[N, ...]`."""
        return self._value(self._shared(self._flat(obs)))[:, 0]

    def forward(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, Activations]:
        """Computes distribution parameters `[B, P]`, values `[B]`, and the activations for
        `backward`."""
        shared = self._shared.forward(self._flat(obs))
        policy, value = side_by_side(
            len(obs) * min(self._policy.work, self._value.work),
            partial(self._policy.forward, shared[-1]),
            partial(self._value.forward, shared[-1]),
        )
        done = Activations(shared, policy, value)
        return self._with_log_std(policy[-1]), value[-1][:, 0], done

    def backward(
        self, done: Activations, by_params: np.ndarray, by_values: np.ndarray | None
    ) -> None:
        """Adds the gradients of all weights to the `.grad` of the weights.

        Args:
            done: activations from `forward`.
            by_params: gradient of the loss with respect to the distribution parameters, `[B, P]`.
            by_values: gradient of the loss with respect to the values, `[B]`. `None` means that the
                loss does not depend on the values.
        """
        if self._log_std is not None:
            size = len(self._log_std)
            self._log_std_grad += np.add.reduce(by_params[:, size:], axis=0)
            by_params = by_params[:, :size]
        needed = bool(self._shared.steps)
        by_outputs: list[Any] = [partial(self._policy.backward, done.policy, by_params, needed)]
        if by_values is not None:
            by_outputs.append(partial(self._value.backward, done.value, by_values[:, None], needed))
        work = len(by_params) * min(self._policy.work, self._value.work)
        by_shared = side_by_side(work, *by_outputs)
        if needed:
            self._shared.backward(done.shared, sum(by_shared[1:], by_shared[0]), needed=False)

    def _flat(self, obs: np.ndarray) -> np.ndarray:
        if obs.ndim != 2:
            obs = obs.reshape(len(obs), math.prod(obs.shape[1:]))  # -1 fails for zero rows
        obs = obs.astype(np.float32, copy=False)
        if self._image is None:
            return obs
        scale = self._image.scale
        return obs * (scale.numpy().reshape(-1) if isinstance(scale, Tensor) else scale)

    def _with_log_std(self, head: np.ndarray) -> np.ndarray:
        if self._log_std is None:
            return head
        params = np.empty((len(head), 2 * head.shape[1]), dtype=np.float32)
        params[:, : head.shape[1]] = head
        params[:, head.shape[1] :] = self._log_std
        return params


class Layers:
    """A sequence of linear layers, with an activation after each layer except the last one.

    Args:
        linears: the layers. With an empty list, the output equals the input.
        relu: True for ReLU as the activation, False for tanh.
        activate_last: whether to also apply the activation after the last layer.
    """

    def __init__(self, linears: list[nn.Linear], relu: bool, activate_last: bool = False) -> None:
        self._relu = relu
        self._activated = len(linears) if activate_last else len(linears) - 1
        self.steps = [
            LinearLayer(linear, relu and i < self._activated) for i, linear in enumerate(linears)
        ]
        self._with_tanh = [
            (step, i < self._activated and not relu) for i, step in enumerate(self.steps)
        ]
        self._few = min((step.many for step in self.steps), default=0)
        self._acting = [
            (step.weight.T, step.bias, step.zeros, tanh) for step, tanh in self._with_tanh
        ]
        #: The number of multiplications of a forward pass for one row.
        self.work = sum(step.weight.size for step in self.steps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Computes outputs `[N, out]` from inputs `[N, in]`."""
        if len(x) >= self._few:
            return self.forward(x)[-1]
        # The same as `forward`, but faster for the few rows of one environment step.
        for transposed, bias, zeros, has_tanh in self._acting:
            x = x.dot(transposed)
            x += bias
            if zeros is not None:
                np.maximum(x, zeros, out=x)
            elif has_tanh:
                np.tanh(x, out=x)
        return x

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Returns a list of the input and the outputs of all layers."""
        done = [x]
        for step, has_tanh in self._with_tanh:
            x = step(x)
            if has_tanh:
                np.tanh(x, out=x)
            done.append(x)
        return done

    def backward(
        self, done: list[np.ndarray], gradient: np.ndarray, needed: bool, learn: bool = True
    ) -> np.ndarray:
        """Adds the gradients of the weights and biases to their `.grad`.

        Args:
            done: the list from `forward`.
            gradient: gradient of the loss with respect to the outputs, `[B, out]`.
            needed: whether to compute the gradient with respect to the inputs.
            learn: whether to add the gradients of the weights and biases. With False, the method
                only computes the gradient with respect to the inputs.

        Returns:
            the gradient with respect to the inputs, `[B, in]`. The result is undefined if `needed`
            is False.
        """
        for i in reversed(range(len(self.steps))):
            step = self.steps[i]
            if i < self._activated:
                gradient = gradient * slope(done[i + 1], self._relu)
            onward = needed or i > 0
            if learn and onward:
                gradient, _ = side_by_side(
                    len(gradient) * step.weight.size,
                    partial(step.by_inputs, gradient),
                    partial(step.learn, gradient, done[i]),
                )
            elif learn:
                step.learn(gradient, done[i])
            elif onward:
                gradient = step.by_inputs(gradient)
        return gradient


def slope(out: np.ndarray, relu: bool) -> np.ndarray:
    """The derivative of ReLU or tanh, from the outputs of ReLU or tanh."""
    return out > 0.0 if relu else 1.0 - out * out


def flat_rows(obs: np.ndarray) -> np.ndarray:
    """Observations `[B, ...]` as float32 rows `[B, O]`."""
    # A shape of -1 fails for zero rows.
    return obs.reshape(len(obs), math.prod(obs.shape[1:])).astype(np.float32, copy=False)


def acting_layers(network: MLPNetwork) -> Layers:
    """The layers of a network that compute the distribution parameters. The parameter `log_std` is
    not included."""
    relu = any(isinstance(module, nn.ReLU) for module in network.policy_trunk)
    return Layers([*_linears(network.policy_trunk), network.policy_head], relu)


def value_layers(network: MLPNetwork) -> Layers:
    """The layers of a network that compute the values."""
    relu = any(isinstance(module, nn.ReLU) for module in network.value_trunk)
    return Layers([*_linears(network.value_trunk), network.value_head], relu)


def _linears(trunk: nn.Sequential) -> list[nn.Linear]:
    return [module for module in trunk if isinstance(module, nn.Linear)]
