"""Tests that `reset_config` accepts each valid random config while workers run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from random_configs import SMALL, is_small, mutated, mutations, quietly

from polopt.common.config import ConfigError
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["A3C", "A2C", "DDPPO"])
def test_mutated_configs_with_workers(ray_session: None, preset: str) -> None:
    base = {**SMALL, "num_workers": 1, "num_cpus_per_worker": 0.5, "grads_per_step": 5}
    if preset != "A3C":
        del base["grads_per_step"]
    trainer = PRESETS[preset](base)

    @given(mutations)
    @settings(quietly, max_examples=60)
    def check(changes: dict[str, Any]) -> None:
        config = mutated(changes, base)
        try:
            experiment = Experiment.parse(config, PRESETS[preset].preset)
            experiment.make_worker_config()
        except ConfigError:
            return
        fits = experiment.rollout.num_workers == 1 and experiment.rollout.num_cpus_per_worker <= 1
        plain = not (experiment.rollout.num_gpus_per_worker or experiment.trainer.num_gpus)
        long_timeout = experiment.rollout.worker_timeout_s > 5
        sized = experiment.rollout.model_copy(update={"num_workers": 0})
        quick = is_small(Experiment(**{**vars(experiment), "rollout": sized}))
        if not (fits and plain and long_timeout and quick):
            return
        if experiment.rollout.custom_resources_per_worker or experiment.rollout.memory_per_worker:
            return
        try:
            assert trainer.reset_config(config)
            trainer.train()
        except WorkersFailedError as error:
            raise AssertionError(f"{changes}") from error

    try:
        check()
    finally:
        trainer.stop()
