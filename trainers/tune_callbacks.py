"""Callbacks that polopt adds to Tune's experiments: `Checks` and `NotebookProgress`."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

from ray import tune

from polopt.common.add_ons import hint
from polopt.common.ray_names import CALLBACKS_VARIABLE, in_notebook, notebook_callback
from polopt.trainers.results import check_stop_keys, flattened

logger = logging.getLogger("polopt")


class Checks(tune.Callback):
    """Checks trials when they start, and their first results.

    - Warns if an add-on has a hint for what Tune trains instead of a preset.
    - Ends the experiment with a ConfigError if a stop criterion names a key that the first result
      of a preset lacks. Tune itself would only log a warning, and the trial would never stop. A
      stopper or a function cannot be checked, because it does not say which keys it reads.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._checked: set[str] = set()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Warns of a class that is not a preset. Tune calls this method when a trial starts."""
        trainable = trial.get_trainable_cls()
        if self._has_warned or is_preset(trainable):
            return
        module = getattr(trainable, "__module__", "")
        warning = hint("trainable", f"{module}.{trial.trainable_name}")
        if warning:
            self._has_warned = True
            logger.warning(warning)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Checks the first result of each trial. Tune calls this method with each result."""
        if trial.trial_id in self._checked:
            return
        self._checked.add(trial.trial_id)
        if is_preset(trial.get_trainable_cls()):
            check_stop_keys(trial.stopping_criterion, result)


class NotebookProgress(notebook_callback()):  # type: ignore[misc]  # a class of Ray
    """Shows only the result keys in `_progress_metrics` of the trial's class.

    In a terminal, Tune itself uses `_progress_metrics`. In a notebook, Tune itself would show
    nearly every key of a result, with each nested block in one cell.
    """

    def display_result(self, trial: Any, result: dict[str, Any], error: bool, done: bool) -> None:
        """Shows one result. Tune calls this method only in notebooks."""
        named = getattr(trial.get_trainable_cls(), "_progress_metrics", None)
        if named:
            flat = flattened(result)
            result = {key: flat[key] for key in named if key in flat}
        super().display_result(trial, result, error, done)


class ProgressMetrics:
    """Descriptor for the attribute `_progress_metrics` of a trainable: the result keys that Tune
    shows.

    Tune reads this attribute just before it makes the callbacks of an experiment. Reading the
    attribute therefore also adds `Checks` to these callbacks, and in a notebook
    `NotebookProgress`.

    Args:
        keys: the result keys. In the path of a nested key, `/` separates the parts.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def __get__(self, trainable: Any, owner: type[Any]) -> tuple[str, ...]:
        add_callbacks()
        return self._keys


def is_preset(trainable: type[Any]) -> bool:
    """Returns whether a trainable is a trainer of polopt."""
    found = inspect.getattr_static(trainable, "_progress_metrics", None)
    return isinstance(found, ProgressMetrics)


def add_callbacks() -> None:
    """Makes each Tune experiment of this process use `Checks`, and in a notebook also
    `NotebookProgress`. Outside of notebooks, Tune would warn about `NotebookProgress`."""
    names = [name for name in os.environ.get(CALLBACKS_VARIABLE, "").split(",") if name]
    for callback in (Checks, NotebookProgress) if in_notebook() else (Checks,):
        own = f"{callback.__module__}.{callback.__qualname__}"
        if own not in names:
            names.append(own)
    os.environ[CALLBACKS_VARIABLE] = ",".join(names)
