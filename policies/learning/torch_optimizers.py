"""Adam and RMSprop of `torch.optim` over one flat tensor.

The results equal the results of `torch.optim.Adam(fused=True)` and of
`torch.optim.RMSprop(foreach=False)` bit for bit. The constructors of these two torch classes import
torch's compiler, which takes about 2 s and loads 800 modules per process. So `RMSprop` calls the
function `torch.optim.rmsprop.rmsprop` instead. `Adam` calls the kernel of
`torch.optim.adam.adam(fused=True)`, because the function itself would cost the driver of A3C about
40 us more for each update. The kernel is the only private name of torch in this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.rmsprop import rmsprop

from polopt.policies.learning.policy_config import PolicyConfig


class TorchOptimizer(ABC):
    """One algorithm of `torch.optim` for one flat tensor, with the state of the algorithm.

    Args:
        params: `[P]`. Each step updates this tensor in place.
        grads: `[P]`. Each step reads this tensor.
        moments: names of the state tensors `[P]` in torch, such as `exp_avg`.

    Attributes:
        name: value of the option `torch_optimizer`, and key of the state in checkpoints.
    """

    name: str

    def __init__(self, params: Tensor, grads: Tensor, *moments: str) -> None:
        self.params = params.detach()
        self.grads = grads
        self.count = torch.zeros((), device=params.device)
        self.moments = {moment: torch.zeros_like(self.params) for moment in moments}

    @abstractmethod
    def step(self, lr: float, config: PolicyConfig) -> None:
        """Makes one update with learning rate `lr`. `config` has the options of the algorithm."""

    def get_state(self) -> dict[str, Tensor]:
        """Returns copies of the state tensors on the CPU, by their names in torch. The dict is
        empty before the first step."""
        return {key: t.cpu().clone() for key, t in self._tensors().items() if self.count.item()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state from `get_state`. Tensors that are missing in the state are set to 0.

        Raises:
            ValueError: the state belongs to another number of parameters.
        """
        for key, tensor in self._tensors().items():
            given = state.get(key)
            if given is None:
                tensor.zero_()
            elif given.shape != tensor.shape:
                raise ValueError(
                    f"{key} of {self.name} must have shape {list(tensor.shape)}; "
                    f"got {list(given.shape)}"
                )
            else:
                tensor.copy_(given)

    def _tensors(self) -> dict[str, Tensor]:
        return {"step": self.count, **self.moments}


class Adam(TorchOptimizer):
    """`torch.optim.Adam(fused=True)` (Kingma and Ba, 2015)."""

    name = "adam"

    def __init__(self, params: Tensor, grads: Tensor) -> None:
        super().__init__(params, grads, "exp_avg", "exp_avg_sq")
        # On the CPU, `_steps` shares the memory of `count`, because NumPy adds 1 ten times faster
        # than torch.
        self._steps: Any = self.count.numpy() if params.device.type == "cpu" else self.count

    def step(self, lr: float, config: PolicyConfig) -> None:
        self._steps += 1
        torch._fused_adam_(
            [self.params],
            [self.grads],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self.count],
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=0.999,
            lr=lr,
            weight_decay=0.0,
            eps=config.adam_epsilon,
            maximize=False,
        )


class RMSprop(TorchOptimizer):
    """`torch.optim.RMSprop` without momentum (Tieleman and Hinton, 2012)."""

    name = "rmsprop"

    def __init__(self, params: Tensor, grads: Tensor) -> None:
        super().__init__(params, grads, "square_avg")

    def step(self, lr: float, config: PolicyConfig) -> None:
        rmsprop(
            [self.params],
            [self.grads],
            [self.moments["square_avg"]],
            [],
            [],
            [self.count],
            foreach=False,
            lr=lr,
            alpha=config.rmsprop_alpha,
            eps=config.rmsprop_epsilon,
            weight_decay=0.0,
            momentum=0.0,
            centered=False,
        )


TORCH_OPTIMIZERS: dict[str, Any] = {cls.name: cls for cls in (Adam, RMSprop)}
