"""Each random config either trains, or raises one `ConfigError` before any actor starts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import (
    SMALL,
    check_message,
    is_small,
    mutated,
    mutations,
    quietly,
)

from polopt.common.config import ConfigError
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer


def trains_or_raises_config_error(config: dict[str, Any]) -> bool:
    """Returns whether the config trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example, warnings about outdated environments
        try:
            experiment = Experiment.parse(config, {})
            experiment.make_worker_config()
            if not is_small(experiment):
                return False
            trainer = PolicyOptimizerTrainer(config)
        except ConfigError as error:
            check_message(str(error))
            return False
        try:
            result = trainer.train()
            assert result["num_env_steps_sampled_lifetime"] > 0
            assert np.isfinite(trainer.get_policy().get_weights().flat).all()
        finally:
            trainer.stop()
    return True


@given(mutations)
@settings(quietly, max_examples=150)
def test_mutated_config_trains_or_is_a_config_error(changes: dict[str, Any]) -> None:
    trains_or_raises_config_error(mutated(changes))


@given(st.sampled_from(sorted(PRESETS)), mutations)
@settings(quietly, max_examples=150)
def test_every_preset_checks_its_config(preset: str, changes: dict[str, Any]) -> None:
    try:
        Experiment.parse(mutated(changes, {**SMALL, "num_workers": 1}), {}).make_worker_config()
        Experiment.parse(mutated(changes, {**SMALL, "num_workers": 1}), PRESETS[preset].preset)
    except ConfigError as error:
        check_message(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(mutations)
@settings(quietly, max_examples=3000, derandomize=False)
def test_many_mutated_configs(changes: dict[str, Any]) -> None:
    trains_or_raises_config_error(mutated(changes))


# ---- files and the command line ---------------------------------------------------------------
