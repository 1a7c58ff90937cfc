"""`PolicyConfig`: options of all policies that learn."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic

from polopt.common.config import Config
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.networks.model_config import ModelConfig


class PolicyConfig(Config):
    """Options of all policies that learn.

    Attributes:
        lr: the learning rate: a number, or a piecewise linear schedule `[[environment steps,
            value], ...]`.
        torch_optimizer: the algorithm of `torch.optim` that updates the weights, `adam` or
            `rmsprop`.
        adam_beta1: the decay of Adam's mean of gradients.
        adam_epsilon: the epsilon of Adam.
        rmsprop_alpha: the decay of RMSprop's mean of squared gradients.
        rmsprop_epsilon: the epsilon of RMSprop. torch adds epsilon after taking the root of the
            mean square. Mnih et al. (2016) add epsilon before taking the root.
        grad_clip: the largest global norm of a gradient. A larger gradient is scaled down to this
            norm. `None` disables clipping.
        fast_cpu: whether to use faster code that gives the same results up to rounding. With True,
            networks on the CPU act in NumPy if they are multi-layer perceptrons with tanh or ReLU,
            or convolutions over a small image, such as MinAtar's, without an LSTM and without layer
            normalisation. They also learn in NumPy if BLAS has one thread, the policy has a closed
            form of its loss gradients, and the network has at most 2,000,000 parameters.
            Environments that are stepped one after another also have faster code. With False,
            networks use torch, and environments use `SyncVectorEnv` of Gymnasium.
        normalize_actions: whether to map actions of the policy from [-1, 1] to the bounds of a Box.
            -1 becomes the lower bound, and 1 becomes the upper bound. Dimensions without two finite
            bounds are not mapped. The option has no effect on other spaces, together with
            `squash_actions`, and in SAC and TD3, which always map. RLlib has the same option.
        clip_actions: whether to clip actions to the bounds of a Box. With False, only the
            dimensions that `normalize_actions` maps are clipped. This option has no effect on other
            spaces, together with `squash_actions`, and in SAC and TD3. RLlib has the same
            option, and its default is False in newer versions.
        model: the options of the network.
    """

    lr: LearningRate = 1e-3
    torch_optimizer: Literal["adam", "rmsprop"] = "adam"
    adam_beta1: float = pydantic.Field(default=0.9, ge=0.0, lt=1.0)
    # An epsilon below this bound may be 0 in float32.
    adam_epsilon: float = pydantic.Field(default=1e-5, ge=1e-30, le=1e6)
    rmsprop_alpha: float = pydantic.Field(default=0.99, ge=0.0, lt=1.0)
    rmsprop_epsilon: float = pydantic.Field(default=1e-5, ge=1e-30, le=1e6)
    grad_clip: float | None = pydantic.Field(default=40.0, gt=0.0)
    fast_cpu: bool = True
    normalize_actions: bool = True
    clip_actions: bool = True
    model: ModelConfig = ModelConfig()

    #: Options that cannot be changed once the policy exists.
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "torch_optimizer",
        "fast_cpu",
        "normalize_actions",
        "clip_actions",
    )


class NormalizingConfig(PolicyConfig):
    """Options of policies that can normalise observations, in addition to `PolicyConfig`.

    Attributes:
        normalize_observations: whether to normalise each element of an observation by its running
            mean and standard deviation over all samples so far. See `docs/normalization.md`.
        clip_observations: the largest absolute value of a normalised observation. Larger values are
            clipped.
    """

    normalize_observations: bool = False
    clip_observations: float = pydantic.Field(default=10.0, gt=0.0, le=1e6)

    fixed: ClassVar[tuple[str, ...]] = (
        *PolicyConfig.fixed,
        "normalize_observations",
        "clip_observations",
    )

    @pydantic.model_validator(mode="after")
    def _refuse_bound_of_nothing(self) -> NormalizingConfig:
        for what in ("observations", "rewards"):
            bound = f"clip_{what}"
            field = type(self).model_fields.get(bound)
            if field is None or getattr(self, f"normalize_{what}"):
                continue
            if getattr(self, bound) != field.default:
                raise ValueError(
                    f"key {bound!r}: got {getattr(self, bound)} with normalize_{what}=False. "
                    f"Allowed: {field.default}, or normalize_{what}=True"
                )
        return self
