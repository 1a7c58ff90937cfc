"""Adam over one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class FlatAdam:
    """Adam (Kingma and Ba, 2015), bit for bit as `torch.optim.Adam(fused=True)` does it.

    That class imports torch's compiler when it is made, which takes each process a second and
    each update five times as long; this one calls the same fused kernel and nothing else.

    Args:
        params: `[P]`, changed in place.
        grads: `[P]`, read by each step.
        epsilon: Adam's epsilon.

    Attributes:
        epsilon: may be changed between steps.
    """

    def __init__(self, params: Tensor, grads: Tensor, epsilon: float) -> None:
        self._params = params.detach()
        self._grads = grads
        self.epsilon = epsilon
        self._step = torch.zeros((), device=params.device)
        # On the CPU NumPy adds one in a tenth of the time.
        self._count: Any = self._step.numpy() if params.device.type == "cpu" else self._step
        self._exp_avg = torch.zeros_like(self._params)
        self._exp_avg_sq = torch.zeros_like(self._params)

    def step(self, lr: float) -> None:
        """One update with learning rate `lr`."""
        self._count += 1
        torch._fused_adam_(
            [self._params],
            [self._grads],
            [self._exp_avg],
            [self._exp_avg_sq],
            [],
            [self._step],
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    def get_state(self) -> dict[str, Tensor]:
        """Copies on the CPU, under torch's names; nothing before the first step."""
        return {key: t.cpu().clone() for key, t in self._tensors().items() if self._step.item()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over copies of what `get_state` gave.

        Raises:
            ValueError: if it is of other parameters.
        """
        for key, tensor in self._tensors().items():
            given = state.get(key)
            if given is None:
                tensor.zero_()
            elif given.shape != tensor.shape:
                raise ValueError(
                    f"Adam's {key} must have shape {list(tensor.shape)}; got {list(given.shape)}"
                )
            else:
                tensor.copy_(given)

    def _tensors(self) -> dict[str, Tensor]:
        return {"step": self._step, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
