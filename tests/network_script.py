"""Programs that tests run on node 0 of a `network_nodes.Network`.

The command is `network_script.py PROGRAM ADDRESS ARGUMENT ...`. The last line of the output is
JSON. If the test should change the network, a program prints a line, and waits for a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import ray
from chaos_runs import PacedCartPole, steps_until
from fakes import make_optimizer, worker_config
from network_nodes import wait_for_nodes
from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import polopt
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.workers.worker_set import WorkerSet

POLICIES: dict[str, Any] = {
    "async_gradients": "a2c",
    "sync_gradients": "a2c",
    "sync_replay": DQNPolicy,
    "async_replay": DQNPolicy,
}
OPTIONS: dict[str, Any] = {
    "async_gradients": {"grads_per_step": 8},
    "sync_gradients": {"grads_per_step": 8},
    "sync_replay": {"learning_starts": 100},
    "async_replay": {"learning_starts": 100, "num_replay_shards": 2, "training_intensity": 0.5},
}


def ask(what: str) -> None:
    """Asks the test to change the network, and waits until it has done so."""
    print(what, flush=True)
    assert sys.stdin.readline().strip() == "done"


def make(name: str, num_workers: int, hidden: tuple[int, ...] = (8,), **options: Any) -> Any:
    rollout = {
        "num_workers": num_workers,
        "num_envs_per_worker": 1,
        "num_cpus_per_worker": 1.0,
        "rollout_fragment_length": 20,
        "env_config": {"step_s": 0.002},
        **options,
    }
    model = {"fcnet_hiddens": hidden}
    policy = POLICIES.get(name, "ppo")
    config = worker_config(policy, PacedCartPole, rollout=rollout, model=model)
    return make_optimizer(OPTIMIZERS.get(name), WorkerSet(config), **OPTIONS.get(name, {}))


def all_up(optimizer: Any) -> bool:
    return all(worker.up for worker in optimizer.workers.remote)


def nodes_of(optimizer: Any) -> list[str]:
    return sorted({worker.channel.started.node for worker in optimizer.workers.remote})


def more_updates(optimizer: Any, number: int, limit_s: float = 120.0) -> float:
    """Trains until there are this many further updates. Returns the seconds."""
    wanted, began_s = optimizer.metrics.num_updates + number, time.monotonic()
    steps_until(optimizer, lambda: optimizer.metrics.num_updates >= wanted, limit_s)
    return time.monotonic() - began_s


def report(optimizer: Any, **more: Any) -> dict[str, Any]:
    stats = optimizer.workers.stats()
    optimizer.drain()
    found = {
        "nodes": nodes_of(optimizer),
        "own": ray.get_runtime_context().get_node_id(),
        "transport": optimizer.workers.message_stats()["transport"],
        "steps": optimizer.metrics.num_env_steps_sampled,
        "backend": optimizer.stats().get("allreduce_backend"),
        "lost_arguments": optimizer.stats().get("num_replay_shard_lost_arguments", 0),
        **{kind: stats[f"num_worker_{kind}"] for kind in ("deaths", "hangs", "preemptions")},
        **more,
    }
    optimizer.stop()
    optimizer.workers.stop()
    return found


def train(name: str, transport: str) -> dict[str, Any]:
    """Trains with four workers on three nodes: the driver's node has no room for all."""
    optimizer = make(name, 4, transport=transport)
    steps_until(optimizer, lambda: all_up(optimizer), 120.0)
    more_updates(optimizer, 20)
    return report(optimizer)


def slow_link(name: str) -> dict[str, Any]:
    """Trains with gradients of 280 KB, while one node can send only 2 megabits a second."""
    optimizer = make(name, 6, hidden=(256, 256))
    steps_until(optimizer, lambda: all_up(optimizer), 120.0)
    more_updates(optimizer, 10)
    ask("limit")
    slow_s = more_updates(optimizer, 8, 300.0)
    ask("free")
    more_updates(optimizer, 20, 300.0)
    return report(optimizer, slow_s=slow_s, num_bytes=optimizer.policy.flat.params.nbytes)


def rounds(name: str) -> dict[str, Any]:
    """Trains with four workers, so some are beyond the driver's node. Measures five updates."""
    optimizer = make(name, 4)
    steps_until(optimizer, lambda: all_up(optimizer), 120.0)
    more_updates(optimizer, 2, 300.0)
    before = optimizer.metrics.num_updates
    seconds = more_updates(optimizer, 5, 300.0)
    updates = optimizer.metrics.num_updates - before
    return report(optimizer, seconds_each=seconds / updates)


def tune_trial(folder: str) -> dict[str, Any]:
    """Runs a trial of Tune while the driver's node has no free CPU."""
    own = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(own, soft=False)
    holder = Holder.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    ray.get(holder.hold.remote(), timeout=120.0)
    tuner = tune.Tuner(
        polopt.SyncPPO,
        param_space={
            "env": "CartPole-v1",
            "num_workers": 2,
            "num_cpus_per_worker": 0.5,
            "train_batch_size": 80,
            "rollout_fragment_length": 20,
        },
        run_config=tune.RunConfig(
            storage_path=folder,
            stop={"training_iteration": 2},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    )
    (result,) = tuner.fit()
    assert result.error is None, result.error
    trainer = polopt.SyncPPO({"env": "CartPole-v1", "num_workers": 0})
    trainer.restore(result.checkpoint.path)
    steps = trainer.optimizer.metrics.num_env_steps_sampled
    trainer.stop()
    trial = result.metrics
    return {"ip": trial["node_ip"], "steps": trial["num_env_steps_sampled_lifetime"], "kept": steps}


@ray.remote(num_cpus=2)
class Holder:
    """Holds the CPUs of a node."""

    def hold(self) -> None:
        """Returns once the actor has its CPUs."""


def lose_node(name: str, how: str) -> dict[str, Any]:
    """Trains, while a node is killed (`end`) or cut off (`cut`), and given back."""
    optimizer = make(name, 6, worker_timeout_s=20.0)  # as many as there are CPUs
    workers = optimizer.workers
    steps_until(optimizer, lambda: all_up(optimizer), 120.0)
    ask(how)
    steps_until(optimizer, lambda: workers.stats()["num_worker_deaths"] + hangs(workers) >= 1, 180)
    more_updates(optimizer, 20)
    up_meanwhile = workers.stats()["num_healthy_workers"]
    ask("give back")
    wait_for_nodes(ray, 3)
    steps_until(optimizer, lambda: all_up(optimizer), 240.0)
    more_updates(optimizer, 20)
    return report(optimizer, up_meanwhile=up_meanwhile)


def hangs(workers: WorkerSet) -> int:
    return int(workers.stats()["num_worker_hangs"])


if __name__ == "__main__":
    for module in ("chaos_runs", "fakes", "toy_envs"):
        if module in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    program, address, *arguments = sys.argv[1:]
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    wait_for_nodes(ray, 3)
    print(json.dumps(globals()[program](*arguments)), flush=True)
    ray.shutdown()
