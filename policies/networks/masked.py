"""`MaskedNetwork`: gives actions that are not allowed the probability 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polopt.common.action_mask import MASKED_LOGIT, ActionMask
from polopt.policies.networks.network import Network, States


class MaskedNetwork(Network):
    """A network whose logits are masked by the action mask in the observation.

    Acting, log-probabilities, entropy, KL and exported models all use this network, so all of them
    have the same mask. Masked logits have no gradient.

    Args:
        network: the network to mask.
        mask: where the mask is.
        seen: whether `network` gets whole observations. False: it gets them without the mask.

    Attributes:
        network: the network to mask.
        place: where the mask is in an encoded observation.
        seen: whether `network` gets whole observations.
    """

    def __init__(self, network: Network, mask: ActionMask, seen: bool = False) -> None:
        super().__init__()
        self.network = network
        self.place = mask.place
        self.seen = seen
        self.state_size = network.state_size

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        params, values = self.network(self._rest(obs))
        return self._masked(params, obs), values

    def action_params(self, obs: Tensor) -> Tensor:
        return self._masked(self.network.action_params(self._rest(obs)), obs)

    def value(self, obs: Tensor) -> Tensor:
        return self.network.value(self._rest(obs))

    def unroll(
        self, obs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, States]:
        params, values, states = self.network.unroll(self._rest(obs), state, starts)
        return self._masked(params, obs), values, states

    def _rest(self, obs: Tensor) -> Tensor:
        if self.seen:
            return obs
        before, after = obs[..., : self.place.start], obs[..., self.place.stop :]
        return torch.cat([before, after], dim=-1)

    def _masked(self, params: Tensor, obs: Tensor) -> Tensor:
        fill: Any = MASKED_LOGIT
        return params.masked_fill(obs[..., self.place] <= 0.5, fill)
