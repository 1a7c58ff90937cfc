"""Tune's table of trial progress in notebooks: the metrics that a trainable names, not all."""

from __future__ import annotations

import os
from typing import Any

from ray.tune.constants import RAY_TUNE_CALLBACKS_ENV_VAR
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.utils import flatten_dict
from ray.widgets.util import in_notebook


class NotebookProgress(TrialProgressCallback):
    """Shows the result keys in `_progress_metrics` of the trial's class.

    Terminals get them from Tune itself. Its output for notebooks shows every key of a result, and
    whole blocks as one cell.
    """

    def display_result(self, trial: Any, result: dict[str, Any], error: bool, done: bool) -> None:
        """Called by Tune with a result, in notebooks only."""
        named = getattr(trial.get_trainable_cls(), "_progress_metrics", None)
        if named:
            flat = flatten_dict(result)
            result = {key: flat[key] for key in named if key in flat}
        super().display_result(trial, result, error, done)


class ProgressMetrics:
    """The attribute `_progress_metrics` of a trainable: keys of its results that Tune shows.

    Tune asks for it just before it makes its callbacks. In a notebook, that is the moment to name
    `NotebookProgress` as one of them.

    Args:
        keys: the keys, nested ones with `/`.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def __get__(self, trainable: Any, owner: type[Any]) -> tuple[str, ...]:
        show_named_metrics()
        return self._keys


def show_named_metrics() -> None:
    """In a notebook, has each experiment of this process use `NotebookProgress`. Elsewhere Tune
    would warn about it."""
    names = [name for name in os.environ.get(RAY_TUNE_CALLBACKS_ENV_VAR, "").split(",") if name]
    own = f"{NotebookProgress.__module__}.{NotebookProgress.__qualname__}"
    if in_notebook() and own not in names:
        os.environ[RAY_TUNE_CALLBACKS_ENV_VAR] = ",".join([*names, own])
