"""`Backend`: computes the outputs and the gradients of a policy's network.

`Backend` computes in torch, and supports every network and loss. An add-on may make a faster
subclass (see `AddOn.faster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.policies.networks.network import Network

#: Columns of a batch or a minibatch, by name. The values are arrays, or values from `Backend.rows`.
Rows = Mapping[str, Any]


class Backend:
    """Computes outputs and gradients of one network in torch.

        params = backend.action_params(obs)        # for acting
        rows = backend.rows(columns)               # once for each batch
        stats = backend.backward(rows)             # adds to the `.grad` of all parameters

    Args:
        model: the network.
        policy: the `NetworkPolicy` that acts or learns with the network. `backward` calls its
            `loss`.
        why_not: why no faster backend computes the gradients of this network.
    """

    def __init__(self, model: Network, policy: Any, why_not: str = "") -> None:
        self._model = model
        self._device: torch.device = policy.device
        self._policy = policy
        self._why_not = why_not

    @property
    def learns_with(self) -> str:
        """See `Policy.learns_with`."""
        return f"torch ({self._why_not})" if self._why_not else "torch"

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
        """Converts the columns of a batch to tensors on the device of the network, for `backward`.

        Columns that are not arrays stay unchanged. If a policy converts the columns of a batch
        once, it can cut all minibatches out of the result.
        """
        return {
            name: as_tensor(column, self._device) if isinstance(column, np.ndarray) else column
            for name, column in columns.items()
        }

    def backward(self, rows: Rows) -> dict[str, float]:
        """Adds the gradient of the mean loss of `rows` to the `.grad` of all parameters.

        The network is in training mode during this call, and in evaluation mode afterwards.

        Args:
            rows: columns `[B, ...]`, as arrays or from `Backend.rows`. See `NetworkPolicy.loss`.

        Returns:
            the learner statistics of the loss, and `total_loss`.
        """
        self._model.train()
        try:
            loss, stats = self._policy.loss(self.rows(rows))
            loss.backward()
        finally:
            self._model.eval()
        stats["total_loss"] = loss
        return dict(zip(stats, torch.stack([*stats.values()]).tolist(), strict=True))


def aligned(array: np.ndarray) -> np.ndarray:
    """Returns the array, or a copy if the array does not begin at a multiple of 16 bytes.

    Matrix products on a CPU round differently if an array is not aligned. The rows of one step of a
    fragment may not be aligned. Without the copy, the outputs of the sampler and of `predict` would
    differ in the last bit.
    """
    return array.copy() if array.ctypes.data % 16 else array


def as_tensor(array: np.ndarray, device: torch.device | None = None) -> Tensor:
    """Converts an array to a tensor. The tensor shares the memory of the array if possible."""
    # Arrays from Ray's object store are read-only, which torch does not support.
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device=device)
