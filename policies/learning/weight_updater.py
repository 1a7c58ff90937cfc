"""`WeightUpdater`: gradient clipping and the update of the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.schedules import Schedule
from polopt.policies.learning.torch_optimizers import TORCH_OPTIMIZERS, TorchOptimizer

#: Largest norm of an applied gradient. The square of a larger one overflows float32.
_MAX_NORM = 1e18


class WeightUpdater:
    """Applies the gradient in `flat.grads` to `flat.params`.

    It clips the gradient by its global norm, and then makes one step of the config's `torch.optim`
    algorithm. Each trained segment has its own torch optimizer and learning rate.

    Args:
        flat: the parameters and the gradient.
        config: the options of updates.
    """

    def __init__(self, flat: FlatParameters, config: PolicyConfig) -> None:
        self._flat = flat
        self._name = config.torch_optimizer
        self._optimizers: dict[str, TorchOptimizer] = {
            name: TORCH_OPTIMIZERS[self._name](flat.params[part], flat.grads[part])
            for name, part in flat.trained.items()
        }
        self.configure(config)

    def configure(self, config: PolicyConfig) -> None:
        """Makes the next update use the options of `config`. Only `torch_optimizer` must stay the
        same."""
        self._config = config
        self._lrs = {}
        for name, option in self._flat.lr_options.items():
            own = getattr(config, option)
            self._lrs[name] = Schedule(config.lr if own is None else own)

    def apply(
        self, env_steps: int, lr_scale: float, resting: Collection[str] = ()
    ) -> tuple[bool, dict[str, float]]:
        """Makes one update, unless the gradient is not finite.

        A gradient whose squares would overflow in the optimizer's state is skipped, too. Otherwise
        the weights or the state would become non-finite, and stay so.

        Args:
            env_steps: environment steps, on which the learning-rate schedules depend.
            lr_scale: factor on the learning rate. (Adam would cancel a factor on the gradient.)
            resting: segments that are not updated. Their gradient is 0, and their torch optimizer
                makes no step.

        Returns:
            whether the gradient was applied, and statistics: `grad_norm` (before clipping, only if
            it was applied) and `default_optimizer_learning_rate` (of the first segment).
        """
        norm = self._flat.norm()
        lrs = {name: lr(env_steps) * lr_scale for name, lr in self._lrs.items()}
        stats = {"default_optimizer_learning_rate": next(iter(lrs.values()))}
        clip = self._config.grad_clip
        if not math.isfinite(norm) or min(norm, clip or norm) > _MAX_NORM:
            return False, stats
        if clip is not None and norm > clip:
            self._flat.scale(clip / norm)
        for name, optimizer in self._optimizers.items():
            if name not in resting:
                optimizer.step(lrs[name], self._config)
        return True, {"grad_norm": norm, **stats}

    def get_state(self) -> dict[str, Any]:
        """The states of the torch optimizers: `{"adam": {"network": {"step": ..., ...}}}`."""
        states = {name: optimizer.get_state() for name, optimizer in self._optimizers.items()}
        return {self._name: states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copies a state from `get_state`. Ignores other keys of `state`. A segment that the state
        lacks begins without moments.

        Raises:
            ValueError: the state is from another algorithm, or for a different number of
                parameters.
        """
        if self._name not in state:
            found = [other for other in TORCH_OPTIMIZERS if other in state]
            raise ValueError(
                f"the state must be of torch_optimizer {self._name!r}; "
                f"got {', '.join(found) or 'none'}"
            )
        for name, optimizer in self._optimizers.items():
            optimizer.set_state(state[self._name].get(name, {}))
