"""`CombinedNetwork`: a network for observations that consist of images and other parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polopt.policies.networks.cnn import ImageEncoder
from polopt.policies.networks.layers import ACTIVATIONS, mlp
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.networks.network import ActorCriticNetwork
from polopt.policies.networks.observations import Part, flattened


class CombinedNetwork(ActorCriticNetwork):
    """Separate convolutions for each image of an observation, and an MLP over all features.

    The MLP gets the features of all images and the other parts of the observation, flattened and
    concatenated. (`CombinedExtractor` of Stable-Baselines3 does the same.)

    Args:
        images: the encoders of those parts of the observation that have convolutions.
        others: the other parts of the observation.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: a kernel is larger than its input.
    """

    def __init__(
        self,
        images: Sequence[ImageEncoder],
        others: Sequence[Part],
        num_params: int,
        gaussian: bool,
        config: ModelConfig,
    ) -> None:
        shared = config.vf_share_layers
        super().__init__(
            lambda: _trunk(images, others, config),
            num_params,
            gaussian,
            bool(images) if shared is None else shared,
            config,
        )
        self.images = images
        self.others = others
        self.parts = (*(encoder.part for encoder in images), *others)

    def prepare(self, obs: Tensor) -> list[Tensor]:
        """Splits encoded observations into the images, each `[B, C, H, W]` float32. If there are
        other parts, the last element of the list is one tensor `[B, D]` float32 of these parts."""
        others = [flattened(part.scaled(obs)) for part in self.others]
        images = [encoder.image(obs) for encoder in self.images]
        return [*images, torch.cat(others, dim=1)] if others else images


class _Trunk(nn.Module):
    """Concatenates the features of images with the other inputs, and passes them to an MLP."""

    def __init__(self, images: Sequence[nn.Sequential], joint: nn.Sequential) -> None:
        super().__init__()
        self.images = nn.ModuleList(images)
        self.joint = joint

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        given = len(self.images)
        pairs = zip(self.images, inputs[:given], strict=True)
        features = [layers(image) for layers, image in pairs]
        joined: Tensor = self.joint(torch.cat([*features, *inputs[given:]], dim=1))
        return joined


def _trunk(
    images: Sequence[ImageEncoder], others: Sequence[Part], config: ModelConfig
) -> tuple[_Trunk, int]:
    made = [encoder.make() for encoder in images]
    size = sum(features for _, features in made) + sum(part.size for part in others)
    widths = [size, *config.fcnet_hiddens]
    joint = mlp(widths, ACTIVATIONS[config.fcnet_activation], config.layer_norm)
    return _Trunk([layers for layers, _ in made], joint), widths[-1]
