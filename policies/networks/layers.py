"""Orthogonally initialised layers. `LSTM` is long short-term memory (Hochreiter and Schmidhuber,
1997), reset between episodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)
#: Values of the config key `fcnet_activation`.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "linear": nn.Identity,
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


class LSTM(nn.Module):
    """One layer of LSTM cells. The state is one vector of hidden values followed by cell values.

    Initial weights are orthogonal, and initial biases are 0, as in CleanRL.

    Args:
        size_in: D, number of input features.
        cell_size: C, number of cells. This is also the number of output features.

    Attributes:
        state_size: 2 C, size of the state of one sequence.
    """

    def __init__(self, size_in: int, cell_size: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(size_in, cell_size)
        for name, parameter in self.cells.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter, 1.0)
            else:
                nn.init.zeros_(parameter)
        self.state_size = 2 * cell_size

    def forward(
        self, inputs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Processes B sequences of T steps.

        Args:
            inputs: `[T, B, D]`.
            state: `[B, 2 C]` before the first step.
            starts: `[T, B]` bool. True sets the state to 0 before this step. `None` means that no
                step resets the state.

        Returns:
            outputs `[T, B, C]`, and a dict of states `[B, 2 C]` by index of the step. The dict has
            the state after the last step, and the state after each step that precedes a reset of
            any sequence.
        """
        size = state.shape[1] // 2
        hidden, cells = state[None, :, :size].contiguous(), state[None, :, size:].contiguous()
        outputs, states = [], {}
        for start, stop in _stretches(starts, len(inputs)):
            if starts is not None:
                # A product with 0 would keep NaN.
                hidden = hidden.masked_fill(starts[start, :, None], 0.0)
                cells = cells.masked_fill(starts[start, :, None], 0.0)
            output, (hidden, cells) = self.cells(inputs[start:stop], (hidden, cells))
            outputs.append(output)
            states[stop - 1] = torch.cat([hidden[0], cells[0]], dim=1)
        return torch.cat(outputs), states


def _stretches(starts: Tensor | None, steps: int) -> list[tuple[int, int]]:
    """Splits the steps into intervals `(start, stop)` without a reset inside. One call of the LSTM
    for each interval is faster than one call for each step."""
    begins = [] if starts is None else starts.any(dim=1).nonzero()[:, 0].tolist()
    bounds = sorted({0, steps, *begins})
    return list(itertools.pairwise(bounds))
