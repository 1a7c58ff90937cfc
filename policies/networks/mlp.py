"""`MLPNetwork`: multi-layer perceptrons over flattened observations."""

from __future__ import annotations

from torch import Tensor, nn

from polopt.policies.networks.layers import ACTIVATIONS, mlp
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.networks.network import ActorCriticNetwork
from polopt.policies.networks.observations import Part, flattened


class MLPNetwork(ActorCriticNetwork):
    """Multi-layer perceptrons over flattened observations.

    Args:
        obs_size: D, size of one flattened observation.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.
        image: the observation, if it is one uint8 image, which the network must scale. `None` means
            that the network does not scale observations.
    """

    policy_trunk: nn.Sequential
    value_trunk: nn.Sequential

    def __init__(
        self,
        obs_size: int,
        num_params: int,
        gaussian: bool,
        config: ModelConfig,
        image: Part | None = None,
    ) -> None:
        widths = [obs_size, *config.fcnet_hiddens]
        activation = ACTIVATIONS[config.fcnet_activation]
        super().__init__(
            lambda: (mlp(widths, activation, config.layer_norm), widths[-1]),
            num_params,
            gaussian,
            bool(config.vf_share_layers),
            config,
        )
        self.image = image
        self.parts = () if image is None else (image,)

    def prepare(self, obs: Tensor) -> Tensor:
        """Flattens and scales encoded observations to `[B, D]` float32."""
        return flattened(obs if self.image is None else self.image.scaled(obs)).float()
