"""`AsyncReplay` with processes: killed samplers and shards, data that pass through the driver, and
the ratio between learning and sampling."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import make_optimizer, pid_of, worker_config
from source_tree import ROOT
from toy_envs import Drift

import polopt
from polopt.optimizers.async_replay import AsyncReplay
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.workers.worker_set import WorkerSet

BATCH = 16
OPTIONS: dict[str, Any] = {
    "num_replay_shards": 2,
    "num_cpus_per_replay_shard": 0.1,
    "buffer_size": 20_000,
    "learning_starts": 200,
    "train_batch_size": BATCH,
    "training_intensity": 1.0,
    "prioritized_replay": True,
}


def test_code_of_the_replay_page_runs(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "replay.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": "code_of_replay"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


class Paced(Drift):
    """A `Drift` whose steps take two milliseconds."""

    def step(self, action: int) -> Any:
        time.sleep(0.002)
        return super().step(action)


class Wide(Drift):
    """A `Drift` with observations of 16 kB."""

    observation_space = Drift.observation_space.__class__(-np.inf, np.inf, (4000,), np.float32)

    def reset(self, **options: Any) -> Any:
        return self._wide(super().reset(**options)[0]), {}

    def step(self, action: int) -> Any:
        obs, *rest = super().step(action)
        return (self._wide(obs), *rest)

    def _wide(self, obs: np.ndarray) -> np.ndarray:
        return np.resize(obs, 4000).astype(np.float32)


def make(transport: str, env: Any = Paced, rollout: Any = None, **options: Any) -> Any:
    given = {
        "num_workers": 3,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 20,
        "num_cpus_per_worker": 0.1,
        "transport": transport,
        "max_consecutive_failures": 1000,
        **(rollout or {}),
    }
    config = worker_config(DQNPolicy, env, rollout=given, n_step=3)
    return make_optimizer(AsyncReplay, WorkerSet(config), **{**OPTIONS, **options})


@pytest.fixture(params=[pytest.param("ray", marks=pytest.mark.slow), "auto"])
def optimizer(ray_session: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make(request.param)
    try:
        yield made
    finally:
        made.stop()
        made.workers.stop()


def check(optimizer: Any) -> None:
    """Checks that the number of trained rows is at most what `training_intensity` allows, and that
    it is smaller by at most the limiter's `error_buffer`."""
    limiter = optimizer.limiter
    credit = Fraction(limiter.intensity) * limiter.num_counted
    credit -= optimizer.metrics.num_env_steps_trained
    assert 0 <= credit <= limiter.error_buffer


def run(optimizer: Any, updates: int, limit_s: float = 120.0) -> None:
    until = optimizer.metrics.num_updates + updates
    began_s = time.monotonic()
    while optimizer.metrics.num_updates < until:
        optimizer.step()
        check(optimizer)
        assert time.monotonic() - began_s < limit_s, "too few updates within the limit"


def test_kills_of_samplers_and_shards_leave_counters_exact(optimizer: Any) -> None:
    """Kills four processes, a sampler and a shard in turn, at most one every two seconds."""
    run(optimizer, 50)
    rng, killed = random.Random(0), Counter[str]()
    dead: set[int] = set()
    sampled = optimizer.metrics.num_env_steps_sampled
    updates = optimizer.metrics.num_updates
    next_s = time.monotonic() + 1.0
    while sum(killed.values()) < 4:
        before = optimizer.metrics.counts()
        result = optimizer.step()
        assert optimizer.metrics.counts_since(before) == result
        sampled += result.env_steps_sampled
        updates += result.updates
        check(optimizer)
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + 2.0
        kind = "shard" if killed["sampler"] > killed["shard"] else "sampler"
        group = optimizer.workers if kind == "sampler" else optimizer.shards
        pids = {pid_of(handle) for handle in group.remote if handle.up} - dead
        if pids:
            dead.add(pid := rng.choice(sorted(pids)))
            os.kill(pid, signal.SIGKILL)
            killed[kind] += 1
    after = optimizer.metrics.num_updates
    assert (optimizer.metrics.num_env_steps_sampled, after) == (sampled, updates)
    run(optimizer, 50)
    until_s = time.monotonic() + 60.0
    while optimizer.workers.faults.num_restarts < killed["sampler"] or (
        optimizer.shards.faults.num_restarts < killed["shard"]
    ):
        optimizer.step()
        assert time.monotonic() < until_s
    stats = optimizer.stats()
    assert optimizer.workers.faults.num_restarts == killed["sampler"] > 1
    assert stats["num_replay_shard_restarts"] == stats["num_replay_shard_deaths"]
    assert stats["num_replay_shard_deaths"] == killed["shard"] > 1
    assert stats["num_rows_lost"] > 0
    run(optimizer, 200)


def test_driver_moves_only_the_batches_that_it_learns_from(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments of 640 kB go from samplers to shards without passing through the driver. Batches of
    512 kB stay in their shard until the driver fetches them."""
    fetched: list[Any] = []
    optimizer = make("auto", Wide, {"num_workers": 2}, learning_starts=80)
    get = optimizer.workers.transport.get

    def noted_get(value: Any) -> Any:
        fetched.append(get(value))
        return fetched[-1]

    try:
        run(optimizer, 5)
        # The driver asked for the first batches by value, because it did not know their size.
        while any(
            call.tag.kind == "batch" and not call.by_reference
            for call in [*optimizer.calls.pending_work(), *optimizer.calls.kept]
        ):
            run(optimizer, 1)
        monkeypatch.setattr(optimizer.workers.transport, "get", noted_get)
        before, updates = optimizer.metrics.num_bytes_received, optimizer.metrics.num_updates
        run(optimizer, 20)
        monkeypatch.undo()
        learned = optimizer.metrics.num_updates - updates
        received = optimizer.metrics.num_bytes_received - before
    finally:
        optimizer.stop()
        optimizer.workers.stop()
    # A row has two observations of 4000 float32 numbers, and 44 bytes of other columns.
    batch_bytes = BATCH * (2 * 4 * 4000 + 44)
    assert received == learned * batch_bytes
    sizes = [sum(a.nbytes for a in b.rows) for b in fetched if hasattr(b, "rows")]
    assert len(sizes) == learned
    assert not [one for one in fetched if hasattr(one, "batch")], "a fragment came to the driver"
    assert optimizer.num_bytes_by_reference > 20 * 16_000


def test_state_is_restored_without_a_burst(optimizer: Any) -> None:
    run(optimizer, 30)
    state = optimizer.get_state()
    run(optimizer, 20)
    optimizer.set_state(state)
    assert optimizer.shards.num_rows("default_policy") == 0
    sampled, updates = optimizer.metrics.num_env_steps_sampled, optimizer.metrics.num_updates
    run(optimizer, 30)
    learned = BATCH * (optimizer.metrics.num_updates - updates)
    rows = optimizer.metrics.num_env_steps_sampled - sampled
    # The buffer is empty after a restore, so learning waits for `learning_starts` = 200 new rows.
    assert learned <= rows - 200 + optimizer.limiter.error_buffer
    optimizer.limiter.inserted(100)
    del state["limiter"]  # as in the state of an optimizer without replay
    optimizer.set_state(state)
    assert optimizer.limiter.credit == 0
    assert not optimizer.limiter.can_learn(1)


@pytest.mark.slow
def test_discrete_sac_learns_from_shards(ray_session: None) -> None:
    trainer = polopt.PolicyOptimizerTrainer(
        {**OPTIONS, "env": "CartPole-v1", "policy": "sac", "optimizer": "async_replay"},
        num_workers=2,
        random_timesteps=100,
        min_sample_timesteps_per_iteration=300,
    )
    try:
        for _ in range(100):
            result = trainer.train()
            if result["num_env_steps_trained_lifetime"]:
                break
        assert result["learners"]["default_policy"]["alpha_value"] > 0.0
    finally:
        trainer.stop()
