"""Runs on Ray, each with a worker that is killed: a rerun is equal bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import pid_of
from plugin_page import PLUGINS, plugin

import polopt
from polopt.trainers.run_record import digest_of
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: By name: options of the run. Together they have both transports.
CASES: dict[str, dict[str, Any]] = {
    "async_gradients": {"optimizer": "async_gradients", "policy": "a2c", "transport": "socket"},
    "async_samples": {"optimizer": "async_samples", "policy": "impala", "transport": "ray"},
    "allreduce": {"optimizer": "decentralized_allreduce", "transport": "socket"},
    "elastic": {"optimizer": "elastic_averaging", "policy": "a2c", "transport": "ray"},
    "workers below": {
        "optimizer": "async_gradients",
        "policy": "a2c",
        "num_workers": 1,
        "num_workers_below": 2,
        "collection": "async",
    },
}


def train(options: dict[str, Any]) -> tuple[str, list[str], int]:
    """Three iterations, with a death in the second: directory, digests, and restarts."""
    trainer = PolicyOptimizerTrainer(options)
    digests = []
    for iteration in range(3):
        if iteration == 1:
            os.kill(pid_of(trainer.workers.remote[-1]), signal.SIGKILL)
        trainer.train()
        digests.append(digest_of(trainer.get_policy()))
        if iteration == 1:
            trainer.save()
    restarts = trainer.workers.faults.num_restarts
    trainer.stop()
    return trainer.logdir, digests, restarts


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_killed_worker_is_repeated(
    ray_session: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.trainers.trainer.DEFAULT_STORAGE_PATH", str(tmp_path))
    for one in PLUGINS:
        plugin(one)
    options = {
        "env": "CartPole-v1",
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 10,
        "num_cpus_per_worker": 0.3,
        "min_sample_timesteps_per_iteration": 200,
        "model": {"fcnet_hiddens": [16]},
        "seed": 3,
        "record_arrivals": True,
        **CASES[name],
    }
    folder, digests, restarts = train(options)
    assert restarts == 1
    trainers = polopt.rerun(folder)
    again = []
    for trainer in trainers:
        again.append(digest_of(trainer.get_policy()))
        restarts = trainer.workers.faults.num_restarts
    assert again == digests
    assert restarts == 1, "nobody was killed, and the death is repeated"
