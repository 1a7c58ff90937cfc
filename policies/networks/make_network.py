"""`make_network`: selects and makes the network for an observation space."""

from __future__ import annotations

from typing import Any

from gymnasium import Space, spaces

from polopt.common.action_mask import ActionMask
from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import (
    NATURE_FILTERS,
    NATURE_MIN_SIZE,
    SMALL_FILTERS,
    SMALL_MIN_SIZE,
    CNNNetwork,
    CombinedNetwork,
    ImageEncoder,
    MaskedNetwork,
    MLPNetwork,
)
from polopt.policies.networks.custom import make_custom
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.networks.network import Network
from polopt.policies.networks.observations import Part, parts_of


def make_network(
    observation_space: Space[Any],
    action_space: Space[Any],
    mask: ActionMask | None,
    num_params: int,
    gaussian: bool,
    config: ModelConfig,
) -> Network:
    """Makes the network for the encoded observations of a space.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        mask: the action mask, from `find_action_mask`.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: `conv_filters` is set, but no part of the observation has three dimensions, or
            an image is too small for the filters. Also raised for the errors of `make_custom`.
    """
    space = observation_space if mask is None else mask.rest
    if config.custom is None:
        network = _built_in(space, num_params, gaussian, config)
    else:
        options = config.custom_options
        network = make_custom(config.custom, options, space, action_space, num_params)
    return network if mask is None else MaskedNetwork(network, mask)


def _built_in(space: Space[Any], num_params: int, gaussian: bool, config: ModelConfig) -> Network:
    parts = parts_of(space)
    chosen = [(part, _image_encoder(part, config)) for part in parts]
    images = [encoder for _, encoder in chosen if encoder is not None]
    others = [part for part, encoder in chosen if encoder is None]
    if config.conv_filters and not images:
        raise ConfigError(
            f"key 'conv_filters': got {list(config.conv_filters)} for observations of shape "
            f"{_shape(space)}. Allowed: no filters, or observations of three dimensions"
        )
    if images and len(parts) == 1:
        return CNNNetwork(images[0], num_params, gaussian, config)
    if images or (len(parts) > 1 and any(part.is_bytes for part in parts)):
        return CombinedNetwork(images, others, num_params, gaussian, config)
    size = sum(part.size for part in parts)
    part = parts[0] if parts[0].is_bytes else None
    return MLPNetwork(size, num_params, gaussian, config, part)


def _image_encoder(part: Part, config: ModelConfig) -> ImageEncoder | None:
    """Returns the convolutions over a part of an observation. Returns None if this part has no
    convolutions."""
    shape = part.space.shape or ()
    if not isinstance(part.space, spaces.Box) or len(shape) != 3:
        return None
    filters, hiddens = config.conv_filters, config.post_fcnet_hiddens
    width = 512
    if filters is None:
        size = min(ImageEncoder(part, (), ()).image_size)
        if not part.is_image or size < SMALL_MIN_SIZE:
            return None
        large = size >= NATURE_MIN_SIZE
        filters, width = (NATURE_FILTERS, 512) if large else (SMALL_FILTERS, 128)
    if not filters:
        return None
    return ImageEncoder(part, filters, (width,) if hiddens is None else hiddens, config.layer_norm)


def _shape(space: Space[Any]) -> tuple[int, ...]:
    return tuple(space.shape) if isinstance(space, spaces.Box) else (spaces.utils.flatdim(space),)
