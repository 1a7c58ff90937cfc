"""A NaN in the last observation of a terminated episode costs nothing, and a NaN of one environment
costs only the rows of this environment."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from fakes import worker_config
from faulty_envs import num_faults
from gymnasium import spaces

from polopt.common.faults import non_finite_values
from polopt.common.sample_batch import SampleBatch
from polopt.policies.policy_registry import POLICIES
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.rollouts.workers.rollout_worker import RolloutWorker

MODES = ["same_step", "next_step", "disabled"]
every_mode = pytest.mark.parametrize("mode", MODES)


class Crash(gymnasium.Env[Any, Any]):
    """Each episode has three steps, and then its last observation is not finite. Observation t is
    `(t, index)`. The option `ends` says how episodes end, and `bad_env` which environment returns
    such observations."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    made = 0

    def __init__(self, ends: str = "terminated", bad_env: int | None = None, at: int = 3) -> None:
        self.index, Crash.made = Crash.made, Crash.made + 1
        self.ends, self.bad_env, self.at, self.t = ends, bad_env, at, 0

    def reset(self, **options: Any) -> Any:
        self.t = 0
        return np.float32([0, self.index]), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t == 3
        is_bad = self.t == self.at and (self.bad_env is None or self.bad_env == self.index)
        obs = np.float32([math.nan if is_bad else self.t, self.index])
        ends = over and self.ends
        return obs, float(self.t), ends == "terminated", ends == "truncated", {}


def worker_of(mode: str, policy: str = "a2c", options: Any = None, **env: Any) -> RolloutWorker:
    Crash.made = 0
    rollout = {
        "autoreset_mode": mode,
        "env_config": env,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 12,
        "num_workers": 0,
    }
    cls = POLICIES.get(policy)
    config = worker_config(cls, lambda config: Crash(**config), rollout=rollout, **(options or {}))
    Crash.made = 0
    return RolloutWorker(config, 0)


def finite(batch: SampleBatch) -> bool:
    columns = [batch.all_obs, batch.successor_obs, *batch.columns.values()]
    return all(bool(np.isfinite(column).all()) for column in columns if column.dtype.kind == "f")


@every_mode
def test_last_observation_of_a_terminated_episode_may_be_nan(mode: str) -> None:
    worker = worker_of(mode)
    batches = [worker.next_batch() for _ in range(3)]
    assert worker.record.faults == {}
    assert worker.record.env_steps_discarded == 0
    for batch in batches:
        assert finite(batch)
        ends = batch["terminated"] & batch["valid"]
        assert ends.any()
        # Nothing follows, so the value target is the reward itself.
        np.testing.assert_allclose(batch["value_targets"][ends], batch["rewards"][ends], rtol=1e-5)
        assert set(batch["rewards"][ends]) == {3.0}
    returns = np.concatenate([batch.episodes.returns for batch in batches])
    assert len(returns) >= 12
    assert set(returns) == {6.0}


@every_mode
def test_replay_keeps_the_rows_of_crashes(mode: str) -> None:
    worker = worker_of(mode, "dqn")
    buffer = ReplayBuffer(200, gamma=0.9, n_step=2)
    for _ in range(4):
        buffer.add(worker.next_batch())
    rows = buffer.sample(64)
    crashed = rows.discounts == 0.0
    assert crashed.any()
    assert np.isfinite(rows.next_obs).all()
    assert set(np.round(rows.rewards[crashed], 4)) == {np.float32(3.0), np.float32(4.7)}


@every_mode
def test_last_observation_of_a_truncated_episode_is_checked(mode: str) -> None:
    """The value of this observation is part of the return."""
    worker = worker_of(mode, ends="truncated", bad_env=1)
    batch = worker.next_batch()
    assert num_faults(worker.record.faults, "non_finite", "bad_rows") == 1
    assert "observation of environment 1 is nan" in non_finite_values(worker.record.faults)
    assert finite(batch)
    assert not batch["valid"][:, 1].any()


@every_mode
@pytest.mark.parametrize("policy", ["a2c", "ppo"])
def test_nan_of_one_environment_costs_the_rows_of_this_environment(mode: str, policy: str) -> None:
    worker = worker_of(mode, policy, {"normalize_observations": True}, bad_env=1, at=2)
    healthy = worker_of(mode, policy, {"normalize_observations": True})
    for _ in range(3):
        batch, expected = worker.next_batch(), healthy.next_batch()
        assert finite(batch)
        assert not batch["valid"][:, 1].any()
        for name in ("rewards", "terminated", "valid", "actions", "advantages"):
            if name not in ("actions", "advantages"):
                np.testing.assert_array_equal(batch[name][:, 0], expected[name][:, 0])
        assert set(batch.episodes.returns) == {6.0}
        assert batch.env_steps == int(np.count_nonzero(expected["valid"][:, 0]))
    record = worker.record
    assert num_faults(record.faults, "non_finite", "bad_rows") == 3
    assert record.env_steps + record.env_steps_discarded == healthy.record.env_steps
    assert record.moments is not None
    assert record.moments.rows == record.env_steps
    assert np.isfinite(record.moments.mean).all()


def test_other_environments_continue_without_a_gap() -> None:
    worker = worker_of("same_step", "dqn", bad_env=1, at=2)
    buffer = ReplayBuffer(400, gamma=0.9, n_step=5)
    for _ in range(6):
        buffer.add(worker.next_batch())
    assert buffer.stats()["num_gaps"] == 0
