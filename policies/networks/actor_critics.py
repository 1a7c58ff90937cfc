"""The networks of polopt, for an actor and a critic.

`MLPNetwork` has perceptrons over flattened observations, `CNNNetwork` convolutions over images
(Mnih et al., 2015), and `CombinedNetwork` both. `MaskedNetwork` gives the probability 0 to actions
that the action mask does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polopt.common.action_mask import MASKED_LOGIT, ActionMask
from polopt.common.config import ConfigError
from polopt.policies.networks.layers import ACTIVATIONS, initialised, mlp
from polopt.policies.networks.model_config import ConvFilter, ModelConfig
from polopt.policies.networks.network import ActorCriticNetwork, Network, States
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


#: Channels, kernel size and stride of each layer (Mnih et al., 2015).
NATURE_FILTERS: tuple[ConvFilter, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
#: Smallest height and width that `NATURE_FILTERS` accept.
NATURE_MIN_SIZE = 36
#: The convolution for smaller images, as Young and Tian (2019) use for MinAtar. They also use a
#: linear layer of 128 units after the convolution.
SMALL_FILTERS: tuple[ConvFilter, ...] = ((16, 3, 1),)
SMALL_MIN_SIZE = 3


class ImageEncoder(NamedTuple):
    """Convolutions and linear layers over one image, with ReLU.

    Attributes:
        part: the part of encoded observations that is the image.
        filters: channels, kernel and stride of each convolution. See `ModelConfig`.
        hiddens: widths of the linear layers after the convolutions.
        layer_norm: see `ModelConfig`.
    """

    part: Part
    filters: tuple[ConvFilter, ...]
    hiddens: tuple[int, ...]
    layer_norm: bool = False

    @property
    def image_size(self) -> tuple[int, ...]:
        """Height and width of the image."""
        shape = self.part.space.shape
        assert shape is not None
        return shape[:2] if self.channels_last else shape[1:]

    @property
    def channels_last(self) -> bool:
        """Whether the image is `[H, W, C]` instead of `[C, H, W]`. An image is `[H, W, C]` if its
        last dimension is the smallest, or if all dimensions are equal."""
        shape = self.part.space.shape
        assert shape is not None
        return shape[2] < min(shape[:2]) or len({*shape}) == 1

    def image(self, obs: Tensor) -> Tensor:
        """Takes the image from encoded observations, as `[B, C, H, W]` float32. Scales uint8
        images."""
        image = self.part.scaled(obs)
        return image.permute(0, 3, 1, 2) if self.channels_last else image

    def make(self) -> tuple[nn.Sequential, int]:
        """Makes new layers. Returns the layers and the number of their output features.

        Raises:
            ConfigError: a kernel is larger than its input.
        """
        shape = self.part.space.shape
        assert shape is not None
        channels = shape[2] if self.channels_last else shape[0]
        height, width = self.image_size
        size = f"{height} x {width}"
        layers: list[nn.Module] = []
        for filter_ in self.filters:
            channels_out, kernel, stride, *more = filter_
            padding = more[0] if more else 0
            if kernel > min(height, width) + 2 * padding:
                raise ConfigError(
                    f"key 'conv_filters': got {list(self.filters)} for an image of {size}; the "
                    f"input of layer {filter_} is {height} x {width}. Allowed: kernels that are at "
                    "most as large as their input"
                )
            conv = nn.Conv2d(channels, channels_out, kernel, stride, padding)
            layers.append(initialised(conv, gain=2.0**0.5))
            if self.layer_norm:
                layers.append(nn.GroupNorm(1, channels_out))  # one group with all channels
            layers.append(nn.ReLU())
            height = (height + 2 * padding - kernel) // stride + 1
            width = (width + 2 * padding - kernel) // stride + 1
            channels = channels_out
        widths = [channels * height * width, *self.hiddens]
        return nn.Sequential(*layers, nn.Flatten(), *mlp(widths, nn.ReLU, self.layer_norm)), widths[
            -1
        ]


class CNNNetwork(ActorCriticNetwork):
    """Convolutions and linear layers over one image, with ReLU.

    The network itself scales uint8 images to [0, 1]. So batches and messages hold uint8 images,
    which are smaller than images of floats.

    Args:
        encoder: the image and its layers.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: a kernel is larger than its input.
    """

    policy_trunk: nn.Sequential
    value_trunk: nn.Sequential

    def __init__(
        self, encoder: ImageEncoder, num_params: int, gaussian: bool, config: ModelConfig
    ) -> None:
        shared = config.vf_share_layers is not False
        super().__init__(encoder.make, num_params, gaussian, shared, config)
        self.encoder = encoder
        self.parts = (encoder.part,)

    def prepare(self, obs: Tensor) -> Tensor:
        """Converts encoded observations to `[B, C, H, W]` float32."""
        return self.encoder.image(obs)


class MaskedNetwork(Network):
    """Wraps a network, and masks its logits with the action mask in the observation.

    Acting, log-probabilities, entropy, KL and exported models all use this network, so the mask
    applies to all of them. Masked logits have no gradient.

    Args:
        network: the network to wrap.
        mask: the position of the mask in observations.
        seen: True passes the mask to `network` as a part of the observation. False removes the mask
            from the observation first.

    Attributes:
        network: the wrapped network.
        place: the slice of the mask in an encoded observation.
        seen: the argument.
    """

    def __init__(self, network: Network, mask: ActionMask, seen: bool = False) -> None:
        super().__init__()
        self.network = network
        self.place = mask.place
        self.seen = seen
        self.state_size = network.state_size

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        params, values = self.network(self._rest(obs))
        return self._masked(params, obs), values

    def action_params(self, obs: Tensor) -> Tensor:
        return self._masked(self.network.action_params(self._rest(obs)), obs)

    def value(self, obs: Tensor) -> Tensor:
        return self.network.value(self._rest(obs))

    def unroll(
        self, obs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, States]:
        params, values, states = self.network.unroll(self._rest(obs), state, starts)
        return self._masked(params, obs), values, states

    def _rest(self, obs: Tensor) -> Tensor:
        if self.seen:
            return obs
        before, after = obs[..., : self.place.start], obs[..., self.place.stop :]
        return torch.cat([before, after], dim=-1)

    def _masked(self, params: Tensor, obs: Tensor) -> Tensor:
        fill: Any = MASKED_LOGIT
        return params.masked_fill(obs[..., self.place] <= 0.5, fill)


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
