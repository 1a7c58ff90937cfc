"""Trains on a cluster whose nodes are taken away and given back: `preemption_script.py OPTIMIZER
NUMBER FOLDER`.

The environments count their own steps in files in FOLDER. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import ray
from chaos_runs import steps_until
from fakes import make_optimizer, pid_of, worker_config
from plugin_page import PLUGINS, plugin
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

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


class CountingCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with steps of 2 ms. The size of its file is the number of its steps."""

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.file = -1
        if config.worker_index:  # the driver's environment is only there for its spaces
            self.file, _ = tempfile.mkstemp(dir=config["folder"])

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        os.write(self.file, b".")
        return self.env.step(action)


def drain(address: str, node: str) -> None:
    """Tells Ray that a node will be preempted in a minute, as `ray drain-node` does."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    until_ms = int(1000 * (time.time() + 60.0))
    accepted, why = GcsClient(address=address).drain_node(node, reason, "test", until_ms)
    assert accepted, why


def alive(node: str) -> bool:
    return any(one["Alive"] and one["NodeID"] == node for one in ray.nodes())


def main(name: str, number: str, folder: str) -> dict[str, Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    if name in PLUGINS:
        plugin(name)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    there = [cluster.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    rollout = {
        "num_workers": 2 if name == "async_replay" else 4,
        "num_envs_per_worker": 1,
        "num_cpus_per_worker": 1.0,
        "env_config": {"folder": folder},
        "rollout_fragment_length": 10,
    }
    config = worker_config(POLICIES.get(name, "ppo"), CountingCartPole, rollout=rollout)
    optimizer = make_optimizer(OPTIMIZERS.get(name), WorkerSet(config), **OPTIONS.get(name, {}))
    groups = [optimizer.workers, *([optimizer.shards] if name == "async_replay" else [])]
    processes = sum(len(group.remote) for group in groups)

    def all_up() -> bool:
        return all(one.up for group in groups for one in group.remote)

    def left() -> int:
        return sum(group.faults.counts["preemption"] for group in groups)

    steps_until(optimizer, all_up, 120.0)
    least_up = processes
    for _ in range(int(number)):
        node = there.pop(0)
        begun, drained = left(), node.node_id
        drain(cluster.address, drained)
        # A node with actors stays. So the workers have left, and so has the agent of the node.
        steps_until(optimizer, lambda node=drained: not alive(node), 90.0)
        least_up = min(least_up, sum(one.up for group in groups for one in group.remote))
        assert left() > begun
        cluster.remove_node(node, allow_graceful=False)
        there.append(cluster.add_node(num_cpus=2))
        steps_until(optimizer, all_up, 120.0)
    by_drain, worker = left(), optimizer.workers.remote[0]
    os.kill(pid_of(worker), signal.SIGTERM)
    steps_until(optimizer, lambda: all_up() and worker.removed, 120.0)
    updates = optimizer.metrics.num_updates
    steps_until(optimizer, lambda: optimizer.metrics.num_updates > updates, 120.0)
    optimizer.drain()
    while optimizer.workers.leaving:
        optimizer.step()
        optimizer.drain()
    optimizer.calls.count()
    kept = [r for r in optimizer.calls.kept if r.worker.who == optimizer.workers.who]
    faults = optimizer.workers.stats()
    found = {
        "counted": optimizer.metrics.num_env_steps_sampled + sum(r.counts.env_steps for r in kept),
        "made": sum(path.stat().st_size for path in Path(folder).iterdir()),
        "num_worker_preemptions": sum(g.stats()["num_worker_preemptions"] for g in groups),
        "left_by_drain": by_drain,
        "left_by_sigterm": left() - by_drain,
        "least_up": least_up,
        "processes": processes,
        "failures": {kind: faults[f"num_worker_{kind}"] for kind in ("deaths", "hangs")},
        "lost_arguments": sum(group.faults.counts["reference"] for group in groups),
        "transport": optimizer.workers.message_stats()["transport"],
        "broken_rounds": optimizer.stats().get("num_broken_rounds", 0),
        "num_agents": len(optimizer.workers.transport.through_ray._agents),
    }
    optimizer.stop()
    optimizer.workers.stop()
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
