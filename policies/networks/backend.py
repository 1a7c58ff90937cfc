"""`Backend`: computes the outputs and the gradients of a policy's network; `TorchBackend`.

A policy calls a `Backend` and does not depend on which one it is. `TorchBackend` supports every
network and loss; `fast_cpu.numpy_backend.NumpyBackend` is faster for small networks on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polopt.policies.networks.base import Network


class Backend(Protocol):
    """Computes outputs and gradients of one network."""

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` float32 of encoded observations `[N, ...]`."""

    def backward(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Adds the gradient of the mean loss of `rows` to the `.grad` of all parameters.

        Args:
            rows: `[B, ...]` columns; see `ActorCriticPolicy.loss`.

        Returns:
            learner statistics of the loss, with `total_loss`.
        """


class TorchBackend:
    """The `Backend` that supports every network and loss.

    Args:
        model: the network.
        device: device of the network.
        loss: `ActorCriticPolicy.loss`.
    """

    def __init__(
        self,
        model: Network,
        device: torch.device,
        loss: Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]],
    ) -> None:
        self._model = model
        self._device = device
        self._loss = loss

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        with torch.inference_mode():
            params = self._model.action_params(torch.as_tensor(obs, device=self._device))
        return params.cpu().numpy()

    def value(self, obs: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        with torch.inference_mode():
            values = self._model.value(torch.as_tensor(obs, device=self._device))
        return values.cpu().numpy()

    def backward(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """See `Backend`. The network is in training mode meanwhile, and else in evaluation mode."""
        self._model.train()
        try:
            loss, stats = self._loss(rows)
            loss.backward()
        finally:
            self._model.eval()
        stats["total_loss"] = loss
        return dict(zip(stats, torch.stack([*stats.values()]).tolist(), strict=True))
