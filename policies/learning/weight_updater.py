"""`WeightUpdater`: gradient clipping and the update of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polopt.policies.learning.config import PolicyConfig
from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.schedules import Schedule
from polopt.policies.learning.torch_optimizers import TORCH_OPTIMIZERS, TorchOptimizer

#: Largest norm of an applied gradient. The square of a larger one overflows float32.
_MAX_NORM = 1e18


class WeightUpdater:
    """Applies the gradient in `flat.grads` to `flat.params`.

    Clips it by global norm, then makes one step of the `torch.optim` algorithm of the config.

    Args:
        flat: parameters and gradient.
        config: options.

    Attributes:
        skipped: number of gradients that were not applied because they were not finite.
    """

    def __init__(self, flat: FlatParameters, config: PolicyConfig) -> None:
        self._flat = flat
        self._optimizer: TorchOptimizer = TORCH_OPTIMIZERS[config.torch_optimizer](
            flat.params, flat.grads
        )
        self.skipped = 0
        self.configure(config)

    def configure(self, config: PolicyConfig) -> None:
        """Uses the options of `config` from the next update on; `torch_optimizer` is fixed."""
        self._config = config
        self._lr = Schedule(config.lr)

    def apply(self, env_steps: int, lr_scale: float) -> tuple[bool, dict[str, float]]:
        """One update.

        Args:
            env_steps: argument of the learning-rate schedule.
            lr_scale: factor on the learning rate (Adam would cancel a factor on the gradient).

        Returns:
            whether the gradient was applied, and `grad_norm` (before clipping) and
            `default_optimizer_learning_rate`. A gradient that is not finite, or whose squares
            overflow in the optimizer's state, is not applied: the weights or the state would stay
            non-finite. `skipped` counts it.
        """
        norm = self._flat.norm()
        lr = self._lr(env_steps) * lr_scale
        clip = self._config.grad_clip
        if not math.isfinite(norm) or min(norm, clip or norm) > _MAX_NORM:
            self.skipped += 1
            return False, {"default_optimizer_learning_rate": lr}
        if clip is not None and norm > clip:
            self._flat.scale(clip / norm)
        self._optimizer.step(lr, self._config)
        return True, {"grad_norm": norm, "default_optimizer_learning_rate": lr}

    def get_state(self) -> dict[str, Any]:
        """State of the algorithm under its name, as in `{"adam": {"step": ..., ...}}`."""
        return {self._optimizer.name: self._optimizer.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copies a state from `get_state`; ignores other keys of `state`.

        Raises:
            ValueError: if it is of another algorithm, or of a different number of parameters.
        """
        name = self._optimizer.name
        if name not in state:
            found = [other for other in TORCH_OPTIMIZERS if other in state]
            raise ValueError(
                f"the state must be of torch_optimizer {name!r}; got {', '.join(found) or 'none'}"
            )
        self._optimizer.set_state(state[name])
