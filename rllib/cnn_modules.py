"""Weights of the convolutions of RLlib's default `RLModule`s, for `load_rl_module`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.cnn import CNNNetwork

_CNN = re.compile(r"encoder\.(\w+)\.(tokenizer\.)?net\.0\.cnn")
_SIDES = {"encoder": "policy", "actor_encoder": "policy", "critic_encoder": "value"}


def cnns_of(module: Any) -> dict[str, nn.Sequential]:
    """The convolutions of a module by trunk. The keys are `policy`, and `value` if the trunks are
    not shared. Empty if the module has no convolutions.

    Raises:
        ConfigError: an LSTM follows them.
    """
    found: dict[str, nn.Sequential] = {}
    for name, part in module.named_modules():
        if match := _CNN.fullmatch(name):
            if match[2]:
                raise ConfigError(
                    "the module has an LSTM after convolutions. Allowed: one of them, because "
                    "polopt's networks with memory have linear layers"
                )
            found[_SIDES[match[1]]] = part
    return found


def filters_of(cnn: nn.Sequential) -> list[tuple[int, int, int, int]]:
    """`conv_filters` of a network of polopt that can compute what RLlib's layers compute.

    RLlib pads as TensorFlow does, on the right by at most one more than on the left. The same is a
    kernel that begins with a row and a column of zeros, with the larger padding on both sides.

    Raises:
        ConfigError: polopt has no such layer.
    """
    return [
        (conv.out_channels, conv.kernel_size[0] + extra, conv.stride[0], right)
        for conv, extra, right in _layers(cnn)
    ]


def copy_cnns(module: Any, cnns: dict[str, nn.Sequential], network: CNNNetwork) -> None:
    """Copies convolutions and heads into a network with `filters_of` and no layers between them.

    Raises:
        ConfigError: the image of the network is not `[H, W, C]`.
    """
    if not network.encoder.channels_last:
        raise ConfigError(
            f"the module has observations {module.observation_space}. RLlib reads them as height, "
            "width, channels. Allowed: at least as many rows and columns as channels"
        )
    height, width = network.encoder.image_size
    with torch.no_grad():
        for side, cnn in cnns.items():
            size: tuple[int, ...] = (height, width)
            convs: list[Any] = [
                one for one in getattr(network, f"{side}_trunk") if type(one) is nn.Conv2d
            ]
            for own, (conv, extra, _) in zip(convs, _layers(cnn), strict=True):
                own.weight.zero_()
                own.weight[:, :, extra:, extra:] = conv.weight
                own.bias.zero_() if conv.bias is None else own.bias.copy_(conv.bias)
                size = tuple(
                    (length + 2 * own.padding[0] - own.kernel_size[0]) // own.stride[0] + 1
                    for length in size
                )
        for name, head in (("pi", network.policy_head), ("vf", network.value_head)):
            theirs = getattr(module, name).net.mlp[0]
            # RLlib's features are ordered by row, column and channel.
            weights = theirs.weight.reshape(len(theirs.weight), *size, -1).permute(0, 3, 1, 2)
            head.weight.copy_(weights.reshape(head.weight.shape))
            head.bias.copy_(theirs.bias)
        log_std = getattr(module.pi, "log_std", None)
        if log_std is not None and network.log_std is not None:
            network.log_std.copy_(log_std)


def _layers(cnn: nn.Sequential) -> Iterator[tuple[nn.Conv2d, int, int]]:
    """Each convolution, the rows of zeros that its kernel begins with, and its padding."""
    before = (0, 0, 0, 0)
    for layer in cnn:
        if isinstance(layer, nn.ZeroPad2d):
            before = layer.padding
        elif isinstance(layer, nn.Conv2d):
            left, right, top, bottom = before
            square = layer.kernel_size[0] == layer.kernel_size[1]
            square &= layer.stride[0] == layer.stride[1] and (left, right) == (top, bottom)
            if not square or right < left:
                raise ConfigError(
                    f"the module has {layer} with padding {before}. Allowed: kernels, strides and "
                    "paddings that are the same for rows and columns"
                )
            yield layer, right - left, right
            before = (0, 0, 0, 0)
        elif not isinstance(layer, nn.ReLU):
            raise ConfigError(
                f"the module has {type(layer).__name__} among its convolutions. Allowed: ReLU "
                "after each (conv_activation='relu'), no normalisation"
            )
