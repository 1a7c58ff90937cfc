"""Policies that do not learn, for a `Collector` without an algorithm of polopt.

They adapt a `torch.nn.Module` or a callable, or choose random actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from polopt.common.config import Config, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.distributions.base import ActionDistribution
from polopt.policies.distributions.factory import make_distribution
from polopt.policies.distributions.fixed import PassThroughActions, UniformActions
from polopt.policies.normalization import Normalizer
from polopt.policies.spaces import ObservationEncoder


class NonLearningConfig(Config):
    """Options of a policy that does not learn.

    Attributes:
        actor: a `torch.nn.Module`, a callable, or None.
        squash_actions: squash Box actions of a module with tanh instead of clipping them.
    """

    actor: Any = None
    squash_actions: bool = False


class NonLearningPolicy(ABC):
    """A policy that chooses actions and does not learn; it has no weights.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: options.
        seed: seed of `shuffle`, which workers save and restore.
        device: torch device of a module.

    Attributes:
        encoder: converts observations of the environment to arrays.
        normalizer: None.
        dist: the action distribution.
        version: version of the weights.
        env_steps: environment steps sampled so far by all workers.
        state_size: 0: it has no memory.
    """

    config_class: ClassVar[type[NonLearningConfig]] = NonLearningConfig
    dist: ActionDistribution
    state_size = 0

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: NonLearningConfig,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.encoder = ObservationEncoder(observation_space)
        self.normalizer: Normalizer | None = None
        self.device = torch.device(device)
        self.shuffle = np.random.default_rng(seed)
        self.version = 0
        self.env_steps = 0

    @abstractmethod
    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`action_params`, and the state unchanged."""
        return self.action_params(obs), state

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Returns the batch unchanged."""
        return batch

    def get_weights(self) -> Weights:
        """An empty vector, `[0]`."""
        return Weights(np.zeros(0, np.float32), self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Sets version and environment steps."""
        self.version, self.env_steps = weights.version, weights.env_steps

    def get_state(self) -> dict[str, Any]:
        """Weights and their version, for checkpoints."""
        weights = self.get_weights()
        return {"params": torch.from_numpy(weights.flat), "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`."""
        self.set_weights(Weights(state["params"].numpy(), int(state["version"]), 0, {}))


class RandomPolicy(NonLearningPolicy):
    """Chooses actions uniformly from the action space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dist = UniformActions(args[1])

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """`[N, 0]`: the distribution has no parameters."""
        return np.empty((len(obs), 0), dtype=np.float32)


class CallablePolicy(NonLearningPolicy):
    """Chooses actions with a callable `obs [N, ...] -> actions [N, ...]` of the action space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dist = PassThroughActions(args[1])

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """The actions, flattened: `[N, A]`.

        Raises:
            ValueError: if the callable returns actions of another shape.
        """
        actions = np.asarray(self.config.actor(obs), dtype=np.float32)
        if actions.shape != (len(obs), *self.dist.action_shape):
            wanted = [len(obs), *self.dist.action_shape]
            raise ValueError(f"actions must have shape {wanted}; got {list(actions.shape)}")
        return actions.reshape(len(obs), self.dist.num_params)


class ModulePolicy(NonLearningPolicy):
    """Samples actions with a module `obs [N, ...] -> distribution parameters [N, P]`.

    Parameters are logits for Discrete and MultiDiscrete (concatenated), means and log standard
    deviations for Box.

    Weights are all parameters and buffers of the module, one float32 vector in the order of
    `state_dict`, so that running statistics are sent, too. The caller may train the module; only
    `set_weights` changes it here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module: nn.Module = self.config.actor
        self.module.to(self.device)
        self.dist = make_distribution(args[1], self.config.squash_actions)

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32.

        Raises:
            ValueError: if the module returns another shape.
        """
        with torch.inference_mode():
            given: Tensor = self.module(torch.as_tensor(obs, device=self.device))
        params = given.float().cpu().numpy()
        if params.shape != (len(obs), self.dist.num_params):
            raise ValueError(
                f"the module must return {type(self.dist).__name__} parameters of shape "
                f"{[len(obs), self.dist.num_params]}; got {list(params.shape)}. A module that "
                "returns actions can be passed as a callable (its forward method)"
            )
        return params

    def get_weights(self) -> Weights:
        """A copy of parameters and buffers, `[P]`."""
        parts = [t.detach().float().cpu().reshape(-1) for t in self._tensors()]
        flat = torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)
        return Weights(flat, self.version, self.env_steps, {})

    def set_weights(self, weights: Weights) -> None:
        """Copies parameters, buffers and version.

        Raises:
            ValueError: if they belong to another network.
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


def adapter_for(policy: nn.Module | Callable[[np.ndarray], Any] | None) -> type[NonLearningPolicy]:
    """The policy class for `policy`, as a user gave it.

    Raises:
        ConfigError: if it is neither a module, nor a callable, nor None.
    """
    if policy is None:
        return RandomPolicy
    if isinstance(policy, nn.Module):
        return ModulePolicy
    if callable(policy) and not isinstance(policy, type):
        return CallablePolicy
    raise ConfigError(
        f"key 'policy': got {policy!r}. Allowed: a polopt Policy, (a Policy class, its options), "
        "a torch.nn.Module, a callable from observations to actions, or None"
    )
