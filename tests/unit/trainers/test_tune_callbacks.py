"""Callbacks that a trainer adds to Tune: they check stop keys, and choose the keys that a notebook
shows."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from ray import tune
from ray.tune.constants import RAY_TUNE_CALLBACKS_ENV_VAR as VARIABLE
from ray.tune.progress_reporter import TrialProgressCallback, _detect_progress_metrics
from ray.tune.utils.callback import _create_default_callbacks

from polopt.common.config import ConfigError
from polopt.trainers import tune_callbacks
from polopt.trainers.presets import SyncPPO
from polopt.trainers.tune_callbacks import Checks

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
    monkeypatch.setattr(tune_callbacks, "in_notebook", lambda: True)
    for _ in range(2):
        assert progress_callbacks() == [tune_callbacks.NotebookProgress]
    assert os.environ[VARIABLE].count("NotebookProgress") == 1


def test_outside_of_a_notebook_tune_shows_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert progress_callbacks() == [TrialProgressCallback]
    assert "NotebookProgress" not in os.environ[VARIABLE]


def test_the_import_of_the_trainer_sets_nothing_up() -> None:
    code = (
        "import os, ray.widgets.util as util; util.in_notebook = lambda: True; "
        f"import polopt.trainers.trainer; assert {VARIABLE!r} not in os.environ"
    )
    inherited = {key: value for key, value in os.environ.items() if key != VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=inherited)


# ---- stop keys --------------------------------------------------------------------------------

RESULT: dict[str, Any] = {
    "training_iteration": 1,
    "env_runners": {"episode_return_mean": 1.0, "num_episodes_lifetime": 3},
}


def made_checks() -> Checks:
    """Makes the callbacks of an experiment as Tune does."""
    _detect_progress_metrics(SyncPPO)
    (callback,) = (one for one in _create_default_callbacks([]) if isinstance(one, Checks))
    return callback


def offer(trainable: type, stop: dict[str, float], result: dict[str, Any], count: int = 1) -> None:
    """Offers results of a trial to the callbacks that Tune makes for an experiment."""
    callback = made_checks()
    trial = mock.Mock(trial_id="1", stopping_criterion=stop)
    trial.get_trainable_cls.return_value = trainable
    for _ in range(count):
        callback.on_trial_result(iteration=1, trials=[trial], trial=trial, result=result)


def test_a_stop_key_of_tune_that_no_result_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trial never stops."""
    monkeypatch.setenv(VARIABLE, "")
    wrong = {"no_such_total": 20.0, "env_runners/episode_retrn_mean": 5.0, "training_iteration": 9}
    with pytest.raises(ConfigError) as caught:
        offer(SyncPPO, wrong, RESULT)
    first, second = str(caught.value).splitlines()
    assert "'no_such_total'" in first
    assert "did you mean 'env_runners/episode_return_mean'" in second


def test_stop_keys_that_a_result_has_or_that_another_trainable_reads_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    right = {"env_runners/episode_return_mean": 9.0, "env_runners/custom_metrics/won_mean": 1.0}
    offer(SyncPPO, right, RESULT, count=2)
    offer(tune.Trainable, {"no_such_key": 1.0}, RESULT)
