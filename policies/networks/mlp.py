"""`MLPNetwork`: multi-layer perceptrons over flattened observations."""

from __future__ import annotations

import math

from torch import Tensor, nn

from polopt.policies.networks.base import ActorCriticNetwork
from polopt.policies.networks.config import ModelConfig
from polopt.policies.networks.layers import mlp

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class MLPNetwork(ActorCriticNetwork):
    """Multi-layer perceptrons over flattened observations.

    Args:
        obs_size: D, size of one flattened observation.
        num_params: P, number of distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.
    """

    def __init__(self, obs_size: int, num_params: int, gaussian: bool, config: ModelConfig) -> None:
        widths = [obs_size, *config.fcnet_hiddens]
        activation = _ACTIVATIONS[config.fcnet_activation]
        super().__init__(
            lambda: (mlp(widths, activation), widths[-1]),
            num_params,
            gaussian,
            bool(config.vf_share_layers),
            config,
        )

    def prepare(self, obs: Tensor) -> Tensor:
        """`[B, D]` float32."""
        # -1 does not work for zero rows; `len(obs)` would be a constant of an exported graph.
        return obs.reshape(obs.shape[0], math.prod(obs.shape[1:])).float()
