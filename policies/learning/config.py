"""`PolicyConfig`: options that all policies have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import pydantic

from polopt.common.config import Config
from polopt.policies.learning.schedules import LearningRate, ScheduleValue
from polopt.policies.networks.config import ModelConfig


class PolicyConfig(Config):
    """Options that all policies have.

    Attributes:
        gamma: discount factor.
        lambda_: lambda of GAE (key `lambda`).
        lr: learning rate; a number or `[[environment steps, value], ...]`.
        torch_optimizer: `adam` or `rmsprop`, the `torch.optim` algorithm that updates the weights.
        adam_epsilon: epsilon of Adam.
        rmsprop_alpha: decay of RMSprop's mean of squared gradients.
        rmsprop_epsilon: epsilon of RMSprop. torch adds it to the root of the mean square; Mnih et
            al. (2016) add theirs, 0.1, to the mean square before the root.
        grad_clip: largest global norm of a gradient; None disables clipping.
        vf_loss_coeff: weight of the value loss, which is half the mean squared error.
        entropy_coeff: weight of the entropy bonus; a number or a schedule like `lr`.
        num_sgd_iter: epochs over each batch.
        sgd_minibatch_size: rows of a minibatch (per worker, where workers learn); 0: all rows.
        standardize_advantages: to mean 0 and standard deviation 1 over the whole batch.
        fast_cpu: small multi-layer perceptrons on the CPU act in NumPy and, if the policy has a
            closed form of its loss gradients, learn in NumPy; False: always torch.
        model: the network.
    """

    gamma: float = pydantic.Field(0.99, ge=0.0, le=1.0)
    lambda_: float = pydantic.Field(1.0, ge=0.0, le=1.0, alias="lambda")
    lr: LearningRate = 1e-3
    torch_optimizer: Literal["adam", "rmsprop"] = "adam"
    adam_epsilon: float = pydantic.Field(1e-5, ge=1e-30, le=1e6)  # smaller values are 0 in float32
    rmsprop_alpha: float = pydantic.Field(0.99, ge=0.0, lt=1.0)
    rmsprop_epsilon: float = pydantic.Field(1e-5, ge=1e-30, le=1e6)
    grad_clip: float | None = pydantic.Field(40.0, gt=0.0)
    vf_loss_coeff: float = pydantic.Field(0.5, ge=0.0, le=1e6)
    entropy_coeff: ScheduleValue = 0.01
    num_sgd_iter: int = pydantic.Field(1, ge=1, le=10**6)
    sgd_minibatch_size: int = pydantic.Field(0, ge=0)
    standardize_advantages: bool = False
    fast_cpu: bool = True
    model: ModelConfig = ModelConfig()

    aliases: ClassVar[Mapping[str, str]] = {
        "lambda_": "lambda",
        "num_epochs": "num_sgd_iter",
        "minibatch_size": "sgd_minibatch_size",
        "lr_schedule": "lr",
        "entropy_coeff_schedule": "entropy_coeff",
    }
