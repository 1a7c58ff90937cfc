"""Policies that do not learn, for a `Collector` without an algorithm of polopt.

These policies wrap a `torch.nn.Module` or a callable, or choose random actions. A module or a
callable gets encoded observations (see `ObservationEncoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.collectors.fixed_distributions import PassThroughActions, UniformActions
from polopt.common.config import Config, ConfigError
from polopt.common.weights import Weights
from polopt.policies.acting_policy import ActingPolicy
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.make_distribution import make_distribution
from polopt.policies.networks.observations import split


class NonLearningConfig(Config):
    """Options of a policy that does not learn.

    Attributes:
        actor: a `torch.nn.Module`, a callable, or None for random actions.
        outputs: what a module returns: `params` for the parameters of the action distribution, or
            `actions`.
        squash_actions: whether to squash Box actions with tanh instead of clipping them. This
            option has an effect only if a module returns `params`.
    """

    actor: Any = None
    outputs: Literal["params", "actions"] = "params"
    squash_actions: bool = False


class NonLearningPolicy(ActingPolicy):
    """A policy that chooses actions and does not learn. The weights are an empty vector, unless a
    subclass overrides `get_weights`."""

    config_class: ClassVar[type[NonLearningConfig]] = NonLearningConfig
    config: NonLearningConfig

    def get_weights(self) -> Weights:
        """An empty vector, `[0]`."""
        return Weights(np.zeros(0, np.float32), self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Copies only the version and the environment steps."""
        self.version, self.env_steps = weights.version, weights.env_steps

    def get_state(self) -> dict[str, Any]:
        """The weights and their version."""
        weights = self.get_weights()
        return {"params": torch.from_numpy(weights.flat), "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.set_weights(Weights(state["params"].numpy(), int(state["version"]), 0, {}))


class RandomPolicy(NonLearningPolicy):
    """Chooses random actions (see `UniformActions`). With an action mask, chooses uniformly from
    the allowed actions."""

    def make_distribution(self) -> ActionDistribution:
        space = self.action_space
        return UniformActions(space) if self.mask is None else make_distribution(space)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Logits `[N, P]` if observations have a mask. Otherwise an array `[N, 0]`, because the
        distribution has no parameters."""
        if self.mask is None:
            return np.empty((len(obs), 0), dtype=np.float32)
        return self.mask.masked(0.0, obs)


class CallablePolicy(NonLearningPolicy):
    """Chooses actions with a callable `obs [N, ...] -> actions [N, ...]`."""

    def make_distribution(self) -> ActionDistribution:
        return PassThroughActions(self.action_space)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """The actions, flattened to `[N, A]`.

        Raises:
            ValueError: the callable returns actions of a wrong shape.
        """
        actions = np.asarray(self.config.actor(obs), dtype=np.float32)
        if actions.shape != (len(obs), *self.dist.action_shape):
            wanted = [len(obs), *self.dist.action_shape]
            raise ValueError(f"actions must have shape {wanted}; got {list(actions.shape)}")
        return actions.reshape(len(obs), self.dist.num_params)


class ModulePolicy(NonLearningPolicy):
    """Samples actions with a module `obs [N, ...] -> distribution parameters [N, P]`.

    For Discrete, the parameters are logits. For MultiDiscrete, they are the concatenated logits of
    all dimensions. For Box, they are means and log standard deviations.

    The weights are the parameters and buffers in the `state_dict` of the module, as one float32
    vector in the order of `state_dict`. The vector includes buffers because running statistics must
    also reach the workers. The caller may train the module. This class moves the module to
    `device`, and sets its parameters and buffers in `set_weights` and `set_state`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module: nn.Module = self.config.actor
        self.module.to(self.device)

    def make_distribution(self) -> ActionDistribution:
        return make_distribution(self.action_space, self.config.squash_actions)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32.

        Raises:
            ValueError: the module returns parameters of a wrong shape.
        """
        with torch.inference_mode():
            given: Tensor = self.module(torch.as_tensor(obs, device=self.device))
        params = given.float().cpu().numpy()
        if params.shape != (len(obs), self.dist.num_params):
            raise ValueError(
                f"the module must return {type(self.dist).__name__} parameters of shape "
                f"{[len(obs), self.dist.num_params]}; got {list(params.shape)}. For a module that "
                'returns actions: policy=(module, {"outputs": "actions"})'
            )
        return params if self.mask is None else self.mask.masked(params, obs)

    def get_weights(self) -> Weights:
        """A copy of the parameters and buffers, `[P]`."""
        parts = [t.detach().float().cpu().reshape(-1) for t in self._tensors()]
        flat = torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)
        return Weights(flat, self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Copies the parameters, the buffers, the version and the environment steps.

        Raises:
            ValueError: the weights belong to another network.
        """
        tensors = self._tensors()
        size = sum(t.numel() for t in tensors)
        if weights.flat.shape != (size,):
            raise ValueError(
                f"weights must have shape [{size}]; got {list(weights.flat.shape)}: they "
                "belong to another network"
            )
        offset = 0
        with torch.no_grad():
            for tensor in tensors:
                part = weights.flat[offset : offset + tensor.numel()]
                tensor.copy_(torch.tensor(part).reshape(tensor.shape))
                offset += tensor.numel()
        super().set_weights(weights)

    def _tensors(self) -> list[Tensor]:
        return [t for t in self.module.state_dict().values() if isinstance(t, Tensor)]


class ActionModulePolicy(ModulePolicy):
    """Chooses actions with a module `obs [N, ...] -> actions [N, ...]`, or with a
    `TensorDictModule` that has the out-key `action`.

    For a Dict space, a `TensorDictModule` gets the parts of the observation that its in-keys name.
    `split` makes the tensors of these parts. For other spaces, a `TensorDictModule` must have one
    in-key, and gets the whole observation. For Discrete, the module may return one-hot vectors, as
    modules of TorchRL do. The module decides whether it samples its actions. polopt calls the
    module with tensors, which `tensordict.nn.dispatch` supports, so polopt does not import
    tensordict.

    Raises:
        ConfigError: a `TensorDictModule` lacks the out-key `action`, or its in-keys do not fit the
            observation space.
    """

    dist: PassThroughActions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module: Any = self.module
        self._in_keys: list[Any] | None = None
        self._out_keys = ["action"]
        if hasattr(module, "in_keys"):
            self._in_keys, self._out_keys = list(module.in_keys), list(module.out_keys)
            self._check_keys(self.encoder.space)

    def make_distribution(self) -> PassThroughActions:
        return PassThroughActions(self.action_space)

    def _check_keys(self, observation_space: Space[Any]) -> None:
        assert self._in_keys is not None
        name = type(self.module).__name__
        if "action" not in self._out_keys:
            raise ConfigError(
                f"key 'policy': got {name} with out_keys {self._out_keys}. Allowed: out_keys with "
                "'action'"
            )
        if isinstance(observation_space, spaces.Dict):
            known = [*observation_space.spaces]
            right = all(key in known for key in self._in_keys)
            allowed = f"in_keys from {known}"
        else:
            right, allowed = len(self._in_keys) == 1, "one in_key"
        if not right:
            raise ConfigError(
                f"key 'policy': got {name} with in_keys {self._in_keys} for observations of "
                f"{observation_space}. Allowed: {allowed}"
            )

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """The actions, flattened to `[N, A]`.

        Raises:
            ValueError: the module returns actions of a wrong shape.
        """
        with torch.inference_mode():
            given = self.module(*self._inputs(torch.as_tensor(obs, device=self.device)))
        several = len(self._out_keys) > 1
        actions: Tensor = given[self._out_keys.index("action")] if several else given
        space = self.dist.space
        if isinstance(space, spaces.Discrete) and actions.shape == (len(obs), int(space.n)):
            actions = actions.argmax(-1) + int(space.start)
        wanted = (len(obs), *self.dist.action_shape)
        if actions.shape != wanted:
            raise ValueError(
                f"{type(self.module).__name__} must return actions of shape {[*wanted]}; got "
                f"{[*actions.shape]}"
            )
        return actions.float().cpu().numpy().reshape(len(obs), self.dist.num_params)

    def _inputs(self, obs: Tensor) -> list[Tensor]:
        if self._in_keys is None:
            return [obs]
        parts = split(self.encoder.space, obs)
        return [parts[key] for key in self._in_keys] if isinstance(parts, dict) else [parts]


def adapter_for(
    policy: nn.Module | Callable[[np.ndarray], Any] | None, outputs: str = "params"
) -> type[NonLearningPolicy]:
    """Returns the class that wraps a user's `policy`.

    Args:
        policy: a module, a callable, or None.
        outputs: see `NonLearningConfig`. A `TensorDictModule` always returns actions, whatever the
            value of `outputs`.

    Raises:
        ConfigError: `policy` is not a module, a callable or None. A class is not accepted either.
    """
    if policy is None:
        return RandomPolicy
    if isinstance(policy, nn.Module):
        keys = hasattr(policy, "in_keys") and hasattr(policy, "out_keys")
        return ActionModulePolicy if keys or outputs == "actions" else ModulePolicy
    if callable(policy) and not isinstance(policy, type):
        return CallablePolicy
    raise ConfigError(
        f"key 'policy': got {policy!r}. Allowed: a polopt Policy without options, "
        "(a Policy class, its options), a torch.nn.Module, a TensorDictModule, a callable from "
        "observations to actions, or None"
    )
