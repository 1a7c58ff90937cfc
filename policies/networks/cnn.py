"""`CNNNetwork`: convolutions over images (Mnih et al., 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polopt.common.config import ConfigError
from polopt.policies.networks.base import ActorCriticNetwork
from polopt.policies.networks.config import ConvFilter, ModelConfig
from polopt.policies.networks.layers import initialised, mlp

#: Channels, kernel size and stride of each layer (Mnih et al., 2015).
NATURE_FILTERS: tuple[ConvFilter, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
#: Smallest height and width that `NATURE_FILTERS` accept.
NATURE_MIN_SIZE = 36


class CNNNetwork(ActorCriticNetwork):
    """Convolutions over images, with ReLU.

    uint8 images are scaled to [0, 1] here, so that they are stored and sent as uint8.

    Args:
        obs_shape: shape of one image: `[C, H, W]`, or `[H, W, C]` if the last dimension is the
            smallest.
        filters: `(channels, kernel, stride)` of each convolution.
        num_params: P, number of distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: if a kernel is larger than its input.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        filters: tuple[ConvFilter, ...],
        num_params: int,
        gaussian: bool,
        config: ModelConfig,
    ) -> None:
        channels_last = obs_shape[2] < min(obs_shape[:2])
        image = (obs_shape[2], *obs_shape[:2]) if channels_last else obs_shape
        shared = config.vf_share_layers is not False
        super().__init__(
            lambda: _cnn(image, filters, config.post_fcnet_hiddens),
            num_params,
            gaussian,
            shared,
            config,
        )
        self.channels_last = channels_last

    def prepare(self, obs: Tensor) -> Tensor:
        """`[B, C, H, W]` float32; uint8 is scaled to [0, 1]."""
        scaled = obs.float() / 255.0 if obs.dtype == torch.uint8 else obs.float()
        return scaled.permute(0, 3, 1, 2) if self.channels_last else scaled


def _cnn(
    image: tuple[int, ...], filters: tuple[ConvFilter, ...], hiddens: tuple[int, ...]
) -> tuple[nn.Sequential, int]:
    channels, height, width = image
    layers: list[nn.Module] = []
    for channels_out, kernel, stride in filters:
        if kernel > min(height, width):
            raise ConfigError(
                f"key 'conv_filters': got {list(filters)} for an image of {image[1]} x {image[2]}; "
                f"the input of layer ({channels_out}, {kernel}, {stride}) is {height} x {width}. "
                "Allowed: kernels that are at most as large as their input"
            )
        conv = nn.Conv2d(channels, channels_out, kernel, stride)
        layers += [initialised(conv, gain=2.0**0.5), nn.ReLU()]
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        channels = channels_out
    widths = [channels * height * width, *hiddens]
    return nn.Sequential(*layers, nn.Flatten(), *mlp(widths, nn.ReLU)), widths[-1]
