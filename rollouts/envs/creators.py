"""Calls a user's callable that makes an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

#: Names of a first parameter that receives the whole config, as in RLlib's creators.
_CONFIG_NAMES = {"config", "env_config", "env_context", "context", "ctx", "cfg"}


class EnvContext(dict[str, Any]):
    """The `env_config` passed to a creator, with the position of the environment.

    No two environments of a run that exist at the same time have the same pair of `worker_index`
    and `vector_index`, so that ports, licences and parts of a data set can depend on the pair.

    Attributes:
        worker_index: of the worker. Workers of training count from 1; 0: training in the driver's
            process, and the environment that is made and closed before, to check the config. Those
            of evaluation count on after the last worker of training, also in the driver's process
            and in `polopt evaluate`.
        vector_index: of the environment within the worker.
        num_workers: number of remote workers, of evaluation in an environment of evaluation.
        in_evaluation: the environment is played for evaluation, and nothing is learned from it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        worker_index: int,
        vector_index: int,
        num_workers: int,
        in_evaluation: bool = False,
    ) -> None:
        super().__init__(config)
        self.in_evaluation = in_evaluation
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers


def make_env(make: Callable[..., Any], context: EnvContext) -> Any:
    """Makes an environment or a vector environment with a user's callable.

    Args:
        make: see `call_creator`.
        context: its argument.

    Raises:
        TypeError: the callable returns something else.
        Exception: from the callable.
    """
    env = call_creator(make, context)
    if not isinstance(env, gymnasium.Env | VectorEnv):
        raise TypeError(
            "the callable must return a gymnasium.Env or a gymnasium.vector.VectorEnv; "
            f"got {env!r:.200}"
        )
    return env


def call_creator(make: Callable[..., Any], context: EnvContext) -> Any:
    """Calls a creator according to its signature: with the context as its only argument (RLlib's
    convention), with the config as keyword arguments (Gymnasium's), or without arguments."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some C callables have no signature
        return make(context)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and (
        positional[0].default is inspect.Parameter.empty or positional[0].name in _CONFIG_NAMES
    ):
        return make(context)
    return make(**context)
