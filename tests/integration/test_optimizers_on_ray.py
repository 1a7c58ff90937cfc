"""Each optimizer trains with its own workers on Ray. `make test` runs this file and the unit
tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from declared_numbers import differences

from polopt import Collector, PolicyOptimizerTrainer
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


@pytest.mark.parametrize("sync", [True, False])
def test_collector_collects_on_ray(ray_session: None, sync: bool) -> None:
    collector = Collector(
        "CartPole-v1",
        "a2c",
        num_collectors=WORKERS,
        num_envs=2,
        frames_per_batch=40,
        sync=sync,
    )
    with collector:
        batches = [next(collector) for _ in range(3)]
    # Additional steps replace the rows in which an environment only resets. Both environments of a
    # worker take these steps.
    steps = [batch.env_steps for batch in batches]
    assert all(40 <= count < 40 + 2 * WORKERS for count in steps), steps


def test_command_line_trains(tmp_path: Path) -> None:
    code = "from polopt.command_line.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "cartpole_ppo", "stop.training_iteration=1"]
    done = subprocess.run(
        [*command, "--results-dir", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("result.json")
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["training_iteration"] for result in results] == [1]
    assert "Traceback" not in done.stdout + done.stderr
