"""Copies the convolutions of RLlib's default `RLModule`s for `load_rl_module`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import CNNNetwork

_CNN = re.compile(r"encoder\.(\w+)\.(tokenizer\.)?net\.0\.cnn")
_SIDES = {"encoder": "policy", "actor_encoder": "policy", "critic_encoder": "value"}


def cnns_of(module: Any) -> dict[str, nn.Sequential]:
    """Returns the convolutions of a module. The keys are `policy`, and also `value` if the policy
    and the value function do not share their convolutions. Returns an empty dict if the module has
    no convolutions.

    Raises:
        ConfigError: the module has an LSTM after the convolutions.
    """
    found: dict[str, nn.Sequential] = {}
    for name, part in module.named_modules():
        if match := _CNN.fullmatch(name):
            if match[2]:
                raise ConfigError(
                    "the module has an LSTM after convolutions. Allowed: either an LSTM or "
                    "convolutions, because polopt's networks with memory have linear layers"
                )
            found[_SIDES[match[1]]] = part
    return found


def filters_of(cnn: nn.Sequential) -> list[tuple[int, int, int, int]]:
    """Returns the `conv_filters` of a network of polopt that computes the same as RLlib's layers.

    RLlib uses the padding of TensorFlow, which may be larger by one on the right than on the left.
    The network of polopt uses the larger padding on both sides. Its kernel then begins with an
    additional row and column of zeros, which keeps the results equal.

    Raises:
        ConfigError: the networks of polopt cannot have a layer like one of `cnn`.
    """
    return [
        (conv.out_channels, conv.kernel_size[0] + extra, conv.stride[0], right)
        for conv, extra, right in _layers(cnn)
    ]


def copy_cnns(module: Any, cnns: dict[str, nn.Sequential], network: CNNNetwork) -> None:
    """Copies the convolutions and the heads of a module into a network. The network must be made
    with the result of `filters_of`, without layers between the convolutions and the heads.

    Raises:
        ConfigError: the observations of the network are not images of shape `[H, W, C]`.
    """
    if not network.encoder.channels_last:
        raise ConfigError(
            f"the module has observations {module.observation_space}. RLlib reads them as [height, "
            "width, channels]. Allowed: at least as many rows and columns as channels"
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
            # In RLlib, features are ordered by row, column and channel. In polopt, the channel is
            # first.
            weights = theirs.weight.reshape(len(theirs.weight), *size, -1).permute(0, 3, 1, 2)
            head.weight.copy_(weights.reshape(head.weight.shape))
            head.bias.copy_(theirs.bias)
        log_std = getattr(module.pi, "log_std", None)
        if log_std is not None and network.log_std is not None:
            network.log_std.copy_(log_std)


def _layers(cnn: nn.Sequential) -> Iterator[tuple[nn.Conv2d, int, int]]:
    """Yields each convolution, the number of rows (and of columns) of zeros to add to its kernel,
    and its padding."""
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
                    f"the module has {layer} with padding {before}. Allowed: the same kernel size, "
                    "stride and padding for rows and columns, and at least as much padding on the "
                    "right as on the left"
                )
            yield layer, right - left, right
            before = (0, 0, 0, 0)
        elif not isinstance(layer, nn.ReLU):
            raise ConfigError(
                f"the module has {type(layer).__name__} among its convolutions. Allowed: "
                "convolutions with ReLU (conv_activation='relu') and without normalisation"
            )
