"""Batch renormalisation (Ioffe, 2017), and multi-layer perceptrons with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import MLPNetwork


class BatchRenorm(nn.Module):
    """Normalises each feature, and then scales and shifts it with trained parameters.

    In training mode, the layer normalises with the mean and variance of the batch, and moves its
    running mean and variance towards them. After `warm_up` batches, it corrects the result towards
    the running mean and variance, within the bounds `r_max` and `d_max`. In evaluation mode, it
    normalises with the running mean and variance.

    Args:
        size: D, number of features.
        momentum: how far each batch moves the running mean and variance, as a fraction.
        epsilon: added to each variance.
        r_max: largest ratio of the two standard deviations, and of its inverse.
        d_max: largest difference of the two means, in running standard deviations.
        warm_up: number of batches without correction.
    """

    mean: Tensor
    variance: Tensor
    num_batches: Tensor

    def __init__(
        self,
        size: int,
        momentum: float = 0.01,
        epsilon: float = 1e-3,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warm_up: int = 100_000,
    ) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.r_max, self.d_max, self.warm_up = r_max, d_max, warm_up
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("num_batches", torch.zeros(()))  # counts exactly up to 2^24

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalises inputs `[B, D]`."""
        if not self.training:
            scale = self.weight * (self.variance + self.epsilon).rsqrt()
            return (inputs - self.mean) * scale + self.bias
        mean, variance = inputs.mean(0), inputs.var(0, correction=0)
        deviation = (variance + self.epsilon).sqrt()
        with torch.no_grad():
            running = (self.variance + self.epsilon).sqrt()
            corrects = (self.num_batches >= self.warm_up).float()
            ratio = (deviation / running).clamp(1.0 / self.r_max, self.r_max)
            shift = ((mean - self.mean) / running).clamp(-self.d_max, self.d_max)
            ratio, shift = 1.0 + corrects * (ratio - 1.0), corrects * shift
            # In place, because these tensors are views of the flat parameters.
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance, self.momentum)
            self.num_batches.add_(1.0)
        return ((inputs - mean) / deviation * ratio + shift) * self.weight + self.bias


def add_batch_renorm(network: nn.Module) -> None:
    """Adds a `BatchRenorm` before the first layer of a multi-layer perceptron, and after each
    activation.

    Raises:
        ConfigError: the network is not a multi-layer perceptron, or has layer normalisation.
    """
    if type(network) is not MLPNetwork:
        raise ConfigError(
            f"key 'model': got a {type(network).__name__}. Allowed with batch normalisation: "
            "multi-layer perceptrons, for observations that are vectors"
        )
    if any(isinstance(layer, nn.LayerNorm) for layer in network.policy_trunk):
        raise ConfigError(
            "key 'model.layer_norm': got True. Allowed: False, because the network has batch "
            "normalisation"
        )
    layers: list[Any] = list(network.policy_trunk)
    first = layers[0].in_features if layers else network.policy_head.in_features
    trunk: list[nn.Module] = [BatchRenorm(first)]
    for linear, activation in zip(layers[::2], layers[1::2], strict=True):
        trunk += [linear, activation, BatchRenorm(linear.out_features)]
    network.policy_trunk = network.value_trunk = nn.Sequential(*trunk)
