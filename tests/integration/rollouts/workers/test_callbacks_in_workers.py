"""Callbacks in worker processes: results contain their metrics, and their errors end the run."""

from __future__ import annotations

from typing import Any

import pytest
from learning import TINY

from polopt import CallbackError, Callbacks, Episode
from polopt.trainers.trainer import PolicyOptimizerTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


class Halved(Callbacks):
    """Returns half of the length of each episode as a metric. Raises at the 200th episode."""

    def __init__(self) -> None:
        self.count = 0

    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        episode.data["steps"] = episode.data.get("steps", 0) + 1

    def on_sample_end(self, *, worker: Any, samples: Any) -> dict[str, float]:
        return {"index": worker.index}

    def on_episode_end(self, *, episode: Episode, worker: Any) -> dict[str, float]:
        self.count += 1
        if self.count == 200:
            raise ValueError(f"enough in worker {worker.index}")
        return {"half": episode.data["steps"] / 2}


def train_on(trainer: PolicyOptimizerTrainer) -> None:
    for _ in range(1000):
        trainer.train()


def test_callbacks_run_below_gradient_workers() -> None:
    options = {name: value for name, value in TINY.items() if not name.startswith("evaluation")}
    below = {"optimizer": "async_gradients", "num_workers_below": 1, "callbacks": Halved}
    trainer = PolicyOptimizerTrainer({**options, **below})
    block: dict[str, Any] = {}
    while "custom_metrics" not in block:
        block = trainer.train()["env_runners"]
    custom = block["custom_metrics"]
    assert custom["index_max"] >= 1
    assert 4 < custom["half_min"] <= custom["half_mean"] <= custom["half_max"]
    said = r"^callback Halved.on_episode_end \(worker 1\) raised ValueError: enough in worker 1"
    with pytest.raises(CallbackError, match=said):
        train_on(trainer)
    faults = trainer.workers.stats()
    assert faults["num_remote_worker_restarts"] == faults["num_restarts_below"] == 0
    trainer.stop()
