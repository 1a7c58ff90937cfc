"""`Backend`: computes the outputs and the gradients of a policy's network.

A policy calls it and does not depend on which one it is: this one, in torch, supports every network
and loss. `fast_cpu.numpy_backend.NumpyBackend` is faster for small networks on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.policies.networks.network import Network

#: Columns of a batch or a minibatch: arrays, or what `Backend.rows` makes of them.
Rows = Mapping[str, Any]
#: `ActorCriticPolicy.loss`.
Loss = Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


class Backend:
    """Computes outputs and gradients of one network, in torch: supports every network and loss.

    Args:
        model: the network.
        device: device of the network.
        loss: `ActorCriticPolicy.loss`.
    """

    def __init__(
        self,
        model: Network,
        device: torch.device,
        loss: Loss,
    ) -> None:
        self._model = model
        self._device = device
        self._loss = loss

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""
        with torch.inference_mode():
            params = self._model.action_params(as_tensor(aligned(obs), self._device))
        return params.cpu().numpy()

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]` float32 of encoded observations `[N, ...]`."""
        with torch.inference_mode():
            values = self._model.value(as_tensor(aligned(obs), self._device))
        return values.cpu().numpy()

    def unroll(
        self, obs: np.ndarray, state: np.ndarray, starts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Outputs of a network with memory. See `Network.unroll`."""
        device = self._device
        begins = None if starts is None else as_tensor(starts, device)
        with torch.inference_mode():
            params, values, states = self._model.unroll(
                as_tensor(aligned(obs), device), as_tensor(aligned(state), device), begins
            )
        return (
            params.cpu().numpy(),
            values.cpu().numpy(),
            {t: after.cpu().numpy() for t, after in states.items()},
        )

    def rows(self, columns: Rows) -> Rows:
        """The columns of a batch as `backward` uses them: here, tensors on the network's device.
        Called once for all minibatches, which are parts of what it returns."""
        return {
            name: as_tensor(column, self._device) if isinstance(column, np.ndarray) else column
            for name, column in columns.items()
        }

    def backward(self, rows: Rows) -> dict[str, float]:
        """Adds the gradient of the mean loss of `rows` to the `.grad` of all parameters. The
        network is in training mode meanwhile, and else in evaluation mode.

        Args:
            rows: `[B, ...]` columns, arrays or from `rows`. See `ActorCriticPolicy.loss`.

        Returns:
            learner statistics of the loss, with `total_loss`.
        """
        self._model.train()
        try:
            loss, stats = self._loss(self.rows(rows))
            loss.backward()
        finally:
            self._model.eval()
        stats["total_loss"] = loss
        return dict(zip(stats, torch.stack([*stats.values()]).tolist(), strict=True))


def aligned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of it that begins at a multiple of 16 bytes.

    Matrix products on a CPU round differently where an array does not, as the rows of one step of a
    fragment: the last bit of what the sampler and `predict` compute would differ.
    """
    return array.copy() if array.ctypes.data % 16 else array


def as_tensor(array: np.ndarray, device: torch.device | None = None) -> Tensor:
    """A tensor of the array, of its memory where possible."""
    # Arrays from Ray's object store are read-only, which torch does not support.
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device=device)
