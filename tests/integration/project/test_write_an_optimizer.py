"""The strategies of docs/write-an-optimizer.md run as printed, in worker processes, with all faults
at once."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from counting_env import CountingDrift, Totals, counted_by, made_in
from fakes import pid_of
from plugin_page import PLUGINS, code_blocks, plugin

import polopt

ROWS = 10  # rows of a fragment of 5 steps of 2 environments
ROUNDS = 2
SLOW, KILLED = 2, 1


def make(name: str, transport: str, folder: Path) -> polopt.PolicyOptimizerTrainer:
    plugin(name)
    return polopt.PolicyOptimizerTrainer(
        {
            "env": CountingDrift,
            "env_config": {
                "folder": str(folder),
                "raise_every": 50,
                "nan_at": 33,
                "slow": SLOW,
            },
            "optimizer": name,
            "local_rounds": ROUNDS,
            "transport": transport,
            "num_workers": 3,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 5,
            "num_cpus_per_worker": 0.1,
            "min_sample_timesteps_per_iteration": 400,
            "seed": 1,
        }
    )


def train_and_drain(trainer: polopt.PolicyOptimizerTrainer, iterations: int) -> dict[str, Any]:
    for _ in range(iterations):
        result: dict[str, Any] = trainer.train()
    trainer.optimizer.drain()
    return result


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *zip(PLUGINS, ("socket", "ray"), strict=True),
        *(
            pytest.param(name, transport, marks=pytest.mark.slow)
            for name, transport in zip(PLUGINS, ("ray", "socket"), strict=True)
        ),
    ],
)
def test_every_fault_at_once_is_counted(
    name: str, transport: str, ray_session: None, tmp_path: Path
) -> None:
    folder = tmp_path / "counts"
    folder.mkdir()
    trainer = make(name, transport, folder)
    optimizer: Any = trainer.optimizer
    try:
        before = trainer.get_policy().get_weights().flat

        # The faults are exceptions, NaN rewards, and a slow worker.
        result = train_and_drain(trainer, 3)
        until_s = time.monotonic() + 60.0
        while made_in(folder).nans < 3 and time.monotonic() < until_s:
            result = train_and_drain(trainer, 1)  # until the slow worker has also seen its fault
        made = made_in(folder)
        assert counted_by(optimizer) == made
        assert made.faults >= 3
        assert made.nans == 3
        assert result["optimizer"]["name"] == name
        assert result["optimizer"]["transport"] == transport
        assert result["optimizer"]["num_env_steps_trained"] >= 1200
        assert 0 < result["optimizer"]["num_env_steps_discarded"] <= 3 * ROWS
        assert 0 < result["fault_tolerance"]["num_env_faults"] <= made.faults
        rates = {w["index"]: w for w in result["optimizer"]["workers"]["per_worker"]}
        assert all(w["env_steps_per_s"] > 0.0 and w["idle_share"] < 1.0 for w in rates.values())
        if name == "elastic_averaging":  # no worker waits for the slow worker
            assert rates[SLOW]["env_steps_per_s"] < 0.8 * rates[KILLED]["env_steps_per_s"]
        assert (trainer.get_policy().get_weights().flat != before).any()

        # Save and restore.
        checkpoint = trainer.save(str(tmp_path / "checkpoint"))
        saved = counted_by(optimizer)._replace(steps=optimizer.metrics.num_env_steps_sampled)
        train_and_drain(trainer, 1)
        trainer.restore(checkpoint)
        assert optimizer.metrics.num_env_steps_sampled == saved.steps
        counted, made = counted_by(optimizer), made_in(folder)
        train_and_drain(trainer, 2)
        assert counted_by(optimizer).since(counted) == made_in(folder).since(made)

        # A worker dies.
        counted, made = counted_by(optimizer), made_in(folder)
        os.kill(pid_of(optimizer.workers.remote[KILLED - 1]), signal.SIGKILL)
        until_s = time.monotonic() + 120.0
        while not optimizer.workers.faults.num_restarts or not all(
            worker.up for worker in optimizer.workers.remote
        ):
            trainer.train()
            assert time.monotonic() < until_s
        result = train_and_drain(trainer, 2)
        counted, made = counted_by(optimizer).since(counted), made_in(folder).since(made)
        lost = Totals(*(m - c for c, m in zip(counted, made, strict=True)))
        assert min(lost) >= 0, "nothing is counted twice"
        # A call samples `ROUNDS` fragments, and one more for each that it discards.
        assert lost.steps + lost.faults <= (ROUNDS + lost.nans) * ROWS
        assert result["fault_tolerance"]["num_worker_deaths"] == 1
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
        assert result["fault_tolerance"]["num_worker_exceptions"] == 0
    finally:
        trainer.stop()


@pytest.mark.parametrize("transport", [pytest.param("ray", marks=pytest.mark.slow), "socket"])
def test_killed_shard_is_replaced(transport: str, ray_session: None) -> None:
    plugin("fragment_replay")
    trainer = polopt.PolicyOptimizerTrainer(
        {
            "env": "CartPole-v1",
            "optimizer": "fragment_replay",
            "policy": "impala",
            "transport": transport,
            "num_workers": 2,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 5,
            "num_cpus_per_worker": 0.1,
            "min_sample_timesteps_per_iteration": 100,
            "seed": 1,
        }
    )
    shards: Any = trainer.optimizer.shards
    try:
        result = trainer.train()
        assert result["optimizer"]["num_updates"] >= 5
        killed = shards.remote[0]
        os.kill(pid_of(killed), signal.SIGKILL)
        until_s = time.monotonic() + 60.0
        while not shards.faults.num_restarts or not all(shard.up for shard in shards.remote):
            result = trainer.train()
            assert time.monotonic() < until_s
        assert (shards.faults.num_restarts, shards.faults.counts["death"]) == (1, 1)
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 0
        assert result["optimizer"]["policy_lag"]["max"] > 0
        assert result["optimizer"]["transport"] == transport
    finally:
        trainer.stop()
    assert not shards.remote


def test_other_blocks_of_the_page_run(ray_session: None) -> None:
    names: dict[str, Any] = {"__name__": "blocks_of_the_page", **vars(plugin("local_sgd"))}
    others = [block for block in code_blocks() if "polopt.register_optimizer(" not in block]
    assert len(others) == 2
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in others:
            exec(compile(block, "write-an-optimizer.md", "exec"), names)
    names["trainer"].stop()
    assert printed.getvalue().count("StepResult(") == 10
