"""Programs that tests run, each with its own Ray: `chaos_scripts.py PROGRAM ARGUMENT ...`.

The last line of the output is JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from chaos_runs import PacedCartPole, steps_until
from fakes import make_optimizer, worker_config
from gymnasium import spaces

from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.find_checkpoint import find_checkpoint
from polopt.trainers.trainer import PolicyOptimizerTrainer

QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class Wide(gymnasium.Env[np.ndarray, int]):
    """An environment with observations of 40 KB."""

    observation_space = spaces.Box(0.0, 1.0, (10_000,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._obs(), {}

    def _obs(self) -> np.ndarray:
        return self.np_random.random(10_000, dtype=np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._obs(), 1.0, False, False, {}


def make(name: str, env: Any, options: dict[str, Any]) -> Any:
    for module in ("chaos_runs", "fakes", "toy_envs", "__main__"):
        if module in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    config = worker_config("a2c" if name == "async_gradients" else "ppo", env, rollout=options)
    more = {"grads_per_step": 8} if name == "async_gradients" else {}
    return make_optimizer(OPTIMIZERS.get(name), WorkerSet(config), **more)


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(name: str, steps: str) -> dict[str, Any]:
    """Trains on batches of megabytes with an object store of 80 MB."""
    ray.init(num_cpus=8, object_store_memory=80_000_000, **QUIET)
    options = {"num_workers": 4, "rollout_fragment_length": 20, "num_envs_per_worker": 2}
    optimizer = make(name, Wide, {**options, "num_cpus_per_worker": 0.5})
    total = ray.cluster_resources()["object_store_memory"]
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    used, resident = [], []
    for _ in range(int(steps)):
        optimizer.step()
        used.append((total - ray.available_resources()["object_store_memory"]) / 1e6)
        resident.append(rss_mb(os.getpid()))
    weights = optimizer.policy.get_weights().flat.nbytes
    fragment = 20 * 2 * 40_000
    return {
        "used_mb": max(used),
        "spilled": sum(path.is_file() for path in session.glob("ray_spilled_objects*/**/*")),
        "rss_mb": [resident[len(resident) // 3], resident[-1]],
        "bytes_in_flight_mb": 4 * (weights + max(fragment, weights)) / 1e6,
        "updates": optimizer.metrics.num_updates,
        "deaths": optimizer.workers.faults.counts["death"],
    }


def two_nodes() -> dict[str, Any]:
    """Runs a head node without CPUs, and a node with two CPUs, until standard input ends. Prints
    the address of the head node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        cluster.add_node(num_cpus=2)
        print(json.dumps({"address": cluster.address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
    return {}


def nodes(name: str) -> dict[str, Any]:
    """Trains with four workers on two nodes. Removes one of the nodes, and later adds a node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    there = [cluster.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    options = {
        "num_workers": 4,
        "num_envs_per_worker": 1,
        "num_cpus_per_worker": 1.0,
        "env_config": {"step_s": 0.005},
    }
    optimizer = make(name, PacedCartPole, options)
    workers = optimizer.workers
    steps_until(optimizer, lambda: all(worker.up for worker in workers.remote), 120.0)
    began_s = time.monotonic()
    cluster.remove_node(there[0], allow_graceful=False)
    removed_s = time.monotonic()
    steps_until(optimizer, lambda: workers.faults.counts["death"] >= 2, 60.0)
    updates = optimizer.metrics.num_updates
    steps_until(optimizer, lambda: optimizer.metrics.num_updates > updates, 60.0)
    noticed_s = time.monotonic() - began_s
    longest_s = max(steps_until(optimizer, lambda: time.monotonic() > removed_s + 20.0, 60.0))
    healthy = workers.stats()["num_healthy_workers"]
    cluster.add_node(num_cpus=2)
    added_s = time.monotonic()
    steps_until(optimizer, lambda: all(worker.up for worker in workers.remote), 120.0)
    whole_s = time.monotonic() - added_s
    deaths = workers.faults.counts["death"]
    ray.shutdown()
    cluster.shutdown()
    return {
        "going_on_s": noticed_s,
        "longest_step_s": longest_s,
        "healthy_meanwhile": healthy,
        "whole_s": whole_s,
        "deaths": deaths,
    }


def driver(name: str, directory: str) -> dict[str, Any]:
    """Restores the newest complete checkpoint, and trains until the process is killed. After every
    second iteration, saves a checkpoint and prints the number of environment steps in it."""
    ray.init(num_cpus=8, **QUIET)
    trainer = PolicyOptimizerTrainer(
        {
            "env": "CartPole-v1",
            "optimizer": name,
            "policy": "a2c" if name == "async_gradients" else "ppo",
            "num_workers": 2,
            "num_cpus_per_worker": 0.5,
            "min_sample_timesteps_per_iteration": 500,
        }
    )
    resumed = 0
    try:
        trainer.restore(str(find_checkpoint(Path(directory))))
        resumed = trainer.optimizer.metrics.num_env_steps_sampled
    except CheckpointError:
        pass
    print_steps("begun", resumed)
    while True:
        trainer.train()
        trainer.train()
        steps = trainer.optimizer.metrics.num_env_steps_sampled
        trainer.save(str(Path(directory, f"after-{trainer.iteration:06d}")))
        print_steps("saved", steps)


def print_steps(what: str, steps: int) -> None:
    print(json.dumps({"what": what, "steps": steps}), flush=True)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
