"""`Callbacks`: a user's functions that are called during a run."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.common.registry import load_path
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.envs.env_errors import traceback_of

_ALLOWED = "a subclass of polopt.Callbacks, 'module:Class' of one, or None"


class CallbackError(RuntimeError):
    """A callback raised, or returned what it may not. The message names class and method, and ends
    with the user's traceback."""


class Callbacks:
    """Base class of a user's callbacks. A method that is not overridden does nothing.

    Each process has an object of its own: what `on_episode_end` keeps is not seen by
    `on_train_result`. The names of the methods are RLlib's. A class with another method `on_...` is
    refused. What a method costs is paid only by classes that define it.
    """

    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        """Called after each step of each environment, in the process that samples, also in
        evaluation. The environment is in the state after the step. After the last step of an
        episode, it may already be in the state after the reset.

        Keep data that a later step or `on_episode_end` needs in `episode.data`. For some episodes,
        `on_episode_end` is never called: they are discarded because an environment fails or values
        are not finite, or evaluation plays more of them than it needs.

        Args:
            episode: the episode so far, with the infos of this step. In the last step, it is
                `done`.
            worker: see `on_episode_end`.
        """
        return

    def on_episode_end(self, *, episode: Episode, worker: Any) -> Mapping[str, float] | None:
        """Called in the process that sampled an episode, before its fragment is sent.

        Args:
            episode: that has ended, with the infos of its last step.
            worker: the `RolloutWorker`, with `index`, `policy` and `sampler.env`, the vector of
                environments. `config.in_evaluation` tells episodes of evaluation.

        Returns:
            custom metrics by name. Results have their mean, minimum and maximum. None: no metrics.
        """
        return None

    def on_sample_end(self, *, worker: Any, samples: SampleBatch) -> Mapping[str, float] | None:
        """Called with each fragment, after `on_episode_end` of its episodes, and before the
        fragment is sent or used for learning. Not called in evaluation.

        Args:
            worker: see `on_episode_end`.
            samples: columns `[T, N, ...]`, all finite, with advantages where the policy adds them
                in the worker.

        Returns:
            custom metrics as `on_episode_end`. None: none.
        """
        return None

    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        """Called in the driver with each result, which it may change.

        Args:
            trainer: the `PolicyOptimizerTrainer`.
            result: as `trainer.train()` is about to return it, without what Tune adds.
        """
        return


def resolve_callbacks(value: Any) -> type[Callbacks] | None:
    """The class that the config key `callbacks` names. Imports its module.

    Raises:
        ConfigError: the class does not exist, or it has a method `on_...` that is never called.
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
    """Raises a ConfigError for a method `on_...` that polopt never calls, for example another
    callback of RLlib."""
    called = [name for name in vars(Callbacks) if name.startswith("on_")]
    for name in dir(cls):
        if name.startswith("on_") and name not in called and callable(getattr(cls, name)):
            raise ConfigError(
                f"key 'callbacks': {cls.__qualname__} has the method {name!r}, which polopt does "
                f"not call. Allowed: {', '.join(map(repr, called))}; the names of other methods do "
                "not begin with 'on_'"
            )


class CallbackCaller:
    """Calls a user's callbacks in one process, and names them in errors.

    Args:
        cls: their class. None without callbacks.
        place: of this process, for messages.
    """

    def __init__(self, cls: type[Callbacks] | None, place: str) -> None:
        self._class = cls
        self._place = place
        self._callbacks: Callbacks | None = None

    def defines(self, method: str) -> bool:
        """Whether the user's class has a method of its own."""
        mine = getattr(self._class, method, None)
        return mine is not None and mine is not getattr(Callbacks, method)

    def metrics_of(self, method: str, **arguments: Any) -> Mapping[str, float]:
        """Returns the custom metrics that a method returns.

        Raises:
            CallbackError: the callback raised, or returned no metrics.
        """
        metrics = self.call(method, **arguments)
        if metrics is None:
            return {}
        if isinstance(metrics, Mapping) and all(
            isinstance(name, str) and isinstance(value, numbers.Real | np.bool_)
            for name, value in metrics.items()
        ):
            return {name: float(value) for name, value in metrics.items()}
        raise CallbackError(
            f"{self._name(method)} returned {shown(metrics)}. Allowed: a dict of numbers "
            "by name, or None"
        )

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method. The object is made before the first call.

        Raises:
            CallbackError: it raised.
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
