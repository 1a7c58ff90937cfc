"""Networks: perceptrons for vectors, convolutions for images."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic
import torch
from torch import Tensor, nn

from polopt.common.config import Config, ConfigError
from polopt.policies.fast_cpu.numpy_mlp import NumpyActorCritic

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
#: Channels, kernel and stride of each layer (Mnih et al., 2015).
NATURE_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
NATURE_MIN_SIZE = 36
_Width = Annotated[int, pydantic.Field(ge=1, le=16_384)]
_Filter = tuple[_Width, _Width, _Width]
_Widths = Annotated[tuple[_Width, ...], pydantic.Field(max_length=100)]


class ModelConfig(Config):
    """Options of the actor-critic network, under RLlib's names.

    Attributes:
        fcnet_hiddens: widths of the hidden layers.
        fcnet_activation: `tanh` or `relu`.
        conv_filters: `(channels, kernel, stride)` of each convolution over an image, `[C, H, W]` or
            `[H, W, C]`. None: those of Mnih et al. (2015) where the observation is an image of
            bytes of at least 36 x 36, which is the least they need, else no convolutions. Empty: no
            convolutions.
        post_fcnet_hiddens: widths of the layers between convolutions and heads.
        vf_share_layers: policy and value share the hidden layers. None: they do over images, where
            the convolutions are most of the cost.
        free_log_std: Box actions: the log standard deviation is a parameter of its own and does
            not depend on the observation.
        initial_log_std: what it starts at (as the bias, where it depends on the observation).
        squash_actions: Box actions are squashed to the box by tanh instead of clipped.
    """

    fcnet_hiddens: _Widths = (64, 64)
    fcnet_activation: Literal["tanh", "relu"] = "tanh"
    conv_filters: tuple[_Filter, ...] | None = None
    post_fcnet_hiddens: _Widths = (512,)
    vf_share_layers: bool | None = None
    free_log_std: bool = True
    initial_log_std: float = pydantic.Field(0.0, ge=-20.0, le=10.0)
    squash_actions: bool = False


class ActorCritic(nn.Module):
    """Trunks and heads for policy and value, orthogonally initialised (Saxe et al., 2014; gains as
    in Engstrom et al., 2020: sqrt(2) inside, 0.01 for the policy, 1 for the value).

    Args:
        make_trunk: a new trunk and the number of features that it gives.
        num_params: P, distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        shared: policy and value have one trunk between them.
        config: see `ModelConfig`.
    """

    def __init__(
        self,
        make_trunk: Callable[[], tuple[nn.Sequential, int]],
        num_params: int,
        gaussian: bool,
        shared: bool,
        config: ModelConfig,
    ) -> None:
        super().__init__()
        free_log_std = gaussian and config.free_log_std
        heads = num_params // 2 if free_log_std else num_params
        self.policy_trunk, width = make_trunk()
        self.policy_head = _linear(width, heads, gain=0.01)
        self.value_trunk = self.policy_trunk if shared else make_trunk()[0]
        self.value_head = _linear(width, 1, gain=1.0)
        self.log_std: nn.Parameter | None = None
        if free_log_std:
            self.log_std = nn.Parameter(torch.full((heads,), config.initial_log_std))
        elif gaussian:
            with torch.no_grad():
                self.policy_head.bias[heads // 2 :].fill_(config.initial_log_std)
        self.shared = shared

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, P]` and values `[B]` of observations `[B, ...]`."""
        obs = self._prepared(obs)
        hidden = self.policy_trunk(obs)
        value_hidden = hidden if self.shared else self.value_trunk(obs)
        return self._with_log_std(self.policy_head(hidden)), self.value_head(value_hidden)[:, 0]

    def action_params(self, obs: Tensor) -> Tensor:
        """Distribution parameters `[B, P]` alone, for acting."""
        return self._with_log_std(self.policy_head(self.policy_trunk(self._prepared(obs))))

    def value(self, obs: Tensor) -> Tensor:
        """Values `[B]` alone."""
        values: Tensor = self.value_head(self.value_trunk(self._prepared(obs)))
        return values[:, 0]

    def numpy_twin(self) -> NumpyActorCritic | None:
        """The same network in NumPy, in the same memory; None where that is not possible."""
        return None

    def _prepared(self, obs: Tensor) -> Tensor:
        """What the trunks take."""
        raise NotImplementedError

    def _with_log_std(self, head: Tensor) -> Tensor:
        if self.log_std is None:
            return head
        return torch.cat([head, self.log_std.expand_as(head)], dim=-1)


class MLPActorCritic(ActorCritic):
    """Multi-layer perceptrons over flattened observations.

    Args:
        obs_size: D, size of one flattened observation.
        num_params: P, distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.
    """

    def __init__(self, obs_size: int, num_params: int, gaussian: bool, config: ModelConfig) -> None:
        widths = [obs_size, *config.fcnet_hiddens]
        activation = _ACTIVATIONS[config.fcnet_activation]
        super().__init__(
            lambda: (_mlp(widths, activation), widths[-1]),
            num_params,
            gaussian,
            bool(config.vf_share_layers),
            config,
        )

    def _prepared(self, obs: Tensor) -> Tensor:
        return obs.reshape(len(obs), -1).float()

    def numpy_twin(self) -> NumpyActorCritic | None:
        """The same network in NumPy, in the same memory; None on a GPU."""
        if next(self.parameters()).device.type != "cpu":
            return None
        return NumpyActorCritic(self)


class CNNActorCritic(ActorCritic):
    """Convolutions over images (Mnih et al., 2015), with ReLU. Bytes are scaled to [0, 1] here, so
    that they travel and are stored as bytes.

    Args:
        obs_shape: of one image: `[C, H, W]`, or `[H, W, C]` where the last dimension is the
            smallest.
        filters: `(channels, kernel, stride)` of each convolution.
        num_params: P, distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: if a kernel is larger than what the layers before it leave of the image.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        filters: tuple[_Filter, ...],
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

    def _prepared(self, obs: Tensor) -> Tensor:
        scaled = obs.float() / 255.0 if obs.dtype == torch.uint8 else obs.float()
        return scaled.permute(0, 3, 1, 2) if self.channels_last else scaled


def _mlp(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(widths):
        layers += [_linear(size_in, size_out, gain=2.0**0.5), activation()]
    return nn.Sequential(*layers)


def _cnn(
    image: tuple[int, ...], filters: tuple[_Filter, ...], hiddens: tuple[int, ...]
) -> tuple[nn.Sequential, int]:
    channels, height, width = image
    layers: list[nn.Module] = []
    for channels_out, kernel, stride in filters:
        if kernel > min(height, width):
            raise ConfigError(
                f"key 'conv_filters': got {list(filters)} for an image of {image[1]} x {image[2]}; "
                f"the layer ({channels_out}, {kernel}, {stride}) finds {height} x {width} left"
            )
        conv = nn.Conv2d(channels, channels_out, kernel, stride)
        layers += [_initialised(conv, gain=2.0**0.5), nn.ReLU()]
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        channels = channels_out
    widths = [channels * height * width, *hiddens]
    return nn.Sequential(*layers, nn.Flatten(), *_mlp(widths, nn.ReLU)), widths[-1]


def _linear(size_in: int, size_out: int, gain: float) -> nn.Linear:
    return _initialised(nn.Linear(size_in, size_out), gain)


_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


def _initialised(layer: _Layer, gain: float) -> _Layer:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def make_model(
    obs_shape: tuple[int, ...],
    obs_dtype: np.dtype[Any],
    num_params: int,
    gaussian: bool,
    config: ModelConfig,
) -> ActorCritic:
    """The network for observations of this shape and dtype.

    Raises:
        ConfigError: for convolutions over what is no image, or is too small a one.
    """
    filters = config.conv_filters
    is_image = len(obs_shape) == 3 and obs_dtype == np.uint8
    if filters is None and is_image and sorted(obs_shape)[1] >= NATURE_MIN_SIZE:
        filters = NATURE_FILTERS
    if not filters:
        return MLPActorCritic(int(np.prod(obs_shape)), num_params, gaussian, config)
    if len(obs_shape) != 3:
        raise ConfigError(
            f"key 'conv_filters': got {list(filters)} for observations of shape {obs_shape}; "
            "allowed: none, or observations of three dimensions"
        )
    return CNNActorCritic(obs_shape, filters, num_params, gaussian, config)
