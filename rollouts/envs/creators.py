"""Calls a user's callable that makes an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from polopt.rollouts.envs.own_copy import own_copy

#: Names of a first parameter that receives the whole config, as in RLlib's environments.
_CONFIG_NAMES = {"config", "env_config", "env_context", "context", "ctx", "cfg"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class EnvContext(dict[str, Any]):
    """A copy of `env_config` for one environment, with the position of the environment. The
    environment may change it (see `own_copy` for what cannot be copied).

    No two environments of a run that exist at the same time have the same pair of `worker_index`
    and `vector_index`, so that ports, licences and parts of a data set can depend on the pair.

    Attributes:
        worker_index: of the worker. Workers of training count from 1. 0: training in the driver's
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
        super().__init__(own_copy(dict(config)))
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
    convention), with the config as keyword arguments (Gymnasium's), or without arguments. See
    `_takes_context`."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some C callables have no signature
        return make(context)
    return make(context) if _takes_context(parameters, context) else make(**context)


def _takes_context(parameters: Sequence[inspect.Parameter], context: EnvContext) -> bool:
    """Whether the first parameter is for the whole config.

    It is if it is annotated with `EnvContext`, has a usual name (`config`, `env_config` and so on),
    or is the only one that is required. It is not if `env_config` has a key of its name, and there
    are other parameters, or no other keys: then the value of that key is meant. With a usual name,
    that needs other parameters that all other keys fit, since the config of RLlib's environments
    may have a key `config`.
    """
    if not parameters or parameters[0].kind not in _POSITIONAL:
        return False
    first, others = parameters[0], parameters[1:]
    usual = first.name in _CONFIG_NAMES
    if "EnvContext" in str(first.annotation):
        return True
    if first.default is not first.empty and not usual:
        return False
    if first.kind is not first.POSITIONAL_ONLY and first.name in context:
        names = {one.name for one in parameters}
        fits = any(one.kind is one.VAR_KEYWORD for one in others) or context.keys() <= names
        if usual:
            return not (others and fits)
        return not (others or fits)
    if usual:
        return True
    required = [one for one in parameters if one.default is one.empty and one.kind not in _VARIABLE]
    return required == [first]
