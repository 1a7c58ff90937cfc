"""`WeightUpdater` clips gradients and updates the weights.

`LearningProgress` counts the rows and the gradients from which a policy learns.

`Adam` and `RMSprop` work on one flat tensor. Their results equal the results of
`torch.optim.Adam(fused=True)` and of `torch.optim.RMSprop(foreach=False)` bit for bit. The
constructors of these two torch classes import torch's compiler, which takes about 2 s and loads 800
modules per process. So `RMSprop` calls the function `torch.optim.rmsprop.rmsprop` instead. `Adam`
calls the kernel of `torch.optim.adam.adam(fused=True)`, because the function itself would cost the
driver of A3C about 40 us more for each update. The kernel is the only private name of torch in this
file.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.rmsprop import rmsprop

from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.schedules import Schedule


@dataclasses.dataclass
class LearningProgress:
    """Counts the rows from which a policy object learns, and the gradients that it skips.

    Weights and checkpoints do not contain these counts.

    Attributes:
        gradient_rows: number of rows of all learners from which the gradient in `Policy.flat` was
            computed. Each update sets this number to 0.
        rows_applied: sum of `gradient_rows` over all gradients that were applied.
        skipped_updates: number of gradients that were not applied because they were not finite or
            too large (see `WeightUpdater.apply`).
        non_finite_gradients: number of gradients of this learner that were not finite, if several
            learners learn together. Each learner counts its own gradients, because the sum over all
            learners does not show which gradient was not finite.
    """

    gradient_rows: int = 0
    rows_applied: int = 0
    skipped_updates: int = 0
    non_finite_gradients: int = 0

    def count_update(self, applied: bool) -> None:
        """Counts one update whose gradient was computed from `gradient_rows` rows.

        Args:
            applied: True if the gradient was applied, False if it was skipped.
        """
        rows, self.gradient_rows = self.gradient_rows, 0
        if applied:
            self.rows_applied += rows
        else:
            self.skipped_updates += 1


class Updates:
    """What a policy object has learned since `Updates` was made.

        updates = Updates(policy)
        stats = policy.learn_on_batch(batch)
        print(updates.num, updates.rows)

    Args:
        policy: the policy. Its `version` counts its updates.

    Attributes:
        version: version of the weights when this object was made.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._before = dataclasses.replace(policy.progress)
        self.version: int = policy.version

    @property
    def num(self) -> int:
        """The number of updates."""
        return int(self._policy.version - self.version)

    @property
    def rows(self) -> int:
        """See `LearningProgress.rows_applied`."""
        return int(self._policy.progress.rows_applied - self._before.rows_applied)

    @property
    def skipped(self) -> int:
        """See `LearningProgress.skipped_updates`."""
        return int(self._policy.progress.skipped_updates - self._before.skipped_updates)

    @property
    def non_finite(self) -> int:
        """See `LearningProgress.non_finite_gradients`."""
        return int(self._policy.progress.non_finite_gradients - self._before.non_finite_gradients)


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
