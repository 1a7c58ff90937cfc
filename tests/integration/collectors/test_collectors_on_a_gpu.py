"""Collectors and gradient workers on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import SMALL, devices_of
from rank_helpers import run_on

import polopt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.mark.parametrize("policy_device", ["cpu", "cuda"])
def test_gradient_worker_on_a_gpu_has_workers_below_on_cpus(
    ray_session: None, policy_device: str
) -> None:
    config = {"env": "CartPole-v1", **SMALL, "num_workers": 1, "num_workers_below": 1}
    gpus = 0.4 if policy_device == "cuda" else 0.0
    trainer = polopt.A3C({**config, "num_gpus_per_worker": gpus})
    try:
        trainer.train()
        assert devices_of(trainer.optimizer.workers.remote) == [policy_device]
        below = run_on(
            trainer.optimizer.workers.remote, lambda worker: worker.workers.config.device
        )
        assert below == ["cpu"]
    finally:
        trainer.stop()


def test_collector_acts_on_a_gpu(ray_session: None) -> None:
    for num_collectors in (0, 1):
        collector = polopt.Collector(
            "CartPole-v1",
            None,
            num_collectors=num_collectors,
            frames_per_batch=16,
            total_frames=32,
            policy_device="cuda",
            remote_configs={"num_cpus": 0.25, "num_gpus": 0.4} if num_collectors else {},
        )
        try:
            batches = list(collector)
            assert sum(batch.env_steps for batch in batches) >= 32
        finally:
            collector.shutdown()
