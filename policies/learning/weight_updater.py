"""`WeightUpdater`: clips gradients and updates the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.schedules import Schedule
from polopt.policies.learning.torch_optimizers import TORCH_OPTIMIZERS, TorchOptimizer

#: Largest norm of an applied gradient, after clipping. The squares of the elements of a larger
#: gradient may overflow float32.
_MAX_NORM = 1e18


class WeightUpdater:
    """Applies the gradient in `flat.grads` to `flat.params`.

    The updater clips the gradient by its global norm. Then it makes one step of the `torch.optim`
    algorithm that the option `torch_optimizer` names. Each trained segment has its own torch
    optimizer and learning rate.

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
        """Sets the options for the following updates. `config` must have the same
        `torch_optimizer` as before."""
        self._config = config
        self._lrs = {}
        for name, option in self._flat.lr_options.items():
            own = getattr(config, option)
            self._lrs[name] = Schedule(config.lr if own is None else own)

    def apply(
        self, env_steps: int, lr_scale: float, resting: Collection[str] = ()
    ) -> tuple[bool, dict[str, float]]:
        """Makes one update, or skips the gradient if it is not finite.

        The method also skips a gradient whose squares would overflow in the state of the torch
        optimizer. Such a gradient would make the weights or the state non-finite forever.

        Args:
            env_steps: number of environment steps, for the learning-rate schedules.
            lr_scale: factor on the learning rate. (A factor on the gradient would have no effect in
                Adam.)
            resting: names of segments that are not updated. The gradient of these segments is 0,
                and their torch optimizers make no step.

        Returns:
            whether the gradient was applied, and statistics. `grad_norm` is the norm before
            clipping, and is missing if the gradient was skipped. `default_optimizer_learning_rate`
            is the learning rate of the first segment.
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
        """Returns the states of the torch optimizers, such as `{"adam": {"network": {"step": ...,
        ...}}}`."""
        states = {name: optimizer.get_state() for name, optimizer in self._optimizers.items()}
        return {self._name: states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`. Reads only the key of the current algorithm, such as
        `adam`, and ignores all other keys of `state`. If a segment is missing in the state, its
        torch optimizer is reset.

        Raises:
            ValueError: the state belongs to another algorithm or to another number of parameters.
        """
        if self._name not in state:
            found = [other for other in TORCH_OPTIMIZERS if other in state]
            raise ValueError(
                f"the state must be of torch_optimizer {self._name!r}; "
                f"got {', '.join(found) or 'none'}"
            )
        for name, optimizer in self._optimizers.items():
            optimizer.set_state(state[self._name].get(name, {}))
