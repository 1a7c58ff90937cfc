"""Environments with several agents that each run in their own process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix, Race
from faulty_envs import num_faults
from gymnasium import spaces

import polopt
from polopt.rollouts.envs.agent_processes import AgentProcesses
from polopt.rollouts.envs.env_errors import EnvironmentAPIError

PPO = {
    "num_workers": 0,
    "num_envs_per_worker": 3,
    "rollout_fragment_length": 16,
    "min_time_s_per_iteration": 0,
    "min_sample_timesteps_per_iteration": 100,
    "model": {"fcnet_hiddens": [8]},
    "seed": 4,
}
DQN = {**PPO, "n_step": 3, "learning_starts": 20, "buffer_size": 3000, "train_batch_size": 16}


def by_chance(agent_id: str, rng: np.random.Generator) -> str:
    return ("even", "odd")[rng.integers(2)]


TWO = {"policies": ["even", "odd"], "policy_mapping_fn": by_chance}


class Crowd:
    """An environment in the form of RLlib's `MultiAgentEnv`. Its seed decides who acts, leaves and
    comes back. A step can raise, and the process of the second copy can die once."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None
    possible_agents = ("a", "b", "c")

    def __init__(self, config: Any) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_spaces = dict.fromkeys(self.possible_agents, box)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self.faults, self.total = config.get("faults", 0.0), 0
        self.dies = Path(config["dies"]) if config.vector_index == 1 and "dies" in config else None
        self.rng = np.random.default_rng(0)

    def get_agent_ids(self) -> set[str]:
        return set(self.possible_agents)

    def _observed(self) -> dict[str, Any]:
        count = int(self.rng.integers(1, len(self.there) + 1))
        chosen = sorted(self.rng.permutation(sorted(self.there))[:count].tolist())
        return {one: self.rng.normal(size=2).astype(np.float32) for one in chosen}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.there, self.steps = set(self.possible_agents), 0
        return self._observed(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        if self.rng.random() < self.faults:
            raise RuntimeError("a random fault")
        self.total += 1
        if self.total == 20 and self.dies is not None and not self.dies.exists():
            self.dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        rewards = {one: float(action) - 1.0 for one, action in actions.items()}
        gone = {one for one in sorted(self.there) if self.rng.random() < 0.1}
        if self.there > gone:
            self.there -= gone
        else:
            gone = set()
        ended = dict.fromkeys(sorted(gone), True)
        over = self.steps == 12
        return self._observed(), rewards, {**ended, "__all__": over}, {"__all__": False}, {}


def run(preset: str, mode: str, iterations: int = 2, **options: Any) -> tuple[Any, dict[str, Any]]:
    trainer = getattr(polopt, preset)(
        {**(DQN if preset == "DQN" else PPO), "vectorization_mode": mode, **options}
    )
    try:
        for _ in range(iterations):
            result = trainer.train()
        assert isinstance(vector_of(trainer), AgentProcesses) == (mode == "async")
        return trainer.get_policy().get_weights(), result
    finally:
        trainer.stop()


def vector_of(trainer: Any) -> Any:
    return trainer.workers.local.sampler.env.vector


def crowd(context: Any) -> Crowd:
    return Crowd(context)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("SyncPPO", {"env": Matrix}),
        ("SyncPPO", {"env": Race, **TWO}),
        ("SyncPPO", {"env": crowd, "env_config": {"faults": 0.02}}),
        ("DQN", {"env": crowd, "env_config": {"faults": 0.02}, **TWO}),
    ],
)
def test_processes_give_the_same_weights_bit_for_bit(preset: str, options: Any) -> None:
    here, expected = run(preset, "sync", **options)
    weights, result = run(preset, "async", **options)
    np.testing.assert_array_equal(weights.flat, here.flat)
    assert weights.version == here.version > 0
    for key in ("num_env_steps_sampled_lifetime", "num_agent_steps_sampled_lifetime"):
        assert result[key] == expected[key]
    for key in ("agent_episode_returns_mean", "module_episode_returns_mean"):
        assert result["env_runners"][key] == expected["env_runners"][key]
    faults = [one["fault_tolerance"]["num_env_faults"] for one in (result, expected)]
    assert faults[0] == faults[1]
    assert (faults[0] > 0) == ("env_config" in options)


@pytest.mark.parametrize("options", [{}, TWO])
def test_death_of_a_process_costs_one_step(options: Any, tmp_path: Path) -> None:
    config = {"dies": str(tmp_path / "died")}
    trainer = polopt.SyncPPO(
        {**PPO, "env": crowd, "env_config": config, "vectorization_mode": "async", **options}
    )
    try:
        sampler, before = trainer.workers.local.sampler, vector_of(trainer)
        batches = [sampler.sample() for _ in range(3)]
        assert [batch.env_steps for batch in batches] == [48, 45, 48]
        assert [num_faults(batch.faults, "raised") for batch in batches] == [0, 1, 0]
        assert vector_of(trainer) is not before
        assert not any(process.is_alive() for process in before.processes.processes)
        result = trainer.train()
        assert result["num_env_steps_sampled_lifetime"] > 0
        assert result["fault_tolerance"]["num_env_faults"] == 0
    finally:
        trainer.stop()


class Unfair(Matrix):
    """Gives a reward to nobody in its third step."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        if self.round == 3:
            rewards["nobody"] = 1.0
        return observations, rewards, *others


def test_broken_rule_in_a_process_is_one_error() -> None:
    with pytest.raises(EnvironmentAPIError, match=r"nobody.*is not one of the possible agents"):
        run("SyncPPO", "async", 1, env=Unfair)


class Meets(Matrix):
    """Each step waits until the other copy is in the same step, too."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.folder, self.index, self.count = Path(context["folder"]), context.vector_index, 0

    def step(self, actions: Any) -> Any:
        self.count += 1
        (self.folder / f"{self.count}-{self.index}").touch()
        other = self.folder / f"{self.count}-{1 - self.index}"
        deadline = time.monotonic() + 60
        while not other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other copy did not step at the same time")
            time.sleep(0.001)
        return super().step(actions)


def meets(context: Any) -> Meets:
    return Meets(context)


def test_slow_steps_overlap(tmp_path: Path) -> None:
    options = {"env": meets, "env_config": {"folder": str(tmp_path)}, "num_envs_per_worker": 2}
    _, result = run("SyncPPO", "async", 1, **options)
    assert result["fault_tolerance"]["num_env_faults"] == 0
    assert result["num_env_steps_sampled_lifetime"] >= 100


class Listens(polopt.Callbacks):
    """Collects the infos of ended episodes."""

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> dict[str, float]:
        return {"fine": float(episode.info["a"]["fine"]), "has_lock": float("lock" in episode.info)}


class Tells(Matrix):
    """The infos have a value that cannot be sent to another process."""

    def step(self, actions: Any) -> Any:
        *results, _ = super().step(actions)
        infos = {"a": {"fine": 3.0}, "lock": (one for one in "a generator")}
        return (*results, infos)


def test_callbacks_get_the_infos_that_can_be_sent() -> None:
    _, result = run("SyncPPO", "async", 1, env=Tells, callbacks=Listens)
    found = result["env_runners"]["custom_metrics"]
    assert (found["fine_mean"], found["has_lock_max"]) == (3.0, 0.0)
