"""`CNNNetwork`: convolutions over images (Mnih et al., 2015)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from polopt.common.config import ConfigError
from polopt.policies.networks.layers import initialised, mlp
from polopt.policies.networks.model_config import ConvFilter, ModelConfig
from polopt.policies.networks.network import ActorCriticNetwork
from polopt.policies.networks.observations import Part

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
