"""Makes Tune's progress table in notebooks show only the metrics that a trainable selects."""

from __future__ import annotations

import os
from typing import Any

from ray.tune.constants import RAY_TUNE_CALLBACKS_ENV_VAR
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.utils import flatten_dict
from ray.widgets.util import in_notebook


class NotebookProgress(TrialProgressCallback):
    """Shows only the result keys in `_progress_metrics` of the trial's class.

    In a terminal, Tune itself uses `_progress_metrics`. In a notebook, Tune itself would show
    nearly every key of a result, with each nested block in one cell.
    """

    def display_result(self, trial: Any, result: dict[str, Any], error: bool, done: bool) -> None:
        """Shows one result. Tune calls this method only in notebooks."""
        named = getattr(trial.get_trainable_cls(), "_progress_metrics", None)
        if named:
            flat = flatten_dict(result)
            result = {key: flat[key] for key in named if key in flat}
        super().display_result(trial, result, error, done)


class ProgressMetrics:
    """Descriptor for the attribute `_progress_metrics` of a trainable: the result keys that Tune
    shows.

    Tune reads this attribute just before it makes its callbacks. In a notebook, reading the
    attribute therefore also selects `NotebookProgress` as one of the callbacks.

    Args:
        keys: the result keys. In the path of a nested key, `/` separates the parts.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def __get__(self, trainable: Any, owner: type[Any]) -> tuple[str, ...]:
        show_named_metrics()
        return self._keys


def show_named_metrics() -> None:
    """In a notebook, makes each Tune experiment of this process use `NotebookProgress`. Does
    nothing outside of notebooks, because Tune would warn about the callback there."""
    names = [name for name in os.environ.get(RAY_TUNE_CALLBACKS_ENV_VAR, "").split(",") if name]
    own = f"{NotebookProgress.__module__}.{NotebookProgress.__qualname__}"
    if in_notebook() and own not in names:
        os.environ[RAY_TUNE_CALLBACKS_ENV_VAR] = ",".join([*names, own])
