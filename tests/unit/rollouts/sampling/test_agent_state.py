"""The state of environments with several agents is saved and restored: a restored worker samples
the same fragments as one that went on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_envs import Race
from gymnasium import spaces
from sampling_helpers import assert_same

import polopt
from polopt.common.plain_data import decode, encode
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import make_worker_config


class Crowd:
    """Agents join, end and come back at random. The last observation of an agent that is truncated
    may be missing, as in RLlib's environments, so it is the one before."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None
    possible_agents = (0, "one", (2, 2))
    kind = "box"

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.agents: list[Any] = []

    def observation_space(self, agent: Any) -> Any:
        box = spaces.Box(-9.0, 9.0, (2,), np.float32)
        return box if self.kind == "box" else spaces.Dict({"x": box, "n": spaces.Discrete(5)})

    def action_space(self, agent: Any) -> Any:
        return spaces.Discrete(3)

    def observe(self) -> Any:
        x = self.rng.normal(size=2).astype(np.float32)
        return x if self.kind == "box" else {"x": x, "n": int(self.rng.integers(5))}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents[:2]), 0
        return {agent: self.observe() for agent in self.agents}, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.steps += 1
        rewards = {agent: float(action) for agent, action in actions.items()}
        draws = dict(zip(self.agents, self.rng.random(len(self.agents)), strict=True))
        last = self.steps == 9
        terminated = {agent: bool(draw < 0.15) for agent, draw in draws.items()}
        truncated = {agent: bool(draw > 0.85) or last for agent, draw in draws.items()}
        observations = {agent: self.observe() for agent in self.agents}
        self.agents = [one for one in self.agents if not (terminated[one] or truncated[one])]
        for agent in self.possible_agents:
            if self.agents and agent not in observations and self.rng.random() < 0.4:
                self.agents.append(agent)
                observations[agent] = self.observe()
        return observations, rewards, terminated, truncated, {}

    def get_checkpoint_state(self) -> dict[str, Any]:
        return {
            "rng": self.rng.bit_generator.state,
            "agents": list(self.agents),
            "steps": self.steps,
        }

    def set_checkpoint_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.agents, self.steps = list(state["agents"]), state["steps"]


class DictCrowd(Crowd):
    kind = "dict"


class SavedRace(Race):
    """A race whose state can be saved."""

    _names = ("agents", "left", "agent_selection", "rewards", "terminations", "truncations")

    def get_checkpoint_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def set_checkpoint_state(self, state: dict[str, Any]) -> None:
        for name in self._names:
            setattr(self, name, state[name])


def either(agent_id: Any, rng: np.random.Generator, episode: Any) -> str:
    return "b" if rng.random() < 0.4 + 0.01 * (episode.number % 7) else "a"


SEVERAL = {"policies": {"a": {}, "b": {}}, "policy_mapping_fn": either}


def worker_of(env: Any, seed: int, **options: Any) -> RolloutWorker:
    rollout = {"env": env, "num_envs_per_worker": 2, "num_workers": 0, **options}
    rollout |= {"rollout_fragment_length": 5}
    model = {"fcnet_hiddens": (4,), "use_lstm": True, "lstm_cell_size": 3}
    policy = A2CPolicy.config_class.parse({"model": model, "normalize_rewards": True})
    config = make_worker_config(RolloutConfig.parse({**rollout, "seed": seed}), A2CPolicy, policy)
    return RolloutWorker(config, 0)


def parts_of(batch: Any) -> dict[str, Any]:
    return dict(getattr(batch, "parts", {"one": batch}))


@pytest.mark.parametrize("options", [{}, SEVERAL], ids=["shared", "several"])
@pytest.mark.parametrize("env", [Crowd, DictCrowd, SavedRace])
def test_restored_worker_goes_on_bit_for_bit(env: Any, options: Any) -> None:
    options = {**options, "max_frames_per_traj": 7}
    for rounds in (1, 2):
        worker, other = worker_of(env, 1, **options), worker_of(env, 2, **options)
        other.policy.set_weights(worker.policy.get_weights())
        for _ in range(rounds):
            worker.next_batch()
        state: Any = decode(*encode(worker.get_state(with_policy=False)))
        other.next_batch()
        other.set_state(state)
        for _ in range(4):
            one, two = worker.next_batch(), other.next_batch()
            assert one.episodes == two.episodes
            assert one.env_steps == two.env_steps
            assert parts_of(one).keys() == parts_of(two).keys()
            for name, part in parts_of(one).items():
                assert_same(part, parts_of(two)[name])


@pytest.mark.parametrize(
    "changed", [{"num_envs_per_worker": 3}, {"policies": {"a": {}, "c": {}}}, {}], ids=str
)
def test_state_that_does_not_fit_begins_new_episodes(changed: dict[str, Any]) -> None:
    worker = worker_of(Crowd, 1, **SEVERAL)
    worker.next_batch()
    state = worker.get_state(with_policy=False)
    names = {"policy_mapping_fn": lambda agent_id: "ac"[agent_id == 0]}
    other = worker_of(
        Crowd, 2, **{**SEVERAL, **changed, **(names if "policies" in changed else {})}
    )
    other.next_batch()
    other.set_state(state)
    sampler: Any = other.sampler
    steps = [env.env._elapsed for env in sampler.vector.envs]
    assert (steps == [0] * len(steps)) == bool(changed)
    other.next_batch()


def test_environment_without_the_methods_has_no_state() -> None:
    for options in ({}, {"policies": {"a": {}}}):
        assert worker_of(Race, 1, **options).get_state()["sampler"] is None


def test_restored_run_equals_one_that_was_not_interrupted(tmp_path: Any) -> None:
    """Also with the rows of the replay buffers of several policies."""
    config = {
        **SEVERAL,
        "env": Crowd,
        "num_workers": 0,
        "num_envs_per_worker": 2,
        "learning_starts": 20,
        "buffer_size": 400,
        "n_step": 3,
        "save_replay_buffer": True,
        "min_sample_timesteps_per_iteration": 60,
        "min_time_s_per_iteration": 0,
        "model": {"fcnet_hiddens": [4]},
        "seed": 3,
    }
    whole, again = polopt.DQN(config), polopt.DQN({**config, "seed": 4})
    whole.train()
    whole.save(str(tmp_path))
    again.restore(str(tmp_path))
    before = whole.get_policy().get_weights().flat
    for trainer in (whole, again):
        for _ in range(2):
            trainer.train()
    weights = whole.get_policy().get_weights().flat
    np.testing.assert_array_equal(again.get_policy().get_weights().flat, weights)
    assert not np.array_equal(weights, before)
    whole.stop()
    again.stop()
