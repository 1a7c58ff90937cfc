"""`FlatParameters`: one tensor of all parameters of a module, another of all gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class FlatParameters:
    """Moves a module's parameters into one flat vector, and its gradients into another.

    Each parameter becomes a view of `params`, and its `.grad` a view of `grads`, so that getting,
    setting, sending, clipping, all-reducing and updating each operate on one tensor.

    `buffer` has `tail` more elements than the gradient, for scalars that are summed over all
    learners in the same all-reduce (row counts, learner statistics).

    Args:
        module: its parameters are float32 and on one device.
        tail: number of additional elements.

    Attributes:
        params: `[P]`, an `nn.Parameter`.
        grads: `[P]` view of `buffer`.
        tail: `[tail]` view of `buffer`.
        buffer: `[P + tail]`.
    """

    def __init__(self, module: nn.Module, tail: int = 0) -> None:
        parameters = list(module.parameters())
        size = sum(p.numel() for p in parameters)
        flat = torch.empty(size, dtype=torch.float32, device=parameters[0].device)
        self.buffer = torch.zeros(size + tail, dtype=torch.float32, device=flat.device)
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            flat[offset:end].copy_(parameter.data.reshape(-1))
            parameter.data = flat[offset:end].view_as(parameter)
            parameter.grad = self.buffer[offset:end].view_as(parameter)
            offset = end
        self.params = nn.Parameter(flat)
        self.grads: Tensor = self.buffer[:size]
        self.params.grad = self.grads
        # torch's cost per operation would exceed that of the arithmetic on so few numbers.
        on_cpu = flat.device.type == "cpu"
        self._params: Any = flat.numpy() if on_cpu else flat
        self._all: Any = self.buffer.numpy() if on_cpu else self.buffer
        self._grads: Any = self._all[:size]
        self._tail: Any = self._all[size:]

    def get_params(self) -> np.ndarray:
        """A copy of the parameters, `[P]`."""
        return _copied(self._params)

    def get_grads(self) -> np.ndarray:
        """A copy of the gradient, `[P]`."""
        return _copied(self._grads)

    def set_params(self, array: np.ndarray) -> None:
        """Copies `array`, `[P]`, into the parameters.

        Raises:
            ValueError: if it has another shape.
        """
        if array.shape != tuple(self.params.shape):
            raise ValueError(
                f"weights must have shape {list(self.params.shape)}; got {list(array.shape)}: they "
                "belong to another network"
            )
        _copy_into(self._params, array)

    def set_grads(self, array: np.ndarray) -> None:
        """Copies `array`, `[P]`, into the gradient."""
        _copy_into(self._grads, array)

    def zero_grads(self) -> None:
        """Sets gradient and tail to zero in place (`.grad = None` would remove the views)."""
        self._all[:] = 0.0

    @np.errstate(over="ignore", invalid="ignore")  # the result is then not finite
    def norm(self) -> float:
        """Euclidean norm of the gradient; inf if its square overflows float32."""
        if isinstance(self._grads, Tensor):
            return float(torch.linalg.vector_norm(self._grads))
        return math.sqrt(float(np.dot(self._grads, self._grads)))

    def scale(self, factor: float) -> None:
        """Multiplies gradient and tail by `factor`."""
        self._all *= factor

    def set_tail(self, values: list[float]) -> None:
        """Copies `values`, `[tail]`, into the tail."""
        self._tail[:] = torch.tensor(values) if isinstance(self._tail, Tensor) else values

    def get_tail(self) -> list[float]:
        """A copy of the tail, `[tail]`."""
        tail: list[float] = self._tail.tolist()
        return tail


def _copied(numbers: Any) -> np.ndarray:
    copy: np.ndarray = numbers.cpu().numpy() if isinstance(numbers, Tensor) else numbers.copy()
    return copy


def _copy_into(numbers: Any, array: np.ndarray) -> None:
    if isinstance(numbers, Tensor):
        # Arrays from Ray's object store are read-only, which `torch.from_numpy` does not support.
        numbers.copy_(torch.tensor(array))
    else:
        np.copyto(numbers, array)
