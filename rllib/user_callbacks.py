"""Supports callbacks that are written for RLlib: `RLlibCallback`, and an adapter to
`polopt.Callbacks`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, nearest, shown
from polopt.common.episodes import Episode
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.workers.callbacks import Callbacks

#: Methods of RLlib's callbacks that polopt does not call, and what to use instead.
_NOT_CALLED = {
    "on_algorithm_init": "run its code after `build_algo()`, or in `on_train_result` for the first "
    "result",
    "on_create_policy": "set the network with the option `model`, for example with a class under "
    "`custom`",
    "on_environment_created": "move its code into the environment, or into the function that makes "
    "the environment",
    "on_episode_created": "move its code into `reset` of the environment",
    "on_episode_start": "move its code into `reset` of the environment. `on_episode_end` gets "
    "`info` of the last step",
    "on_postprocess_trajectory": "override `postprocess` in a custom policy, which gets each "
    "fragment",
    "on_learn_on_batch": "override `prepare_batch` in a custom policy, which gets each batch",
    "on_evaluate_start": "read `evaluation/` in the result that `on_train_result` gets",
    "on_evaluate_end": "read `evaluation/` in the result that `on_train_result` gets",
    "on_evaluate_offline_start": "remove it, because polopt has no offline data",
    "on_evaluate_offline_end": "remove it, because polopt has no offline data",
    "on_workers_recreated": "read `fault_tolerance/` in the result that `on_train_result` gets",
    "on_env_runners_recreated": "read `fault_tolerance/` in the result that `on_train_result` gets",
    "on_offline_eval_runners_recreated": "remove it, because polopt has no offline data",
    "on_checkpoint_loaded": "run its code after `restore()`",
    "on_sub_environment_created": "move its code into the environment, or into the function that "
    "makes the environment",
}


#: Methods that get an episode. Numbers that they log are reported when the episode has ended.
_OF_EPISODES = {"on_episode_step", "on_episode_end"}


class RLlibCallback:
    """Base class of callbacks that are written for RLlib.

        class MyCallback(RLlibCallback):
            def on_episode_end(self, *, episode, metrics_logger, **arguments):
                metrics_logger.log_value("my_length", len(episode))

    Workers call `on_episode_step`, `on_episode_end` and `on_sample_end`. The driver calls
    `on_train_result`. polopt passes all arguments by name. A method without `**arguments` gets only
    the arguments that it declares. A subclass may not define methods with other names that begin
    with `on_`. If RLlib has a method of such a name, the error says what to use instead.
    """

    def on_episode_step(self, **arguments: Any) -> None:
        """Called after each step of each environment.

        Args:
            arguments: the same arguments as in `on_episode_end`. `episode` contains the episode up
                to this step.
        """

    def on_sample_end(self, **arguments: Any) -> None:
        """Called with each fragment that is not discarded because of a fault. Not called in
        evaluation.

        Args:
            arguments: `samples` (a `SampleBatch`), `metrics_logger` (a `MetricsLogger`), and
                `env_runner` or `worker` (the `RolloutWorker`).
        """

    def on_episode_end(self, **arguments: Any) -> None:
        """Called when an episode has ended, unless the episode is discarded, for example because of
        a fault.

        Args:
            arguments: `episode` (a `CallbackEpisode`), `metrics_logger` (a `MetricsLogger`),
                `env_runner` or `worker` (the `RolloutWorker`), `env` (the vector environment),
                `env_index`, `rl_module` (the policy) and `policies` (a dict with the policies by
                name, which is "default_policy" for a policy without a name).
        """

    def on_train_result(self, **arguments: Any) -> None:
        """Called with each result. The method may change the result.

        Args:
            arguments: `algorithm` or `trainer` (the trainer), `result`, and `metrics_logger`, which
                has no effect here.
        """


#: The methods that polopt calls.
_CALLED = tuple(name for name in vars(RLlibCallback) if name.startswith("on_"))

for _name in _NOT_CALLED:
    # A user's method may call, for example, `super().on_episode_start(...)`.
    setattr(RLlibCallback, _name, lambda self, **arguments: None)

#: The name of `RLlibCallback` up to RLlib 2.40.
DefaultCallbacks = RLlibCallback


class CallbackEpisode:
    """An episode for callbacks, with the attribute names of RLlib's episodes. The episode has ended
    or is still running.

    Attributes:
        custom_metrics: a dict of numbers that the callback fills. Results contain the mean, minimum
            and maximum of each number over the episodes of an iteration.
        user_data: a dict in which the callback can keep data from one step of the episode to the
            next.
        total_reward: undiscounted sum of the rewards so far.
        length: number of environment steps so far.
        agent_returns: undiscounted sum of the rewards of each agent. Empty with one agent.
        is_terminated: whether the episode was terminated.
        is_truncated: whether the episode was truncated.
        is_done: whether the episode has ended.
    """

    def __init__(self, episode: Episode) -> None:
        self.custom_metrics: dict[str, float] = episode.data.setdefault("custom_metrics", {})
        self.user_data: dict[str, Any] = episode.data.setdefault("user_data", {})
        self.custom_data = self.user_data
        self.total_reward = episode.episode_return
        self.agent_returns, self._policies = episode.agent_returns, episode.agent_policies
        self.length = self.env_steps = self.t = episode.episode_len
        self.is_terminated, self.is_done = episode.terminated, episode.done
        self.is_truncated = episode.done and not episode.terminated
        self._info = episode.info

    def get_return(self) -> float:
        """Returns the undiscounted sum of the rewards so far."""
        return self.total_reward

    def __len__(self) -> int:
        return self.length

    def module_for(self, agent_id: Any) -> str | None:
        """Returns the name of the policy of an agent. None if the agent has not appeared yet."""
        return self._policies.get(agent_id)

    policy_for = module_for

    def get_infos(self, indices: Any = None) -> Any:
        """Returns the infos of the last step. For the index -1, this is a dict. Otherwise, it is a
        list that contains only this dict."""
        return self._info if indices == -1 else [self._info]

    def last_info_for(self, agent_id: Any = None) -> Mapping[str, Any]:
        """Returns the infos of the last step."""
        return self._info

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an episode of a callback does not have {name!r} in polopt. It has total_reward or "
            "get_return(), agent_returns, module_for(agent_id), length or len(episode), "
            "is_terminated, is_truncated, custom_metrics, user_data, and the infos of the last "
            "step in get_infos(-1) or last_info_for(). If the callback needs more, let the "
            "environment put it into the infos"
        )


#: Values of `reduce` in `MetricsLogger`, and their functions.
_REDUCED: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max, "sum": np.sum}


class MetricsLogger:
    """Collects numbers for the block `env_runners/custom_metrics` of results.

    If a callback logs several numbers under one name in an episode or for a fragment, they are
    combined into one number. The argument `reduce` decides how: `mean`, `min`, `max` or `sum`.
    Results contain the mean, minimum and maximum of this number over the episodes or fragments of
    an iteration.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._reduce: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, float]:
        """The combined number for each name."""
        return {
            name: float(_REDUCED[self._reduce[name]](values))
            for name, values in self._values.items()
        }

    def log_value(self, name: str | tuple[str, ...], value: Any, **how: Any) -> None:
        """Logs a number.

        Args:
            name: a name, or a tuple of nested names.
            value: the number.
            how: `reduce`. None means `mean`. Other arguments of RLlib have no effect.

        Raises:
            ValueError: `reduce` is not `mean`, `min`, `max` or `sum`.
        """
        name = "/".join(name) if isinstance(name, tuple) else name
        reduce = how.get("reduce") or "mean"
        if reduce not in _REDUCED:
            raise ValueError(
                f"metrics_logger.log_value({name!r}, reduce={reduce!r}). Allowed: "
                f"{', '.join(map(repr, _REDUCED))}"
            )
        self._values.setdefault(name, []).append(float(value))
        self._reduce[name] = reduce

    def log_dict(self, values: Mapping[str, Any], **how: Any) -> None:
        """Logs each number under its name."""
        for name, value in values.items():
            self.log_value(name, value, **how)


class _Missing:
    """Replaces an argument of RLlib that polopt does not have. Reading an attribute of this object
    raises an error that names the argument."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the callback uses the argument {self._name!r}, which polopt does not have. Methods "
            "about an episode get 'episode', 'metrics_logger', 'env_runner', 'env', 'env_index' "
            "and 'rl_module'"
        )


def as_polopt_callbacks(given: Any) -> Any:
    """Returns a subclass of `polopt.Callbacks` that calls the methods of a class that was written
    for RLlib. Returns subclasses of `polopt.Callbacks`, strings and None unchanged. A list of one
    class has the same meaning as the class. The class may be the function of a `functools.partial`,
    which has the arguments of its constructor.

    Raises:
        ConfigError: the value is not a class, or overrides a method that polopt does not call.
    """
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    make = given
    if isinstance(given, functools.partial):
        given = given.func
    if not isinstance(given, type) or (make is not given and issubclass(given, Callbacks)):
        raise ConfigError(
            f"key 'callbacks': got {shown(make)}. Allowed: one class, a subclass of "
            "polopt.Callbacks or of polopt.rllib.RLlibCallback"
        )
    if issubclass(given, Callbacks):
        return given
    methods = dict(_overridden(given))
    for name in methods:
        if name in _NOT_CALLED:
            raise ConfigError(
                f"key 'callbacks': {given.__qualname__} has the method {name!r}, which polopt does "
                f"not call. Instead: {_NOT_CALLED[name]}"
            )
        if name not in _CALLED:
            raise ConfigError(
                f"key 'callbacks': {given.__qualname__} has the method {name!r}, which polopt does "
                f"not call{nearest(name, _CALLED) or '.'} Allowed: "
                f"{', '.join(map(repr, _CALLED))}, and methods whose names do not begin with 'on_'"
            )
    return _adapter(given, make, methods)


def _overridden(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the methods `on_...` that the user's class and its base classes define. Leaves out
    the methods that RLlib defines."""
    for base in reversed(cls.__mro__):
        if base in (object, RLlibCallback) or base.__module__.startswith("ray."):
            continue
        for name, method in vars(base).items():
            if name.startswith("on_") and callable(method):
                yield name, method


def _adapter(
    cls: type, make: Callable[[], Any], methods: Mapping[str, Callable[..., Any]]
) -> type[Callbacks]:
    class Adapter(Callbacks):
        """Calls an object of the user's class."""

        def __init__(self) -> None:
            self._users = make()

        if "on_episode_step" in methods:

            def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
                self._of_episode("on_episode_step", episode, worker)

        if _OF_EPISODES & set(methods):

            def on_episode_end(self, *, episode: Episode, worker: Any) -> Mapping[str, float]:
                return self._of_episode("on_episode_end", episode, worker)

        if "on_sample_end" in methods:

            def on_sample_end(self, *, worker: Any, samples: SampleBatch) -> Mapping[str, float]:
                logger = MetricsLogger()
                self._call(
                    "on_sample_end",
                    samples=samples,
                    metrics_logger=logger,
                    env_runner=worker,
                    worker=worker,
                )
                return logger.values

        if "on_train_result" in methods:

            def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
                self._call(
                    "on_train_result",
                    algorithm=trainer,
                    trainer=trainer,
                    result=result,
                    metrics_logger=MetricsLogger(),
                )

        def _of_episode(self, name: str, episode: Episode, worker: Any) -> Mapping[str, float]:
            """Calls a method with an episode. Returns the numbers that were logged for the episode
            if the episode has ended."""
            shown = CallbackEpisode(episode)
            logger: MetricsLogger = episode.data.setdefault("metrics_logger", MetricsLogger())
            if name in methods:
                self._call(
                    name,
                    episode=shown,
                    metrics_logger=logger,
                    env_runner=worker,
                    worker=worker,
                    env=worker.sampler.env,
                    env_index=episode.env_index,
                    rl_module=worker.policy,
                    policies=getattr(worker.policy, "policies", {"default_policy": worker.policy}),
                )
            found = {**shown.custom_metrics, **logger.values} if episode.done else {}
            return {name: float(value) for name, value in found.items()}

        def _call(self, name: str, **arguments: Any) -> None:
            getattr(self._users, name)(**_taken(methods[name], arguments))

    Adapter.__name__, Adapter.__qualname__ = cls.__name__, cls.__qualname__
    return Adapter


def _taken(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a method declares. For a required argument that polopt does not
    have, the value is a `_Missing`. It raises an error when the method reads one of its
    attributes."""
    parameters = inspect.signature(method).parameters.values()
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {
        p.name: arguments.get(p.name, _Missing(p.name))
        for p in named
        if p.name != "self" and (p.name in arguments or p.default is p.empty)
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {**arguments, **taken}
    return taken
