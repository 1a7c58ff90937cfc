"""Tests that each of three optimizers continues from the states of all three."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from fakes import make_optimizer, worker_config

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
LEARNING = {"num_sgd_iter": 2, "sgd_minibatch_size": 8, "kl_coeff": 0.3, "kl_target": 1e-6}
TIMES = ("startup_s", "training_s")
OPTIMIZERS: dict[str, tuple[type[PolicyOptimizer], dict[str, Any]]] = {
    "async_gradients": (AsyncGradients, {"grads_per_step": 6}),
    "sync_samples": (SyncSamples, {"train_batch_size": 30}),
    "decentralized_allreduce": (DecentralizedAllReduce, {}),
}


def make(pool: Pool, name: str, seed: int) -> PolicyOptimizer:
    cls, options = OPTIMIZERS[name]
    optimizer: PolicyOptimizer = make_optimizer(
        cls, pool(worker_config("ppo", seed=seed, **LEARNING)), **options
    )
    return optimizer


@pytest.fixture(scope="module")
def saved(worker_pool: Pool) -> dict[str, dict[str, Any]]:
    """Returns a state of each optimizer after three steps."""
    states = {}
    for name in OPTIMIZERS:
        optimizer = make(worker_pool, name, seed=0)
        for _ in range(3):
            optimizer.step()
        states[name] = optimizer.get_state()
    return states


def common(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a state that all optimizers have, in a form that can be compared.
    Generators for shuffling are left out, because each rank has its own generator."""
    policy = {key: value for key, value in state["policy"].items() if key != "shuffle"}
    policy["params"] = policy["params"].tolist()
    policy["adam"] = {k: v.tolist() for k, v in policy["adam"]["network"].items()}
    rest = {
        key: value
        for key, value in state.items()
        if key not in ("policy", "workers", "restore_count", *TIMES)
    }
    return copy.deepcopy({**rest, "policy": policy})


@pytest.mark.parametrize("target", OPTIMIZERS)
@pytest.mark.parametrize("source", OPTIMIZERS)
def test_every_optimizer_restores_the_state_of_every_other(
    worker_pool: Pool, saved: dict[str, dict[str, Any]], source: str, target: str
) -> None:
    state = saved[source]
    expected = common(state)
    optimizer = make(worker_pool, target, seed=1)
    optimizer.step()  # now the state differs, and the pipeline is full
    optimizer.set_state(state)
    restored = optimizer.get_state()
    assert common(restored) == expected
    assert all(restored[name] >= state[name] for name in TIMES)  # total times increase
    # The number of restores changes the random numbers of the run.
    assert restored["restore_count"] == state["restore_count"] + 1

    result = optimizer.step()
    assert result.updates > 0
    after = optimizer.get_state()
    assert after["num_updates"] >= expected["num_updates"] + result.updates
    assert after["num_env_steps_sampled"] > expected["num_env_steps_sampled"]
    assert after["num_env_steps_trained"] > expected["num_env_steps_trained"]
    assert after["policy"]["env_steps"] == after["num_env_steps_sampled"]
    # Each update is one step of Adam and one version, in both parts of the run and on all ranks.
    assert after["policy"]["version"] == after["num_updates"]
    assert after["policy"]["adam"]["network"]["step"].item() == after["num_updates"]
    assert after["policy"]["params"].tolist() != expected["policy"]["params"]
    assert common(state) == expected, "the saved state does not change"
