"""`Callbacks`: base class for functions of a user that polopt calls during a run."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.common.registry import load_path
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.envs.env_errors import traceback_of

_ALLOWED = "a subclass of polopt.Callbacks, its path 'module:Class', or None"


class CallbackError(RuntimeError):
    """A callback raised, or returned a value that is not allowed. The message names the class and
    the method. If the callback raised, the message ends with the user's traceback."""


class Callbacks:
    """Base class of a user's callbacks. A method that is not overridden does nothing.

    The trainer and each worker make their own objects of this class. So `on_train_result` in the
    driver does not see data that `on_episode_end` stores on `self` in a worker. The names of the
    methods are RLlib's. A subclass may not define other methods whose names begin with `on_`.
    """

    def on_episode_start(self, *, episode: Episode, worker: Any) -> None:
        """Called before the first step of each episode, after the reset, in the process that
        samples. Also called in evaluation.

        Store data for later steps and for `on_episode_end` in `episode.data`.

        Args:
            episode: the episode, with a length of 0 and the first observation.
            worker: see `on_episode_end`.
        """
        return

    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        """Called after each step of each episode, in the process that samples. Also called in
        evaluation. The environment is in the state after the step, and not yet reset (see
        `on_episode_end`).

        Store data for later steps and for `on_episode_end` in `episode.data`.

        Args:
            episode: the episode so far, with the infos of this step. `episode.done` is True after
                the last step.
            worker: see `on_episode_end`.
        """
        return

    def on_episode_end(
        self, *, episode: Episode, worker: Any
    ) -> Mapping[str, float | Sequence[float]] | None:
        """Called at the end of each episode, after `on_episode_step` for its last step, in the
        process that samples. Also called in evaluation. The environment is in its last state. Only
        a vector environment of the user's own in the mode same-step has already begun the next
        episode.

        An episode may be discarded later, because values in its fragment are not finite, or because
        evaluation does not need the episode. Its metrics are then not reported. The method is not
        called for an episode that an exception of the environment has ended.

        Args:
            episode: the episode that has ended, with the infos of its last step.
            worker: the `RolloutWorker`. Useful attributes are `index`, `policy` and `sampler.env`,
                the vector environment. `worker.config.in_evaluation` is True in evaluation.

        Returns:
            custom metrics by name, each a number or a list of numbers. Results report their mean,
            minimum and maximum. None means no metrics.
        """
        return None

    def on_sample_end(
        self, *, worker: Any, samples: SampleBatch
    ) -> Mapping[str, float | Sequence[float]] | None:
        """Called with each fragment that is not discarded, before the fragment is sent or used for
        learning. Not called in evaluation.

        Args:
            worker: see `on_episode_end`.
            samples: the fragment: arrays `[T, N, ...]` for T steps of N environments, with finite
                values. They include advantages if the policy computes advantages in the worker.

        Returns:
            custom metrics as in `on_episode_end`. None means no metrics.
        """
        return None

    def on_evaluate_start(self, *, trainer: Any) -> None:
        """Called in the driver before an evaluation of the option `evaluation_interval` begins.

        Args:
            trainer: see `on_train_result`.
        """
        return

    def on_evaluate_end(self, *, trainer: Any, evaluation: dict[str, Any]) -> None:
        """Called in the driver before `on_train_result`, if an evaluation has ended since the last
        result.

        Args:
            trainer: see `on_train_result`.
            evaluation: the block `evaluation` of the result, which the method may change.
        """
        return

    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        """Called in the driver with each result. The method may change the result.

        Args:
            trainer: the `PolicyOptimizerTrainer`.
            result: the result that `trainer.train()` is about to return, without the keys that Tune
                adds.
        """
        return


def resolve_callbacks(value: Any) -> type[Callbacks] | None:
    """Returns the class that the config key `callbacks` names, or None if the key is None. For a
    path `module:Class`, imports the module.

    Raises:
        ConfigError: the class does not exist or cannot be imported, is not a subclass of
            `Callbacks`, or has a method `on_...` that polopt never calls.
    """
    found = value
    if isinstance(value, str):
        try:
            found = load_path(value) if ":" in value else None
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"key 'callbacks': got {value!r}: {error}. Allowed: {_ALLOWED}"
            ) from None
    if found is None and value is None:
        return None
    if isinstance(found, type) and issubclass(found, Callbacks):
        _check_methods(found)
        return found
    raise ConfigError(f"key 'callbacks': got {shown(value)}. Allowed: {_ALLOWED}")


def _check_methods(cls: type[Callbacks]) -> None:
    """Raises a ConfigError for a method `on_...` that polopt never calls, for example a callback
    that only another library calls."""
    called = [name for name in vars(Callbacks) if name.startswith("on_")]
    for name in dir(cls):
        if name.startswith("on_") and name not in called and callable(getattr(cls, name)):
            raise ConfigError(
                f"key 'callbacks': {cls.__qualname__} has the method {name!r}, which polopt does "
                f"not call. Allowed: {', '.join(map(repr, called))}, and methods whose names do "
                "not begin with 'on_'"
            )


class CallbackCaller:
    """Calls a user's callbacks in one process. If a callback raises, the error names the callback.

    Args:
        cls: the class of the callbacks. None if the user has no callbacks.
        place: name of this process, for error messages.
    """

    def __init__(self, cls: type[Callbacks] | None, place: str) -> None:
        self._class = cls
        self._place = place
        self._callbacks: Callbacks | None = None

    def defines(self, method: str) -> bool:
        """Returns True if the user's class overrides a method."""
        mine = getattr(self._class, method, None)
        return mine is not None and mine is not getattr(Callbacks, method)

    def metrics_of(self, method: str, /, **arguments: Any) -> Mapping[str, float | list[float]]:
        """Calls a method, and returns the custom metrics that the method returns.

        Raises:
            CallbackError: the callback raised, or returned a value that is not allowed.
        """
        metrics = self.call(method, **arguments)
        if metrics is None:
            return {}
        if isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics):
            values = {name: _numbers(value) for name, value in metrics.items()}
            if None not in values.values():
                return {name: value for name, value in values.items() if value is not None}
        raise CallbackError(
            f"{self._name(method)} returned {shown(metrics)}. Allowed: a dict of numbers, or of "
            "lists of numbers, by name, or None"
        )

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a method. The first call also makes the object.

        Raises:
            CallbackError: the method or the constructor raised.
        """
        if self._class is None:
            return None
        name = "__init__"
        try:
            if self._callbacks is None:
                self._callbacks = self._class()
            name = method
            return getattr(self._callbacks, method)(**arguments)
        except Exception as error:  # a user's code may raise anything
            raise CallbackError(
                f"{self._name(name)} raised {type(error).__name__}: {error}\n{traceback_of(error)}"
            ) from error

    def _name(self, method: str) -> str:
        return f"callback {getattr(self._class, '__qualname__', '')}.{method} ({self._place})"


def _numbers(value: Any) -> float | list[float] | None:
    """Converts a number or a list of numbers to floats. Returns None for anything else."""
    if isinstance(value, numbers.Real | np.bool_):
        return float(value)
    if isinstance(value, list | tuple) and all(isinstance(one, numbers.Real) for one in value):
        return [float(one) for one in value]
    return None
