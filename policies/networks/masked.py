"""`MaskedNetwork`: gives the probability 0 to actions that the action mask does not allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polopt.common.action_mask import MASKED_LOGIT, ActionMask
from polopt.policies.networks.network import Network, States


class MaskedNetwork(Network):
    """Wraps a network, and masks its logits with the action mask in the observation.

    Acting, log-probabilities, entropy, KL and exported models all use this network, so the mask
    applies to all of them. Masked logits have no gradient.

    Args:
        network: the network to wrap.
        mask: the position of the mask in observations.
        seen: True passes the mask to `network` as a part of the observation. False removes the mask
            from the observation first.

    Attributes:
        network: the wrapped network.
        place: the slice of the mask in an encoded observation.
        seen: the argument.
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
