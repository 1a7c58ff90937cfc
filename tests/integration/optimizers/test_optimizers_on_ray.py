"""Each optimizer trains with its own workers on Ray. `make test` runs this file and the unit
tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from declared_numbers import differences

from polopt import PolicyOptimizerTrainer
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.trainers.numbers import numbers_of

WORKERS = 2
_REPLAY = {"learning_starts": 20, "train_batch_size": 8}
#: The options of optimizers that do not learn from fragments.
OPTIONS = {
    name: {"optimizer": {"name": name, **_REPLAY}, "policy": "dqn"}
    for name in ("async_replay", "sync_replay")
}


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_optimizer_trains_on_ray(ray_session: None, tmp_path: Path, name: str) -> None:
    def make_env(context: Any) -> gymnasium.Env[Any, Any]:
        (Path(context["folder"]) / str(os.getpid())).touch()
        return gymnasium.make("CartPole-v1")

    trainer = PolicyOptimizerTrainer(
        config={
            **OPTIONS.get(name, {"optimizer": name, "policy": "a2c"}),
            "env": make_env,
            "env_config": {"folder": str(tmp_path)},
            "num_workers": WORKERS,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 10,
            # With async_replay, the first batch arrives some fragments after the first rows.
            "min_sample_timesteps_per_iteration": 400 if name == "async_replay" else 40,
            "seed": 0,
            "evaluation_interval": 1,
            "evaluation_num_workers": 0,
            "evaluation_duration": 1,
        }
    )
    numbers = numbers_of(type(trainer.optimizer), type(trainer.get_policy()))
    try:
        before = trainer.get_policy().get_weights().flat.copy()
        first, last = trainer.train(), trainer.train()
        after = trainer.get_policy().get_weights().flat
    finally:
        trainer.stop()
    pids = {int(path.name) for path in tmp_path.iterdir()} - {os.getpid()}
    assert len(pids) >= WORKERS, "environments run in the workers' processes"
    assert last["optimizer"]["name"] == name
    assert first["num_env_steps_sampled_lifetime"] >= 40
    assert last["num_env_steps_trained_lifetime"] > first["num_env_steps_trained_lifetime"] > 0
    assert np.isfinite(after).all()
    assert not np.array_equal(before, after)
    assert differences(numbers, [first, last]) == []
