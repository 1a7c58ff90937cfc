"""`NumpyNetwork`: the forward and backward pass of an `MLPNetwork` or a `CNNNetwork` in NumPy.

The weights and gradients in NumPy share the memory of the torch tensors. For a small network, the
overhead of torch per operation costs several times as much as the arithmetic.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polopt.policies.fast_cpu.conv_layer import ConvLayer, FeaturesLayer, ImageShape, image_shape
from polopt.policies.fast_cpu.linear_layer import LinearLayer
from polopt.policies.fast_cpu.side_by_side import pays, side_by_side
from polopt.policies.networks.actor_critics import CNNNetwork, MLPNetwork

#: torch computes the derivative of ReLU in one pass in place, and takes half as long as NumPy. With
#: fewer numbers than this, a call of torch takes longer than the arithmetic.
_MANY_NUMBERS = 2**15
_THRESHOLD_BACKWARD: Any = torch.ops.aten.threshold_backward.grad_input


class Activations(NamedTuple):
    """The results of a forward pass, for the backward pass. There is one list each for the shared
    layers, the policy layers and the value layers. A list holds the input of the first layer, and
    the outputs of all layers, each `[B, width]`."""

    shared: list[np.ndarray]
    policy: list[np.ndarray]
    value: list[np.ndarray]


class NumpyNetwork:
    """Computes the outputs and the gradients of an `MLPNetwork` or a `CNNNetwork`.

    Args:
        network: a network on the CPU. If `backward` will be called, the parameters must already
            have a `.grad`. `FlatParameters` creates the `.grad` of all trained segments.
    """

    def __init__(self, network: MLPNetwork | CNNNetwork) -> None:
        relu = any(isinstance(module, nn.ReLU) for module in network.policy_trunk)
        policy, value = _weighted(network.policy_trunk), _weighted(network.value_trunk)
        image = image_shape(network.encoder) if isinstance(network, CNNNetwork) else None
        self._shared = Layers(policy if network.shared else [], relu, True, image)
        self._acting = Layers([*policy, network.policy_head], relu, image=image)
        own = slice(len(policy) if network.shared else 0, None)
        after = self._shared.image
        self._policy = Layers([*policy[own], network.policy_head], relu, image=after)
        self._value = Layers([*value[own], network.value_head], relu, image=after)
        #: The number of multiplications of a forward pass for one row.
        self.work = self._shared.work + self._policy.work + self._value.work
        self._is_image = image is not None
        self._parts = network.parts
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
        """Flattened and scaled observations `[B, D]`, stored as the first layer needs them."""
        if obs.ndim != 2:
            obs = obs.reshape(len(obs), math.prod(obs.shape[1:]))  # -1 fails for zero rows
        if self._is_image:
            obs = obs.T.astype(np.float32, order="C").T
        else:
            obs = obs.astype(np.float32, copy=False)
        for part in self._parts:
            scale: Any = part.scale
            if isinstance(scale, Tensor):
                scale = scale.numpy().reshape(-1)
            elif scale == 1.0:
                continue
            obs = obs * scale
        return obs

    def _with_log_std(self, head: np.ndarray) -> np.ndarray:
        if self._log_std is None:
            return head
        params = np.empty((len(head), 2 * head.shape[1]), dtype=np.float32)
        params[:, : head.shape[1]] = head
        params[:, head.shape[1] :] = self._log_std
        return params


class Layers:
    """A sequence of linear layers and convolutions, with an activation after each layer except the
    last one.

    Args:
        modules: the layers in torch. With an empty list, the output equals the input.
        relu: True for ReLU as the activation, False for tanh.
        activate_last: whether to also apply the activation after the last layer.
        image: the shape of the inputs, if they are images or the outputs of a convolution. The
            inputs are then stored as `conv_layer` says.

    Attributes:
        steps: the layers in NumPy.
        image: the shape of the outputs, if they are the outputs of a convolution.
        work: number of multiplications of a forward pass for one row.
    """

    def __init__(
        self,
        modules: list[nn.Linear | nn.Conv2d],
        relu: bool,
        activate_last: bool = False,
        image: ImageShape | None = None,
    ) -> None:
        self._relu = relu
        self._activated = len(modules) if activate_last else len(modules) - 1
        self.steps: list[ConvLayer | LinearLayer] = []
        for i, module in enumerate(modules):
            if isinstance(module, nn.Conv2d):
                assert image is not None
                conv = ConvLayer(module, image)
                image = conv.outputs
                self.steps.append(conv)
            else:
                kind = LinearLayer if image is None else FeaturesLayer
                self.steps.append(kind(module, relu and i < self._activated))
                image = None
        self.image = image
        self._with_tanh = [
            (step, i < self._activated and not relu) for i, step in enumerate(self.steps)
        ]
        linears = [step for step in self.steps if type(step) is LinearLayer]
        self._few = min((step.many for step in linears), default=0)
        if len(linears) < len(self.steps):
            self._few = 0  # `forward` computes convolutions
        self._acting = [
            (step.weight.T, step.bias, step.zeros, i < self._activated and not relu)
            for i, step in enumerate(linears)
        ]
        self.work = sum(step.work for step in self.steps)

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
                gradient = before_activation(gradient, done[i + 1], self._relu)
            onward = needed or i > 0
            if learn and onward and pays(work := len(gradient) * step.work):
                gradient, _ = side_by_side(
                    work,
                    partial(step.by_inputs, gradient),
                    partial(step.learn, gradient, done[i]),
                )
                continue
            if learn:
                step.learn(gradient, done[i])
            if onward:
                gradient = step.by_inputs(gradient)
        return gradient


def before_activation(gradient: np.ndarray, out: np.ndarray, relu: bool) -> np.ndarray:
    """The gradient with respect to the inputs of ReLU or tanh, `[B, N]`.

    Args:
        gradient: the gradient with respect to the outputs, `[B, N]`. The function may overwrite it.
        out: the outputs `[B, N]`.
        relu: True for ReLU, False for tanh.
    """
    if not relu:
        slope = out * out
        np.subtract(1.0, slope, out=slope)
        return np.multiply(gradient, slope, out=slope)
    if out.size < _MANY_NUMBERS:
        return gradient * (out > 0.0)
    found = torch.from_numpy(gradient)
    _THRESHOLD_BACKWARD(found, torch.from_numpy(out), 0.0, grad_input=found)
    return gradient


def flat_rows(obs: np.ndarray) -> np.ndarray:
    """Observations `[B, ...]` as float32 rows `[B, O]`."""
    # A shape of -1 fails for zero rows.
    return obs.reshape(len(obs), math.prod(obs.shape[1:])).astype(np.float32, copy=False)


def acting_layers(network: MLPNetwork) -> Layers:
    """The layers of a network that compute the distribution parameters. The parameter `log_std` is
    not included."""
    relu = any(isinstance(module, nn.ReLU) for module in network.policy_trunk)
    return Layers([*_weighted(network.policy_trunk), network.policy_head], relu)


def value_layers(network: MLPNetwork) -> Layers:
    """The layers of a network that compute the values."""
    relu = any(isinstance(module, nn.ReLU) for module in network.value_trunk)
    return Layers([*_weighted(network.value_trunk), network.value_head], relu)


def _weighted(trunk: nn.Sequential) -> list[nn.Linear | nn.Conv2d]:
    """The modules of a trunk that have weights."""
    return [module for module in trunk if isinstance(module, nn.Linear | nn.Conv2d)]
