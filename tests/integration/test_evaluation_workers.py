"""Evaluation beside training, in Ray actors."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import pid_of
from plugin_page import plugin

import polopt
from polopt.trainers.trainer import PolicyOptimizerTrainer

pytestmark = pytest.mark.usefixtures("ray_session")
#: One worker of each kind, and short iterations.
TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "policy": "a2c",
    "num_workers": 1,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "min_sample_timesteps_per_iteration": 64,
    "min_time_s_per_iteration": 0.05,
    "model": {"fcnet_hiddens": [8]},
    "seed": 1,
    "evaluation_interval": 1,
    "evaluation_duration": 3,
    "evaluation_num_workers": 1,
}


def train_until(trainer: PolicyOptimizerTrainer, evaluations: int) -> dict[str, Any]:
    """Trains until so many evaluations have ended; the result in which the last one has."""
    for _ in range(1000):
        result = trainer.train()
        if result["evaluation"]["num_evaluations"] >= evaluations:
            return result
    raise AssertionError("the evaluation does not end")


@pytest.mark.parametrize("optimizer", ["decentralized_allreduce", "local_sgd"])
def test_every_optimizer_evaluates_beside_training(optimizer: str) -> None:
    if optimizer == "local_sgd":
        plugin(optimizer)
    trainer = PolicyOptimizerTrainer({**TINY, "optimizer": optimizer})
    evaluation = train_until(trainer, 2)["evaluation"]
    assert evaluation["env_runners"]["num_episodes"] == 3
    assert evaluation["env_runners"]["episode_return_mean"] > 0
    assert 0 < evaluation["policy_version"] <= trainer.get_policy().version
    best = polopt.load(Path(trainer.logdir) / "best_checkpoint")
    assert best.version == evaluation["best_policy_version"]
    trainer.stop()


def test_killed_evaluation_worker_costs_no_training() -> None:
    trainer = PolicyOptimizerTrainer({**TINY, "optimizer": "async_gradients"})
    train_until(trainer, 1)
    assert trainer.evaluation is not None
    (worker,) = trainer.evaluation.workers.remote
    os.kill(pid_of(worker), signal.SIGKILL)
    before = trainer.evaluation.num_evaluations
    result = train_until(trainer, before + 2)
    assert not math.isnan(result["evaluation"]["env_runners"]["episode_return_mean"])
    assert result["evaluation"]["fault_tolerance"]["num_remote_worker_restarts"] == 1
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 0
    trainer.stop()
