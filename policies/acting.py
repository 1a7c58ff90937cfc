"""`ActorCritic`: a network with a distribution, which acts and values; and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch
from gymnasium import Space
from torch import Tensor

from polopt.common.config import Config
from polopt.metrics.learner import LEARNER_KEYS
from polopt.policies.distributions.distributions import DiagGaussian, make_distribution
from polopt.policies.flat_parameters import FlatParameters
from polopt.policies.networks.models import ModelConfig, make_model
from polopt.policies.schedules import LearningRate, ScheduleValue
from polopt.policies.spaces import ObservationEncoder


class PolicyConfig(Config):
    """Options every policy has.

    Attributes:
        gamma: discount factor.
        lambda_: GAE's lambda (key `lambda`).
        lr: learning rate of Adam; a number or `[[environment steps, value], ...]`.
        adam_epsilon: Adam's epsilon.
        grad_clip: largest global norm of a gradient; None for no clipping.
        vf_loss_coeff: weight of the value loss, which is half the mean squared error.
        entropy_coeff: weight of the entropy bonus; a number or a schedule like `lr`.
        num_sgd_iter: epochs over each batch.
        sgd_minibatch_size: rows of a minibatch (of each worker, where workers learn); 0: all.
        standardize_advantages: to mean 0 and standard deviation 1 over the whole batch.
        model: the network.
    """

    gamma: float = pydantic.Field(0.99, ge=0.0, le=1.0)
    lambda_: float = pydantic.Field(1.0, ge=0.0, le=1.0, alias="lambda")
    lr: LearningRate = 1e-3
    adam_epsilon: float = pydantic.Field(1e-5, ge=1e-30, le=1e6)  # less is 0 in float32
    grad_clip: float | None = pydantic.Field(40.0, gt=0.0)
    vf_loss_coeff: float = pydantic.Field(0.5, ge=0.0, le=1e6)
    entropy_coeff: ScheduleValue = 0.01
    num_sgd_iter: int = pydantic.Field(1, ge=1, le=10**6)
    sgd_minibatch_size: int = pydantic.Field(0, ge=0)
    standardize_advantages: bool = False
    model: ModelConfig = ModelConfig()

    aliases: ClassVar[Mapping[str, str]] = {
        "lambda_": "lambda",
        "num_epochs": "num_sgd_iter",
        "minibatch_size": "sgd_minibatch_size",
        "lr_schedule": "lr",
        "entropy_coeff_schedule": "entropy_coeff",
    }


class ActorCritic:
    """Acts, in NumPy where the device is the CPU and the network has a NumPy twin, in torch
    elsewhere. All parameters are views of one flat tensor.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        config: options; here, those of the network.
        seed: of the initial weights.
        device: where the network is.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: PolicyConfig,
        seed: int,
        device: str,
    ) -> None:
        self.config = config
        self.encoder = ObservationEncoder(observation_space)
        self.dist = make_distribution(action_space, config.model.squash_actions)
        self.device = torch.device(device)
        self.model = self._seeded_model(seed).to(self.device)
        self.flat = FlatParameters(self.model, tail=len(LEARNER_KEYS) + 1)
        self._numpy = self.model.numpy_twin()

    def _seeded_model(self, seed: int) -> Any:
        # A fork keeps the caller's random numbers out of the weights, and ours out of the caller's.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            gaussian = isinstance(self.dist, DiagGaussian)
            encoder, model = self.encoder, self.config.model
            return make_model(encoder.shape, encoder.dtype, self.dist.num_params, gaussian, model)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""
        if self._numpy is not None:
            return self._numpy.action_params(obs)
        return self.torch_action_params(obs)

    def torch_action_params(self, obs: np.ndarray) -> np.ndarray:
        """The same through torch; what networks without a NumPy twin act with."""
        with torch.inference_mode():
            params: Tensor = self.model.action_params(torch.as_tensor(obs, device=self.device))
        return params.cpu().numpy()

    def compute_actions(
        self,
        obs: np.ndarray,
        state: Any = None,
        explore: bool = True,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        """Acts once, for users of a trained policy; the sampler draws its noise ahead instead.

        Args:
            obs: encoded observations `[N, ...]`.
            state: of a recurrent policy; passed through.
            explore: draw actions; False takes the mode.
            rng: what to draw from; without it a new generator.

        Returns:
            actions for the environment `[N, ...]`, the state, and `{"action_dist_inputs":
            [N, P], "actions": [N, ...]}`, the latter as the policy chose them.
        """
        params = self.action_params(obs)
        noise = None
        if explore:
            noise = self.dist.draw_noise(rng or np.random.default_rng(), len(obs))
        actions = self.dist.sample(params, noise)
        extra = {"action_dist_inputs": params, "actions": actions}
        return self.dist.to_env(actions), state, extra

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[B]` float32 of encoded observations `[B, ...]`."""
        if self._numpy is not None:
            return self._numpy.value(obs)
        with torch.inference_mode():
            values: Tensor = self.model.value(torch.as_tensor(obs, device=self.device))
        return values.cpu().numpy()

    def outputs(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """What a loss is made of: distribution parameters `[B, P]` and values `[B]` of encoded
        observations `[B, ...]`. Its gradient gets to the weights through them."""
        if self._numpy is not None and self._numpy.learns:
            return self._numpy.outputs(obs)
        params, values = self.model(obs)
        return params, values
