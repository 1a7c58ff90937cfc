"""Networks, and the NumPy forward that small ones are acted with."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor, nn

from polopt.policies.config import Config

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class ModelConfig(Config):
    """Options of the actor-critic network, under RLlib's names.

    Attributes:
        fcnet_hiddens: widths of the hidden layers.
        fcnet_activation: `tanh` or `relu`.
        vf_share_layers: policy and value share the hidden layers.
        free_log_std: Box actions: the log standard deviation is a parameter of its own and does
            not depend on the observation.
        initial_log_std: what it starts at (as the bias, where it depends on the observation).
        squash_actions: Box actions are squashed to the box by tanh instead of clipped.
    """

    fcnet_hiddens: tuple[pydantic.PositiveInt, ...] = (64, 64)
    fcnet_activation: Literal["tanh", "relu"] = "tanh"
    vf_share_layers: bool = False
    free_log_std: bool = True
    initial_log_std: float = 0.0
    squash_actions: bool = False


class MLPActorCritic(nn.Module):
    """Multi-layer perceptrons for policy and value, orthogonally initialised (Saxe et al., 2014;
    gains as in Engstrom et al., 2020: sqrt(2) inside, 0.01 for the policy, 1 for the value).

    Args:
        obs_size: D, size of one flattened observation.
        num_params: P, distribution parameters for one observation.
        gaussian: the second half of the parameters are log standard deviations.
        config: see `ModelConfig`.
    """

    def __init__(self, obs_size: int, num_params: int, gaussian: bool, config: ModelConfig) -> None:
        super().__init__()
        widths = [obs_size, *config.fcnet_hiddens]
        activation = _ACTIVATIONS[config.fcnet_activation]
        free_log_std = gaussian and config.free_log_std
        heads = num_params // 2 if free_log_std else num_params
        self.policy_trunk = _trunk(widths, activation)
        self.policy_head = _linear(widths[-1], heads, gain=0.01)
        self.value_trunk = (
            self.policy_trunk if config.vf_share_layers else _trunk(widths, activation)
        )
        self.value_head = _linear(widths[-1], 1, gain=1.0)
        self.log_std: nn.Parameter | None = None
        if free_log_std:
            self.log_std = nn.Parameter(torch.full((heads,), config.initial_log_std))
        elif gaussian:
            with torch.no_grad():
                self.policy_head.bias[heads // 2 :].fill_(config.initial_log_std)
        self.shared = config.vf_share_layers

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, P]` and values `[B]` of observations `[B, ...]`."""
        obs = obs.reshape(len(obs), -1).float()
        hidden = self.policy_trunk(obs)
        value_hidden = hidden if self.shared else self.value_trunk(obs)
        return self._with_log_std(self.policy_head(hidden)), self.value_head(value_hidden)[:, 0]

    def action_params(self, obs: Tensor) -> Tensor:
        """Distribution parameters `[B, P]` alone, for acting."""
        hidden = self.policy_trunk(obs.reshape(len(obs), -1).float())
        return self._with_log_std(self.policy_head(hidden))

    def value(self, obs: Tensor) -> Tensor:
        """Values `[B]` alone."""
        hidden = self.value_trunk(obs.reshape(len(obs), -1).float())
        return self.value_head(hidden)[:, 0]

    def numpy_forward(self) -> NumpyActorCritic | None:
        """A NumPy twin that reads the same memory; None where that is not possible."""
        if next(self.parameters()).device.type != "cpu":
            return None
        return NumpyActorCritic(self)

    def _with_log_std(self, head: Tensor) -> Tensor:
        if self.log_std is None:
            return head
        return torch.cat([head, self.log_std.expand_as(head)], dim=-1)


class NumpyActorCritic:
    """The forward pass of an `MLPActorCritic` in NumPy, over views of its weights.

    For one to a few dozen observations a call through torch costs more than its arithmetic. The
    weights are views of the torch tensors, so there is nothing to keep in step.
    """

    def __init__(self, model: MLPActorCritic) -> None:
        self._policy = _layers(model.policy_trunk, model.policy_head)
        self._value = _layers(model.value_trunk, model.value_head)
        self._relu = any(isinstance(m, nn.ReLU) for m in model.policy_trunk)
        self._log_std = None if model.log_std is None else model.log_std.detach().numpy()

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` of observations `[N, ...]`."""
        head = self._mlp(obs, self._policy)
        if self._log_std is None:
            return head
        params = np.empty((len(head), 2 * head.shape[1]), dtype=np.float32)
        params[:, : head.shape[1]] = head
        params[:, head.shape[1] :] = self._log_std
        return params

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]`."""
        return self._mlp(obs, self._value)[:, 0]

    def _mlp(self, obs: np.ndarray, layers: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        x: np.ndarray = obs.reshape(len(obs), -1).astype(np.float32, copy=False)
        last = len(layers) - 1
        for i, (weight, bias) in enumerate(layers):
            x = x @ weight
            x += bias
            if i < last:
                if self._relu:
                    np.maximum(x, 0.0, out=x)
                else:
                    np.tanh(x, out=x)
        return x


def _layers(trunk: nn.Sequential, head: nn.Linear) -> list[tuple[np.ndarray, np.ndarray]]:
    linears = [m for m in trunk if isinstance(m, nn.Linear)]
    return [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in [*linears, head]]


def _trunk(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(widths):
        layers += [_linear(size_in, size_out, gain=2.0**0.5), activation()]
    return nn.Sequential(*layers)


def _linear(size_in: int, size_out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(size_in, size_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_model(
    obs_shape: tuple[int, ...], num_params: int, gaussian: bool, config: ModelConfig
) -> Any:
    """The network for observations of `obs_shape`."""
    return MLPActorCritic(int(np.prod(obs_shape)), num_params, gaussian, config)
