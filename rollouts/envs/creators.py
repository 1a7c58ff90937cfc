"""`make_env`: makes an environment with a user's callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from polopt.rollouts.envs.own_copy import own_copy

#: A first parameter with one of these names usually receives the whole config, as in RLlib's
#: environments. See `_takes_context`.
_CONFIG_NAMES = {"config", "env_config", "env_context", "context", "ctx", "cfg"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class EnvContext(dict[str, Any]):
    """A copy of `env_config` for one environment, with the indices of the environment.

    The environment may change the copy. `own_copy` describes which values cannot be copied and are
    shared instead.

    Two environments of a run that exist at the same time have different pairs of `worker_index` and
    `vector_index`. An environment can therefore derive a port, a licence or its part of a data set
    from the pair. There is one exception: a training worker that `WorkerSet.add_workers` adds may
    have the index of an evaluation worker. `in_evaluation` distinguishes their environments.

    Attributes:
        worker_index: the index of the worker. The indices of training workers begin at 1.
            Index 0 means training in the driver's process. Before training, polopt makes and closes
            one environment to check the config, and this environment also has index 0. Evaluation
            workers have the indices after the last training worker. This is also true for
            evaluation in the driver's process and in `polopt evaluate`.
        vector_index: the index of the environment within its worker.
        num_workers: the number of remote training workers. In an evaluation environment, the number
            of remote evaluation workers. In a worker that samples for a gradient worker, the number
            of workers that sample for the same gradient worker.
        in_evaluation: whether the environment is used for evaluation. The policy does not learn
            from such an environment.
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
        make: the user's callable. `call_creator` describes the signatures that are supported.
        context: the config and the indices of the environment.

    Raises:
        TypeError: if the callable returns neither an environment nor a vector environment.
        Exception: any exception that the callable raises.
    """
    env = call_creator(make, context)
    if not isinstance(env, gymnasium.Env | VectorEnv):
        raise TypeError(
            "the callable must return a gymnasium.Env or a gymnasium.vector.VectorEnv; "
            f"got {env!r:.200}"
        )
    return env


def call_creator(make: Callable[..., Any], context: EnvContext) -> Any:
    """Calls a creator with the arguments that fit its signature.

    There are two conventions, and `_takes_context` decides between them. In RLlib's convention, the
    context is the only argument of the creator. In Gymnasium's convention, the options in the
    config are keyword arguments of the creator. A creator without parameters is therefore called
    without arguments if the config is empty.
    """
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature
        return make(context)
    return make(context) if _takes_context(parameters, context) else make(**context)


def _takes_context(parameters: Sequence[inspect.Parameter], context: EnvContext) -> bool:
    """Returns whether the first parameter of a creator receives the whole config.

    The first parameter receives the whole config in three cases:

    - The parameter is annotated with `EnvContext`.
    - The parameter has one of the names in `_CONFIG_NAMES`.
    - The parameter is the only required parameter.

    A parameter with the annotation always receives the whole config. Without the annotation, the
    first parameter may instead receive the value of the key with the same name. This requires that
    the parameter can be passed by name, that `env_config` has this key, and one of these
    conditions:

    - A parameter with a name in `_CONFIG_NAMES` receives the value if the creator has other
      parameters and accepts all other keys. This condition is strict because the config of an RLlib
      environment may contain a key `config`.
    - A parameter with another name receives the value if the creator has other parameters, or if
      the config has no other keys.
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
