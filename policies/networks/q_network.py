"""`QNetwork`: computes the Q-values of all actions, with or without a dueling architecture."""

from __future__ import annotations

from typing import Any

from gymnasium import Space
from torch import Tensor

from polopt.common.action_mask import ActionMask
from polopt.common.config import ConfigError
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.masked import MaskedNetwork
from polopt.policies.networks.model_config import Activation, ModelConfig
from polopt.policies.networks.network import Network


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
    if network.state_size:
        raise ConfigError(
            f"key 'model': got a network with memory (use_lstm, or state_size of a custom network: "
            f"{network.state_size}). Allowed: a network without memory, because Q-networks do "
            "not support memory"
        )
    q_network = QNetwork(network, dueling)
    return q_network if mask is None else MaskedNetwork(q_network, mask)
