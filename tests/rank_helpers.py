"""Helpers for tests of `DecentralizedAllReduce`. They make this optimizer, and run functions on its
ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fakes import inside, make_optimizer, worker_config

from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.rank_group import checksum
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
LEARNING = {"num_sgd_iter": 3, "sgd_minibatch_size": 8, "lr": 1e-2, "kl_coeff": 0.2}


def make_decentralized(
    pool: Pool,
    policy: str | type = "ppo",
    env: Any = None,
    rollout: dict[str, Any] | None = None,
    learning: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    more = {} if env is None else {"env": env}
    config = worker_config(policy, **more, rollout=rollout, **{**LEARNING, **(learning or {})})
    return make_optimizer(DecentralizedAllReduce, pool(config), **options)


def on_ranks(optimizer: DecentralizedAllReduce, function: Callable[[Any], Any]) -> list[Any]:
    """Drains the optimizer, runs `function(worker)` in each rank, and returns the results."""
    optimizer.drain()
    return run_on(optimizer.group.ranks, function)


def run_on(workers: Iterable[WorkerHandle], function: Callable[[Any], Any]) -> list[Any]:
    values = [inside(worker, function) for worker in workers]
    return [value() for value in values]


def learned_state(worker: Any) -> tuple[str, int, bytes, bytes, dict[str, float]]:
    """Returns the state that must be equal in all ranks."""
    state = worker.policy.get_state()
    adam = state["adam"]["network"]
    moments = (adam["exp_avg"].numpy().tobytes(), adam["exp_avg_sq"].numpy().tobytes())
    return checksum(worker), state["version"], *moments, state["coefficients"]
