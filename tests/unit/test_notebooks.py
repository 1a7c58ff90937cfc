"""In a notebook, Tune shows the keys of a trial that the trainer names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray.tune.constants import RAY_TUNE_CALLBACKS_ENV_VAR as VARIABLE
from ray.tune.progress_reporter import TrialProgressCallback, _detect_progress_metrics
from ray.tune.utils.callback import _create_default_callbacks

from polopt.trainers import notebooks
from polopt.trainers.presets import SyncPPO

KEYS = {"episode_return_mean", "num_env_steps_sampled_lifetime"}


def progress_callbacks() -> list[type]:
    """Makes the progress callbacks of an experiment as Tune does, and returns their classes."""
    keys = _detect_progress_metrics(SyncPPO)
    assert keys is not None
    assert set(keys) >= KEYS
    made = _create_default_callbacks([], progress_metrics=keys)
    return [type(one) for one in made if isinstance(one, TrialProgressCallback)]


def test_a_notebook_has_a_table_of_the_named_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(notebooks, "in_notebook", lambda: True)
    for _ in range(2):
        assert progress_callbacks() == [notebooks.NotebookProgress]
    assert os.environ[VARIABLE].count("NotebookProgress") == 1


def test_outside_of_a_notebook_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert progress_callbacks() == [TrialProgressCallback]
    assert not os.environ[VARIABLE]


def test_the_import_of_the_trainer_sets_nothing_up() -> None:
    code = (
        "import os, ray.widgets.util as util; util.in_notebook = lambda: True; "
        f"import polopt.trainers.trainer; assert {VARIABLE!r} not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
