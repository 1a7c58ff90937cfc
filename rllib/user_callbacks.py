"""Callbacks in RLlib's form: `RLlibCallback`, and what it becomes for polopt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.workers.callbacks import Callbacks

#: Methods of RLlib's callbacks that polopt does not call, and what to use instead.
_NOT_CALLED = {
    "on_algorithm_init": "do it after `build_algo()`, or in `on_train_result` of the first result",
    "on_create_policy": "the network is `model`, with a class of your own under `custom`",
    "on_environment_created": "do it in the environment, or in the function that makes it",
    "on_episode_created": "do it in `reset` of the environment",
    "on_episode_start": "do it in `reset` of the environment; `info` of the last step reaches "
    "`on_episode_end`",
    "on_postprocess_trajectory": "`postprocess` of a policy of your own sees each fragment",
    "on_learn_on_batch": "`prepare_batch` of a policy of your own sees each batch",
    "on_evaluate_start": "`evaluation/` of the result of `on_train_result`",
    "on_evaluate_end": "`evaluation/` of the result of `on_train_result`",
    "on_evaluate_offline_start": "polopt has no offline data",
    "on_evaluate_offline_end": "polopt has no offline data",
    "on_workers_recreated": "`fault_tolerance/` of the result of `on_train_result`",
    "on_env_runners_recreated": "`fault_tolerance/` of the result of `on_train_result`",
    "on_offline_eval_runners_recreated": "polopt has no offline data",
    "on_checkpoint_loaded": "do it after `restore()`",
    "on_sub_environment_created": "do it in the environment, or in the function that makes it",
}


#: Methods whose numbers are counted when the episode has ended.
_OF_EPISODES = {"on_episode_step", "on_episode_end"}


class RLlibCallback:
    """Base class of callbacks in RLlib's form.

        class MyCallback(RLlibCallback):
            def on_episode_end(self, *, episode, metrics_logger, **arguments):
                metrics_logger.log_value("my_length", len(episode))

    polopt calls `on_episode_step`, `on_episode_end` and `on_sample_end` in the process that
    samples, and `on_train_result` in the driver. It passes arguments by name. If a class has
    another method of RLlib's, an error says what to use instead.
    """

    def on_episode_step(self, **arguments: Any) -> None:
        """Called after each step of each environment.

        Args:
            arguments: the same as in `on_episode_end`. `episode` is the episode so far.
        """

    def on_sample_end(self, **arguments: Any) -> None:
        """Called with each fragment.

        Args:
            arguments: `samples` (a `SampleBatch`), `metrics_logger`, and `env_runner` or `worker`
                (the `RolloutWorker`). A method gets only the arguments that it has.
        """

    def on_episode_end(self, **arguments: Any) -> None:
        """Called when an episode has ended.

        Args:
            arguments: `episode` (a `FinishedEpisode`), `metrics_logger` (a `MetricsLogger`),
                `env_runner` or `worker` (the `RolloutWorker`), `env` (the vector of environments),
                `env_index`, `rl_module` (the policy) and `policies` (a dict with the policy under
                "default_policy"). A method gets only the arguments that it has.
        """

    def on_train_result(self, **arguments: Any) -> None:
        """Called with each result, which it may change.

        Args:
            arguments: `algorithm` or `trainer`, `result`, and `metrics_logger` (it is not used). A
                method gets only the arguments that it has.
        """


for _name in _NOT_CALLED:
    # `super().on_episode_start(...)` of a user's method finds something.
    setattr(RLlibCallback, _name, lambda self, **arguments: None)

#: The name of `RLlibCallback` until RLlib 2.40.
DefaultCallbacks = RLlibCallback


class CallbackEpisode:
    """An episode that has ended, or the episode so far, with the names of RLlib's episodes.

    Attributes:
        custom_metrics: numbers by name, for results. Filled by the callback.
        user_data: a dict for the callback, the same in all steps of the episode.
        total_reward: undiscounted sum of rewards.
        length: in environment steps.
        is_terminated: whether it was terminated.
        is_truncated: whether it was truncated.
        is_done: whether it has ended.
    """

    def __init__(self, episode: Episode) -> None:
        self.custom_metrics: dict[str, float] = episode.data.setdefault("custom_metrics", {})
        self.user_data: dict[str, Any] = episode.data.setdefault("user_data", {})
        self.custom_data = self.user_data
        self.total_reward = episode.episode_return
        self.length = self.env_steps = self.t = episode.episode_len
        self.is_terminated, self.is_done = episode.terminated, episode.done
        self.is_truncated = episode.done and not episode.terminated
        self._info = episode.info

    def get_return(self) -> float:
        """The undiscounted sum of rewards."""
        return self.total_reward

    def __len__(self) -> int:
        return self.length

    def get_infos(self, indices: Any = None) -> Any:
        """The infos of the last step: as they are for the index -1, else as a list of one."""
        return self._info if indices == -1 else [self._info]

    def last_info_for(self, agent_id: Any = None) -> Mapping[str, Any]:
        """The infos of the last step."""
        return self._info

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an episode of a callback has no {name!r} in polopt. It has total_reward or "
            "get_return(), length or len(episode), is_terminated, is_truncated, custom_metrics, "
            "user_data, and the infos of its last step in get_infos(-1) or last_info_for(): put "
            "there what the callback needs"
        )


#: What `reduce` of `MetricsLogger` may be.
_REDUCED: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max, "sum": np.sum}


class MetricsLogger:
    """Takes numbers for the block `env_runners/custom_metrics` of results, which has the mean,
    minimum and maximum of each name over the episodes of an iteration. A name that is logged
    several times in an episode counts once, by its `reduce`: mean, min, max or sum."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._reduce: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, float]:
        """The number of each name."""
        return {
            name: float(_REDUCED.get(self._reduce[name], np.mean)(values))
            for name, values in self._values.items()
        }

    def log_value(self, name: str | tuple[str, ...], value: Any, **how: Any) -> None:
        """Logs a number.

        Args:
            name: a name, or a path of names.
            value: the number.
            how: `reduce`. Other options of RLlib have no effect.
        """
        name = "/".join(name) if isinstance(name, tuple) else name
        self._values.setdefault(name, []).append(float(value))
        self._reduce[name] = how.get("reduce", "mean")

    def log_dict(self, values: Mapping[str, Any], **how: Any) -> None:
        """Logs numbers by name."""
        for name, value in values.items():
            self.log_value(name, value, **how)


class _Missing:
    """An argument of RLlib that polopt does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the callback uses {self._name!r}, which polopt does not have. It has 'episode', "
            "'metrics_logger', 'env_runner', 'env', 'env_index' and 'rl_module'"
        )


def as_polopt_callbacks(given: Any) -> Any:
    """A subclass of `polopt.Callbacks` that calls a class of RLlib's form. Subclasses of
    `polopt.Callbacks`, names and None are returned as they are.

    Raises:
        ConfigError: the value is not a class, or overrides a method that polopt does not call.
    """
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    if not isinstance(given, type):
        raise ConfigError(
            f"key 'callbacks': got {shown(given)}. Allowed: one class, a subclass of "
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
    return _adapter(given, methods)


def _overridden(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods `on_...` that the user's class and its bases define, without RLlib's own."""
    for base in reversed(cls.__mro__):
        if base in (object, RLlibCallback) or base.__module__.startswith("ray."):
            continue
        for name, method in vars(base).items():
            if name.startswith("on_") and callable(method):
                yield name, method


def _adapter(cls: type, methods: Mapping[str, Callable[..., Any]]) -> type[Callbacks]:
    class Adapter(Callbacks):
        """Calls an object of the user's class."""

        def __init__(self) -> None:
            self._users = cls()

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
            """Calls a method with an episode, and returns the numbers that it has so far."""
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
                    policies={"default_policy": worker.policy},
                )
            found = {**shown.custom_metrics, **logger.values} if episode.done else {}
            return {name: float(value) for name, value in found.items()}

        def _call(self, name: str, **arguments: Any) -> None:
            getattr(self._users, name)(**_taken(methods[name], arguments))

    Adapter.__name__, Adapter.__qualname__ = cls.__name__, cls.__qualname__
    return Adapter


def _taken(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a method takes by name, and stand-ins for others that it needs."""
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
