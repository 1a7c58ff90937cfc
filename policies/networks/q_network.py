"""Networks of Q-values.

`QNetwork` computes the Q-values of all actions, with or without a dueling architecture. For
continuous actions, an actor chooses the action, and critics compute the Q-values of observations
and actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.common.action_mask import ActionMask
from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import MaskedNetwork
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.model_config import Activation, ModelConfig, Widths
from polopt.policies.networks.network import Network
from polopt.policies.networks.observations import flattened

#: Why actors and critics cannot have memory, for an error.
_ONE_STEP = "actor and critics learn from single transitions"


class QModelConfig(ModelConfig):
    """Options of a Q-network. These are the options of `ModelConfig` with other defaults.

    By default, the state value and the advantages of a dueling network share the hidden layers.
    """

    fcnet_activation: Activation = "relu"
    vf_share_layers: bool | None = True


class QNetwork(Network):
    """Computes Q-values `[B, n]` of n actions from the outputs of another network.

    With dueling (Wang et al., 2016), the other network computes advantages A `[B, n]` and the state
    value V `[B]`. Then `Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)`. Without dueling, the first
    output of the other network is Q, and the second output is not used for Q.

    Args:
        network: the other network, with outputs `[B, n]` and `[B]`.
        dueling: whether the outputs are A and V.
    """

    def __init__(self, network: Network, dueling: bool) -> None:
        super().__init__()
        self.network = network
        self.dueling = dueling

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Q-values `[B, n]`, and the second output of the other network `[B]`."""
        q, values = self.network(obs)
        if self.dueling:
            q = q + (values - q.mean(-1))[:, None]
        return q, values

    def action_params(self, obs: Tensor) -> Tensor:
        if self.dueling:
            return self(obs)[0]
        return self.network.action_params(obs)


def make_q_network(
    observation_space: Space[Any],
    action_space: Space[Any],
    mask: ActionMask | None,
    num_actions: int,
    dueling: bool,
    config: ModelConfig,
) -> QNetwork | MaskedNetwork:
    """Makes a Q-network for encoded observations. An action that the mask does not allow gets the
    value `MASKED_LOGIT`, a large negative number.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        mask: the action mask, from `find_action_mask`.
        num_actions: n, the number of actions.
        dueling: see `QNetwork`.
        config: see `ModelConfig`.

    Raises:
        ConfigError: the network has memory, or `make_network` raises this error.
    """
    space = observation_space if mask is None else mask.rest
    network = make_network(space, action_space, None, num_actions, False, config)
    q_network = QNetwork(_without_memory(network, "Q-networks do not support memory"), dueling)
    return q_network if mask is None else MaskedNetwork(q_network, mask)


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
    return _without_memory(network, _ONE_STEP)


def make_critics(
    observation_space: Space[Any], action_space: spaces.Box, count: int, config: ModelConfig
) -> Critics:
    """Makes `count` critics with separate weights. `make_actor` describes the other arguments and
    the errors."""
    size = int(np.prod(action_space.shape))
    actions = spaces.Box(-1.0, 1.0, (size,), np.float32)
    space = spaces.Tuple((observation_space, actions))
    networks = [
        _without_memory(make_network(space, action_space, None, 1, False, _own(config)), _ONE_STEP)
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
            "Policies for other spaces: 'sac' (Discrete), 'dqn' (Discrete), 'ppo' (Discrete, "
            "MultiDiscrete, Box of floats)"
        )


def _own(config: ModelConfig) -> ModelConfig:
    """The options for an actor or a critic. These networks use only one of their two heads, so one
    shared trunk is enough."""
    return config.model_copy(update={"vf_share_layers": True, "free_log_std": False})


def _without_memory(network: Network, why: str) -> Network:
    if network.state_size:
        raise ConfigError(
            "key 'model': got a network with memory (use_lstm, or state_size of a custom network: "
            f"{network.state_size}). Allowed: a network without memory, because {why}"
        )
    return network
