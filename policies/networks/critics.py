"""Networks for continuous actions: an actor, and critics of observations and actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.common.config import ConfigError
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.model_config import Activation, ModelConfig, Widths
from polopt.policies.networks.network import Network
from polopt.policies.networks.observations import flattened


class CriticModelConfig(ModelConfig):
    """Options of the actor and the critics. These are the options of `ModelConfig` with other
    defaults.

    The actor and each critic are separate networks, and each network uses these options.
    `vf_share_layers`, `free_log_std` and `squash_actions` have no effect.
    """

    fcnet_hiddens: Widths = (256, 256)
    fcnet_activation: Activation = "relu"


class Critics(nn.Module):
    """K networks that compute Q-values of pairs of an observation and an action.

    Each network gets such a pair as one observation of a `Tuple` space. The second output of each
    network is the Q-value.

    Args:
        networks: the K networks.
    """

    def __init__(self, networks: list[Network]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, obs: Tensor, actions: Tensor, count: int | None = None) -> Tensor:
        """Q-values `[K, B]` of encoded observations `[B, ...]` and actions `[B, A]`. If `count` is
        given, only the first `count` networks are used, and K is `count`."""
        inputs = torch.cat([flattened(obs).float(), actions], dim=1)
        values = [network.value(inputs) for network in self.networks[:count]]  # type: ignore[operator]
        return torch.stack(values)


def make_actor(
    observation_space: Space[Any],
    action_space: spaces.Box,
    num_params: int,
    gaussian: bool,
    config: ModelConfig,
) -> Network:
    """Makes an actor. The first output of the actor is the distribution parameters `[B, P]`.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.

    Raises:
        ConfigError: the network has memory, or `make_network` raises this error.
    """
    network = make_network(
        observation_space, action_space, None, num_params, gaussian, _own(config)
    )
    return _without_memory(network)


def make_critics(
    observation_space: Space[Any], action_space: spaces.Box, count: int, config: ModelConfig
) -> Critics:
    """Makes `count` critics with separate weights. `make_actor` describes the other arguments and
    the errors."""
    size = int(np.prod(action_space.shape))
    actions = spaces.Box(-1.0, 1.0, (size,), np.float32)
    space = spaces.Tuple((observation_space, actions))
    networks = [
        _without_memory(make_network(space, action_space, None, 1, False, _own(config)))
        for _ in range(count)
    ]
    return Critics(networks)


def check_bounded(space: Space[Any], policy: str) -> None:
    """Checks that actions in [-1, 1] can be mapped to the action space.

    Raises:
        ConfigError: the space is not a Box of floats with finite bounds.
    """
    is_box = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not (is_box and np.isfinite(space.low).all() and np.isfinite(space.high).all()):  # type: ignore[attr-defined]
        raise ConfigError(
            f"action space {space} is not supported by policy {policy}. Allowed: a Box of floats "
            "with finite bounds, because critics get actions scaled to the range from -1 to 1. "
            "Policies for other spaces: 'dqn' (Discrete), 'ppo' (Discrete, MultiDiscrete, Box of "
            "floats)"
        )


def _own(config: ModelConfig) -> ModelConfig:
    """The options for an actor or a critic. These networks use only one of their two heads, so one
    shared trunk is enough."""
    return config.model_copy(update={"vf_share_layers": True, "free_log_std": False})


def _without_memory(network: Network) -> Network:
    if network.state_size:
        raise ConfigError(
            "key 'model': got a network with memory (use_lstm, or state_size of a custom network: "
            f"{network.state_size}). Allowed: a network without memory, because actor and critics "
            "learn from single transitions"
        )
    return network
