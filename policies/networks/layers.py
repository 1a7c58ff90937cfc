"""Orthogonally initialised layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)
#: Values of the config key `fcnet_activation`.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
}


def initialised(layer: _Layer, gain: float) -> _Layer:
    """Initialises `layer` with orthogonal weights (Saxe et al., 2014) and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def linear(size_in: int, size_out: int, gain: float) -> nn.Linear:
    """An initialised linear layer."""
    return initialised(nn.Linear(size_in, size_out), gain)


def mlp(
    widths: Sequence[int], activation: type[nn.Module], layer_norm: bool = False
) -> nn.Sequential:
    """A multi-layer perceptron. Each linear layer is followed by the activation. With `layer_norm`,
    there is a layer normalisation before each activation.

    Args:
        widths: number of inputs, and then the number of outputs of each layer.
        activation: class of the activation.
        layer_norm: whether to normalise before each activation.
    """
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(widths):
        layers.append(linear(size_in, size_out, gain=2.0**0.5))
        if layer_norm:
            layers.append(nn.LayerNorm(size_out))
        layers.append(activation())
    return nn.Sequential(*layers)
