"""Selection of the network for an observation space."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.common.config import ConfigError
from polopt.policies.networks.base import ActorCriticNetwork
from polopt.policies.networks.cnn import NATURE_FILTERS, NATURE_MIN_SIZE, CNNNetwork
from polopt.policies.networks.config import ModelConfig
from polopt.policies.networks.mlp import MLPNetwork


def make_network(
    obs_shape: tuple[int, ...],
    obs_dtype: np.dtype[Any],
    num_params: int,
    gaussian: bool,
    config: ModelConfig,
) -> ActorCriticNetwork:
    """The network for observations of this shape and dtype.

    Args:
        obs_shape: shape of one encoded observation.
        obs_dtype: its dtype.
        num_params: P, number of distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: for convolutions over observations that are not images, or over images that
            are too small.
    """
    filters = config.conv_filters
    is_image = len(obs_shape) == 3 and obs_dtype == np.uint8
    if filters is None and is_image and sorted(obs_shape)[1] >= NATURE_MIN_SIZE:
        filters = NATURE_FILTERS
    if not filters:
        return MLPNetwork(int(np.prod(obs_shape)), num_params, gaussian, config)
    if len(obs_shape) != 3:
        raise ConfigError(
            f"key 'conv_filters': got {list(filters)} for observations of shape {obs_shape}. "
            "Allowed: none, or observations of three dimensions"
        )
    return CNNNetwork(obs_shape, filters, num_params, gaussian, config)
