"""Tests of evaluation in Ray actors during training."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import pid_of
from learning import TINY
from plugin_page import plugin
from toy_envs import Drift

import polopt
from polopt.trainers.trainer import PolicyOptimizerTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


def train_until(trainer: PolicyOptimizerTrainer, evaluations: int) -> dict[str, Any]:
    """Trains until a number of evaluations have ended. Returns the result in which the last
    evaluation ended."""
    for _ in range(1000):
        result = trainer.train()
        if result["evaluation"]["num_evaluations"] >= evaluations:
            return result
    raise AssertionError("the evaluation does not end")


@pytest.mark.parametrize("optimizer", ["decentralized_allreduce", "local_sgd"])
def test_evaluation_runs_beside_training(optimizer: str) -> None:
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


class Placed(Drift):
    """An environment that writes its indices to a file."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        place = f"{config.worker_index}-{config.vector_index}-{os.getpid()}"
        kind = "evaluation" if config.in_evaluation else "training"
        Path(config["folder"], kind, place).touch()


@pytest.mark.parametrize("below", [0, 2])
def test_no_two_environments_of_a_run_have_the_same_place(tmp_path: Path, below: int) -> None:
    for kind in ("training", "evaluation"):
        (tmp_path / kind).mkdir()
    trainer = PolicyOptimizerTrainer(
        {
            **TINY,
            "optimizer": "async_gradients",
            "env": Placed,
            "env_config": {"folder": str(tmp_path)},
            "num_workers": 2,
            "num_workers_below": below,
            "evaluation_num_workers": 2,
            "max_frames_per_traj": 5,
        }
    )
    train_until(trainer, 1)
    trainer.stop()

    def places(kind: str) -> list[tuple[int, ...]]:
        names = [path.name.split("-") for path in (tmp_path / kind).iterdir()]
        made = [(int(worker), int(vector)) for worker, vector, _ in names]
        # The driver makes the environment (0, 0) to check the config.
        return sorted(place for place in made if place != (0, 0))

    last = 2 * max(below, 1)
    assert places("training") == [(w, v) for w in range(1, last + 1) for v in range(2)]
    assert places("evaluation") == [(w, v) for w in (last + 1, last + 2) for v in range(2)]
