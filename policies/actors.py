"""What acts in environments: learning policies, and adapters that make anything else able to.

`VectorSampler` needs little of a policy, and workers a little more; both are written down here as
protocols. `Policy` has them all. The adapters give them to a `torch.nn.Module`, to a plain callable
and to nobody (random actions), so that a `Collector` can be used without any algorithm of polopt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import pydantic
import torch
from gymnasium import Space
from torch import Tensor, nn

from polopt.common.config import Config, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.distributions.distributions import ActionDistribution, make_distribution
from polopt.policies.distributions.plain_actions import GivenActions, UniformActions
from polopt.policies.spaces import ObservationEncoder


class Actor(Protocol):
    """What `VectorSampler` acts with.

    Attributes:
        encoder: turns observations of the environment into arrays.
        dist: makes actions of parameters and noise, and of those what the environment takes.
        version: of the weights; goes onto each batch.
    """

    encoder: ObservationEncoder
    dist: ActionDistribution
    version: int

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""


class Collecting(Actor, Protocol):
    """What a worker needs besides, to take weights, to finish fragments, and to be saved."""

    shuffle: np.random.Generator

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds the columns that learning needs, from the weights that acted."""

    def get_weights(self) -> Weights:
        """A copy of the weights."""

    def set_weights(self, weights: Weights) -> None:
        """Takes over weights and their version."""

    def get_state(self) -> dict[str, Any]:
        """All that it depends on: tensors, numbers, strings, and lists and dicts of those."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `get_state` gave."""


class ActingConfig(Config):
    """What an adapter acts with.

    Attributes:
        acts: a `torch.nn.Module`, a callable, or None.
        squash_actions: Box actions of a module are squashed by tanh instead of clipped.
    """

    acts: Any = None
    squash_actions: bool = pydantic.Field(default=False)


class ActingOnly:
    """An actor without weights; it acts, and learns nothing.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        config: what to act with.
        seed: not used; here as in `Policy`.
        device: where a module acts.
    """

    config_class: ClassVar[type[ActingConfig]] = ActingConfig
    dist: ActionDistribution

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: ActingConfig,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.encoder = ObservationEncoder(observation_space)
        self.device = torch.device(device)
        self.shuffle = np.random.default_rng(seed)
        self.version = 0
        self.env_steps = 0

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Leaves the batch as it is."""
        return batch

    def get_weights(self) -> Weights:
        """None to speak of: `[0]`."""
        return Weights(np.zeros(0, np.float32), self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Takes over the version."""
        self.version, self.env_steps = weights.version, weights.env_steps

    def get_state(self) -> dict[str, Any]:
        """Weights and their version."""
        weights = self.get_weights()
        return {"params": torch.from_numpy(weights.flat), "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `get_state` gave."""
        self.set_weights(Weights(state["params"].numpy(), int(state["version"]), 0, {}))


class RandomActor(ActingOnly):
    """Acts at random, uniformly over the action space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dist = UniformActions(args[1])

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """`[N, 0]`: there are none."""
        return np.empty((len(obs), 0), dtype=np.float32)


class CallableActor(ActingOnly):
    """Acts by a callable `obs [N, ...] -> actions [N, ...]`, the latter as the environment takes
    them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dist = GivenActions(args[1])

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """The actions, flat: `[N, A]`."""
        actions = np.asarray(self.config.acts(obs), dtype=np.float32)
        if actions.shape != (len(obs), *self.dist.action_shape):
            wanted = [len(obs), *self.dist.action_shape]
            raise ValueError(f"actions must have shape {wanted}; got {list(actions.shape)}")
        return actions.reshape(len(obs), self.dist.num_params)


class ModuleActor(ActingOnly):
    """Acts by a module `obs [N, ...] -> parameters [N, P]` of the action distribution: logits for
    Discrete and MultiDiscrete (side by side), means and log standard deviations for Box.

    Its weights are all of its state, parameters and buffers, as one float32 vector in the order of
    `state_dict`; so whatever acting depends on travels (running statistics, too). The module is
    used as it is, and stays the caller's to train: nothing here changes it but `set_weights`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module: nn.Module = self.config.acts
        self.module.to(self.device)
        self.dist = make_distribution(args[1], self.config.squash_actions)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32.

        Raises:
            ValueError: if the module gives something of another shape.
        """
        with torch.inference_mode():
            given: Tensor = self.module(torch.as_tensor(obs, device=self.device))
        params = given.float().cpu().numpy()
        if params.shape != (len(obs), self.dist.num_params):
            raise ValueError(
                f"the module must give {type(self.dist).__name__} parameters of shape "
                f"{[len(obs), self.dist.num_params]}; got {list(params.shape)}. One that gives "
                "actions is passed as a plain callable instead"
            )
        return params

    def get_weights(self) -> Weights:
        """A copy of parameters and buffers, flat."""
        parts = [t.detach().float().cpu().reshape(-1) for t in self._tensors()]
        flat = torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)
        return Weights(flat, self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Takes over parameters, buffers and version.

        Raises:
            ValueError: if they are of another network.
        """
        tensors = self._tensors()
        size = sum(t.numel() for t in tensors)
        if weights.flat.shape != (size,):
            raise ValueError(
                f"weights must have shape [{size}]; got {list(weights.flat.shape)}: they are of "
                "another network"
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


def adapter_for(policy: nn.Module | Callable[[np.ndarray], Any] | None) -> type[ActingOnly]:
    """The adapter for what a user gave as a policy.

    Raises:
        ConfigError: if it is neither a module, nor a callable, nor None.
    """
    if policy is None:
        return RandomActor
    if isinstance(policy, nn.Module):
        return ModuleActor
    if callable(policy) and not isinstance(policy, type):
        return CallableActor
    raise ConfigError(
        f"key 'policy': got {policy!r}; allowed: a polopt Policy, (a Policy class, its options), "
        "a torch.nn.Module, a callable from observations to actions, or None"
    )
