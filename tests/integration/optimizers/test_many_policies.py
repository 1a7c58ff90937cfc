"""Several policies under every optimizer, with workers on Ray: transports, kills, and policies that
only some workers have rows for."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix
from fakes import pid_of
from ray import tune

import polopt
from polopt import PolicyOptimizerTrainer
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_group import PolicyGroup

SLOW = pytest.mark.slow
_REPLAY = {"learning_starts": 40, "train_batch_size": 8}
TWO = {"policies": ["rows", "columns"], "policy_mapping_fn": {"row": "rows", "*": "columns"}}


def make_env(context: Any) -> Matrix:
    """In worker 1, the agent `column` takes no part if the config says so."""
    alone = context.get("alone") and context.worker_index == 1
    return Matrix(rounds=7, absent="column" if alone else "")


def against_the_past(agent_id: str, rng: np.random.Generator) -> str:
    """The row player is sometimes a former version of its policy."""
    if agent_id == "column":
        return "columns"
    return "past" if rng.random() < 0.3 else "rows"


def trainer_of(name: str, **options: Any) -> Any:
    replay = name in ("sync_replay", "async_replay")
    return PolicyOptimizerTrainer(
        {
            "env": make_env,
            "optimizer": {"name": name, **_REPLAY} if replay else name,
            "policy": "dqn" if replay else "a2c",
            **TWO,
            "num_workers": 2,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 10,
            "model": {"fcnet_hiddens": [8]},
            "min_sample_timesteps_per_iteration": 400 if name == "async_replay" else 80,
            "min_time_s_per_iteration": 0,
            "seed": 0,
            **options,
        }
    )


#: These optimizers train two policies in the other tests of this module.
ELSEWHERE = {"async_gradients", "sync_gradients", "sync_samples"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=SLOW if n in ELSEWHERE else []) for n in OPTIMIZERS.names()],
)
def test_optimizer_trains_several_policies(ray_session: None, name: str) -> None:
    trainer = trainer_of(name)
    before = trainer.get_policy().get_weights().flat
    results = [trainer.train() for _ in range(2)]
    policy = trainer.get_policy()
    trainer.stop()
    last = results[-1]
    assert isinstance(policy, PolicyGroup)
    steps = last["num_env_steps_sampled_lifetime"]
    assert last["num_agent_steps_sampled_lifetime"] == 2 * steps
    assert set(last["env_runners"]["agent_episode_returns_mean"]) == {"row", "column"}
    assert last["env_runners"]["episode_len_mean"] == 7
    assert not np.array_equal(policy.get_weights().flat, before)
    assert all(one.version > 0 for one in policy.policies.values())
    assert np.isfinite([last["learners"][n]["grad_norm"] for n in policy.policies]).all()


def test_transports_give_the_same_weights(ray_session: None) -> None:
    found = []
    for transport in ("ray", "socket"):
        trainer = trainer_of("sync_samples", transport=transport)
        trainer.train()
        found.append(trainer.get_policy().get_weights())
        trainer.stop()
    np.testing.assert_array_equal(found[0].flat, found[1].flat)
    assert found[0].coefficients == found[1].coefficients


@pytest.mark.parametrize(
    "name",
    ["async_gradients", "decentralized_allreduce", pytest.param("sync_samples", marks=SLOW)],
)
def test_killed_worker_is_replaced_and_counts_stay_exact(ray_session: None, name: str) -> None:
    trainer = trainer_of(name)
    trainer.train()
    os.kill(pid_of(trainer.workers.remote[-1]), signal.SIGKILL)
    results = [trainer.train() for _ in range(4)]
    trainer.stop()
    assert results[-1]["fault_tolerance"]["num_worker_deaths"] >= 1
    for result in results:
        steps = result["num_env_steps_sampled_lifetime"]
        assert result["num_agent_steps_sampled_lifetime"] == 2 * steps


@pytest.mark.parametrize(
    "name", ["sync_gradients", "decentralized_allreduce", pytest.param("sync_samples", marks=SLOW)]
)
def test_policy_that_only_one_worker_has_rows_for(ray_session: None, name: str) -> None:
    trainer = trainer_of(name, env_config={"alone": True})
    results = [trainer.train() for _ in range(2)]
    policies = trainer.get_policy().policies
    trainer.stop()
    steps = results[-1]["num_env_steps_sampled_lifetime"]
    agent_steps = results[-1]["num_agent_steps_sampled_lifetime"]
    assert steps < agent_steps < 2 * steps
    assert policies["columns"].version > 0
    if name != "sync_gradients":  # there, both learn from each gradient
        assert policies["rows"].version >= policies["columns"].version
    assert results[-1]["optimizer"].get("num_resynchronized", 0) == 0


@pytest.mark.parametrize(
    "name",
    [
        "async_gradients",
        pytest.param("decentralized_allreduce", marks=SLOW),
        pytest.param("async_samples", marks=SLOW),
        pytest.param("async_replay", marks=SLOW),
    ],
)
def test_added_policy_survives_a_killed_worker(ray_session: None, name: str) -> None:
    trainer = trainer_of(name)
    trainer.train()
    trainer.add_policy("past", "rows", policy_mapping_fn=against_the_past)
    past = trainer.get_policy("past").get_weights().flat
    trainer.train()
    os.kill(pid_of(trainer.workers.remote[-1]), signal.SIGKILL)
    for _ in range(3):
        result = trainer.train()
    np.testing.assert_array_equal(trainer.get_policy("past").get_weights().flat, past)
    versions = {one: trainer.get_policy(one).version for one in ("past", "rows", "columns")}
    trainer.stop()
    assert versions["past"] < versions["rows"] <= versions["columns"]
    steps = result["num_env_steps_sampled_lifetime"]
    assert result["num_agent_steps_sampled_lifetime"] == 2 * steps


@pytest.mark.parametrize("name", ["pbt", pytest.param("asha", marks=SLOW)])
def test_schedulers_of_tune_run_several_policies(
    ray_session: None, name: str, tmp_path: Path
) -> None:
    """PBT copies a trial with all its policies, and changes the learning rate of one of them. The
    trial with the larger learning rate counts as the better one."""
    rates = [1e-3, 1e-2]
    scheduler: Any = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_mutations={"policies": {"rows": {"lr": rates}}},
    )
    if name == "asha":
        scheduler = tune.schedulers.ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
    config = {
        "env": Matrix,
        "num_workers": 0,
        "rollout_fragment_length": 20,
        "policies": {"rows": {"lr": tune.grid_search([1e-7, 1e-2])}, "columns": {"lr": 1e-5}},
        "policy_mapping_fn": TWO["policy_mapping_fn"],
        "min_sample_timesteps_per_iteration": 40,
        "min_time_s_per_iteration": 0,
    }
    grid = tune.Tuner(
        polopt.A2C,
        param_space=config,
        tune_config=tune.TuneConfig(
            metric="learners/rows/default_optimizer_learning_rate",
            mode="max",
            scheduler=scheduler,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), stop={"training_iteration": 4}, verbose=0
        ),
    ).fit()
    assert not grid.errors
    results: list[dict[str, Any]] = [result.metrics or {} for result in grid]
    learners = [result["learners"] for result in results]
    assert {one["columns"]["default_optimizer_learning_rate"] for one in learners} == {1e-5}
    if name == "pbt":
        found = {one["rows"]["default_optimizer_learning_rate"] for one in learners}
        assert found <= set(rates), "the trial with a learning rate of 1e-7 was replaced"
        steps = [result["num_env_steps_sampled_lifetime"] for result in results]
        assert steps[0] == steps[1] >= 160


def test_evaluation_in_workers_plays_all_policies(ray_session: None) -> None:
    trainer = trainer_of(
        "sync_samples",
        evaluation_interval=1,
        evaluation_num_workers=1,
        evaluation_duration=2,
        min_time_s_per_iteration=0.5,
    )
    until_s = time.monotonic() + 100.0
    mean = math.nan
    while math.isnan(mean) and time.monotonic() < until_s:  # the worker may start slowly
        mean = trainer.train()["evaluation"]["env_runners"]["episode_return_mean"]
    trainer.stop()
    assert 7 * 2 <= mean <= 7 * 6
