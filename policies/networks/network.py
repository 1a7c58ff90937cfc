"""`Network`: the interface of networks. `ActorCriticNetwork`: base class of built-in networks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polopt.policies.networks.layers import LSTM, linear
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.networks.observations import Part

#: The memory `[B, S]` after some of the steps, by index of the step. These steps include the last
#: step, and each step after which the memory of a sequence is reset.
States = dict[int, Tensor]


class Network(nn.Module, ABC):
    """Computes distribution parameters and values from encoded observations.

        params, values = network(obs)                            # without memory
        params, values, states = network.unroll(obs, state)      # with memory

    Attributes:
        state_size: S, size of the memory of one environment. 0 for a network without memory. A
            network with memory computes outputs only in `unroll`.
    """

    state_size: int = 0

    @abstractmethod
    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, P]` and values `[B]` of observations `[B, ...]`."""

    def action_params(self, obs: Tensor) -> Tensor:
        """Distribution parameters `[B, P]` only. Built-in networks then skip the values."""
        params: Tensor = self(obs)[0]
        return params

    def value(self, obs: Tensor) -> Tensor:
        """Values `[B]` only."""
        values: Tensor = self(obs)[1]
        return values

    def unroll(
        self, obs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, States]:
        """Computes the outputs of a network with memory, for B sequences of T steps.

        Args:
            obs: `[T, B, ...]`.
            state: memory `[B, S]` before the first step.
            starts: `[T, B]` bool. True sets the memory to 0 before this step. `None` means that no
                step resets the memory.

        Returns:
            distribution parameters `[T, B, P]`, values `[T, B]`, and memory. See `States`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory")


class ActorCriticNetwork(Network):
    """Trunks (hidden layers), an optional LSTM, and linear heads for policy and value.

    Linear layers, convolutions and the LSTM are orthogonally initialised. The gains follow Engstrom
    et al. (2020): sqrt(2) for hidden layers, 0.01 for the policy head, and 1 for the value head.
    The gain of the LSTM is 1. A subclass passes `make_trunk` to the constructor, and defines
    `prepare`.

    Args:
        make_trunk: returns a new trunk and the number of its output features.
        num_params: P, number of distribution parameters for one observation.
        gaussian: whether the second half of the parameters are log standard deviations.
        shared: whether policy and value share one trunk.
        config: options of the LSTM and the heads. See `ModelConfig`.

    Attributes:
        parts: the parts of the observation that `prepare` scales.
    """

    parts: tuple[Part, ...] = ()

    def __init__(
        self,
        make_trunk: Callable[[], tuple[nn.Module, int]],
        num_params: int,
        gaussian: bool,
        shared: bool,
        config: ModelConfig,
    ) -> None:
        super().__init__()
        free_log_std = gaussian and config.free_log_std
        heads = num_params // 2 if free_log_std else num_params
        self.policy_trunk, width = make_trunk()
        self.policy_memory: LSTM | None = None
        if config.use_lstm:
            self.policy_memory = LSTM(width, config.lstm_cell_size)
            self.value_memory = self.policy_memory if shared else LSTM(width, config.lstm_cell_size)
            width = config.lstm_cell_size
        self.state_size = 2 * config.lstm_cell_size * (2 - shared) if config.use_lstm else 0
        self.policy_head = linear(width, heads, gain=0.01)
        self.value_trunk = self.policy_trunk if shared else make_trunk()[0]
        self.value_head = linear(width, 1, gain=1.0)
        self.log_std: nn.Parameter | None = None
        if free_log_std:
            self.log_std = nn.Parameter(torch.full((heads,), config.initial_log_std))
        elif gaussian:
            with torch.no_grad():
                self.policy_head.bias[heads // 2 :].fill_(config.initial_log_std)
        self.shared = shared

    @abstractmethod
    def prepare(self, obs: Tensor) -> Any:
        """Converts encoded observations `[B, ...]` to the input of the trunks."""

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.prepare(obs)
        hidden = self.policy_trunk(inputs)
        value_hidden = hidden if self.shared else self.value_trunk(inputs)
        return self._with_log_std(self.policy_head(hidden)), self.value_head(value_hidden)[:, 0]

    def action_params(self, obs: Tensor) -> Tensor:
        return self._with_log_std(self.policy_head(self.policy_trunk(self.prepare(obs))))

    def value(self, obs: Tensor) -> Tensor:
        values: Tensor = self.value_head(self.value_trunk(self.prepare(obs)))
        return values[:, 0]

    def unroll(
        self, obs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, States]:
        assert self.policy_memory is not None
        inputs = self.prepare(obs.flatten(0, 1))
        steps = obs.shape[:2]
        size = self.policy_memory.state_size
        hidden = self.policy_trunk(inputs).unflatten(0, steps)
        policy, states = self.policy_memory(hidden, state[:, :size], starts)
        value = policy
        if not self.shared:
            hidden = self.value_trunk(inputs).unflatten(0, steps)
            value, others = self.value_memory(hidden, state[:, size:], starts)
            states = {t: torch.cat([states[t], others[t]], dim=1) for t in states}
        return self._with_log_std(self.policy_head(policy)), self.value_head(value)[..., 0], states

    def _with_log_std(self, head: Tensor) -> Tensor:
        if self.log_std is None:
            return head
        return torch.cat([head, self.log_std.expand_as(head)], dim=-1)
