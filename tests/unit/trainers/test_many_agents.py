"""Runs with several agents: one agent equals a single-agent run bit for bit, several policies equal
single policies, and games with known values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import ray
import torch
from agent_envs import Matrix, OneAgent, Race
from gymnasium import spaces

import polopt
from polopt.common.config import ConfigError
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.env_errors import EnvironmentAPIError

SMALL = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "vectorization_mode": "sync",
    "seed": 5,
    "model": {"fcnet_hiddens": [16]},
}
SHORT: dict[str, dict[str, Any]] = {
    "A2C": {"rollout_fragment_length": 10},
    "SyncPPO": {"rollout_fragment_length": 32, "num_sgd_iter": 2, "sgd_minibatch_size": 16},
    "PQN": {"rollout_fragment_length": 16, "num_sgd_iter": 2, "sgd_minibatch_size": 16},
    "DQN": {"learning_starts": 50, "buffer_size": 1000, "n_step": 3},
}
FAST = {"min_sample_timesteps_per_iteration": 200, "min_time_s_per_iteration": 0}


def trained(preset: str, iterations: int = 2, **options: Any) -> Any:
    trainer = getattr(polopt, preset)({**SMALL, **FAST, **SHORT[preset], **options})
    results = [trainer.train() for _ in range(iterations)]
    weights = trainer.get_policy().get_weights()
    trainer.stop()
    return weights, results[-1]


@pytest.mark.parametrize("preset", SHORT)
@pytest.mark.parametrize("named", [False, True])
def test_one_agent_equals_a_single_agent_run(preset: str, named: bool) -> None:
    options: dict[str, Any] = {}
    if preset in ("A2C", "SyncPPO"):
        options = {"normalize_observations": True}
    expected, single = trained(preset, env="CartPole-v1", **options)
    if named:
        options["policies"] = {"carts": {}}
    weights, result = trained(preset, env=OneAgent, **options)
    np.testing.assert_array_equal(weights.flat, expected.flat)
    assert weights.version == expected.version
    for key in ("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"):
        assert result[key] == single[key]
    assert result["num_agent_steps_sampled_lifetime"] == single["num_env_steps_sampled_lifetime"]
    assert result["episode_return_mean"] == single["episode_return_mean"]
    assert set(result["learners"]) == {"carts" if named else "default_policy", "__all_modules__"}


def test_one_agent_with_memory_equals_a_single_agent_run() -> None:
    model = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8]}
    expected, _ = trained("SyncPPO", env="CartPole-v1", model=model)
    weights, _ = trained("SyncPPO", env=OneAgent, model=model)
    np.testing.assert_array_equal(weights.flat, expected.flat)


def group_of(trainer: Any) -> PolicyGroup:
    policy = trainer.get_policy()
    assert isinstance(policy, PolicyGroup)
    return policy


def state_of(policy: Any) -> dict[str, Any]:
    """The weights and the state of the torch optimizer."""
    state = policy.get_state()
    return {
        key: value
        for key, value in state.items()
        if key in ("params", "adam", "version", "targets")
    }


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


TWO = {"policies": ["rows", "columns"], "policy_mapping_fn": {"row": "rows", "*": "columns"}}


@pytest.mark.parametrize("preset", SHORT)
def test_policy_that_does_not_learn_does_not_move(preset: str) -> None:
    options = {**SMALL, **FAST, **SHORT[preset], **TWO, "policies_to_train": ["rows"]}
    trainer = getattr(polopt, preset)({**options, "env": Matrix})
    policies = group_of(trainer).policies
    before = {name: state_of(one) for name, one in policies.items()}
    result = trainer.train()
    assert result["optimizer"]["num_updates"] == policies["rows"].version > 0
    assert equal(before["columns"], state_of(policies["columns"]))
    assert not equal(before["rows"], state_of(policies["rows"]))
    assert set(result["learners"]) == {"rows", "__all_modules__"}
    trainer.stop()


@pytest.mark.parametrize("preset", SHORT)
def test_policy_without_rows_does_not_move(preset: str) -> None:
    options = {**SMALL, **FAST, **SHORT[preset], **TWO, "env_config": {"absent": "column"}}
    trainer = getattr(polopt, preset)({**options, "env": lambda config: Matrix(**config)})
    policies = group_of(trainer).policies
    before = state_of(policies["columns"])
    result = trainer.train()
    assert policies["rows"].version > 0
    assert equal(before, state_of(policies["columns"]))
    assert result["env_runners"]["agent_episode_returns_mean"].keys() == {"row"}
    steps = result["num_env_steps_sampled_lifetime"]
    assert result["num_agent_steps_sampled_lifetime"] == steps
    trainer.stop()


def test_options_of_a_policy_are_its_own() -> None:
    policies = {"rows": {"lr": 3e-3, "model": {"fcnet_hiddens": [4]}}, "columns": {}}
    trainer = polopt.A2C({**SMALL, **FAST, **TWO, "env": Matrix, "lr": 1e-3, "policies": policies})
    result = trainer.train()
    rates = {
        name: one["default_optimizer_learning_rate"]
        for name, one in result["learners"].items()
        if name in policies
    }
    assert rates == pytest.approx({"rows": 3e-3, "columns": 1e-3})
    sizes = {name: len(one.flat.params) for name, one in group_of(trainer).policies.items()}
    assert sizes["rows"] < sizes["columns"]
    trainer.stop()


def test_prisoners_learn_to_defect() -> None:
    """To defect is better whatever the other player does, so both end there, and each gets 1."""
    options = {**SMALL, **FAST, **SHORT["A2C"], **TWO, "env": Matrix, "lr": 1e-2, "gamma": 0.0}
    trainer = polopt.A2C({**options, "entropy_coeff": 0.0})
    for _ in range(15):
        trainer.train()
    policies = group_of(trainer).policies
    for one in policies.values():
        params = one.action_params(np.zeros((1, 1), np.float32))[0]
        assert params[1] - params[0] > 2.0
    trainer.stop()


def test_turn_based_values_are_those_of_the_game() -> None:
    """In a race over 4 fields, whoever is to move with 1 or 2 fields left wins, and with 3 left
    loses against the best play. So the first player wins from 4: it moves 1."""
    options = {**SMALL, **FAST, **SHORT["DQN"], "env": Race, "lr": 3e-3, "gamma": 1.0, "n_step": 1}
    options |= {"target_network_update_freq": 50, "train_batch_size": 32, "buffer_size": 500}
    # Almost no exploration at the end, because exploring opponents lose games that they could win.
    trainer = polopt.DQN({**options, "epsilon": [[0, 1.0], [1000, 0.02]]})
    for _ in range(12):
        trainer.train()
    values = trainer.get_policy().action_params(np.eye(5, dtype=np.float32))
    trainer.stop()
    # Rows: fields left. Columns: move 1, move 2.
    np.testing.assert_allclose(values[1], [1.0, 1.0], atol=0.2)
    np.testing.assert_allclose(values[2], [-1.0, 1.0], atol=0.2)
    np.testing.assert_allclose(values[3], [-1.0, -1.0], atol=0.3)
    np.testing.assert_allclose(values[4], [1.0, -1.0], atol=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["a", "b"]}, "'policy_mapping_fn': got None with 2 policies"),
        ({"policy_mapping_fn": {"*": "a"}}, "got a mapping without policies"),
        (
            {"policies": ["a"], "policy_mapping_fn": {"row": "a"}},
            r"no pattern fits agent 'column'",
        ),
        (
            {"policies": ["a"], "policy_mapping_fn": lambda agent_id: "b"},
            r"got 'b' for agent 'row'. Allowed: 'a'",
        ),
        (
            {"policies": ["a", "b"], "policy_mapping_fn": {"*": "a"}},
            "policy 'b' acts for no agent",
        ),
        (
            {"policies": ["a", "b"], "policy_mapping_fn": lambda agent_id, **_: "a"},
            r"policy 'b' acts for no agent.*must take the argument 'rng', 'episode' or 'worker'",
        ),
        ({"policies": ["a"], "policies_to_train": ["c"]}, "'policies_to_train'"),
        ({"policies": {"a": {"lrr": 1.0}}}, "policy 'a' in 'policies'.*'lrr'"),
        ({"policies": ["a/b"]}, "allowed: a name without '/'"),
        ({"policies": ["a"], "policy_mapping_fn": 3}, "'policy_mapping_fn': got 3"),
        ({"policies": ["a"], "policy_mapping_fn": "no.such:thing"}, "cannot be imported"),
        ({"autoreset_mode": "next_step"}, "'autoreset_mode'"),
    ],
)
def test_wrong_option_is_one_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        polopt.A2C({**SMALL, **options, "env": Matrix}).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_size": 100}, r"'buffer_size': got 100 .*2 agents. Allowed: 160 or more"),
        ({"error_buffer": 70}, r"'error_buffer': got 70; allowed: 72 or more"),
    ],
)
def test_limits_of_async_replay_count_the_rows_of_all_agents(
    options: dict[str, Any], message: str
) -> None:
    """For one agent, both numbers would be large enough. The run ends before Ray starts."""
    optimizer = {"name": "async_replay", "learning_starts": 9, "train_batch_size": 32, **options}
    optimizer["training_intensity"] = 1
    config = {**SMALL, "num_workers": 2, "rollout_fragment_length": 10, "policy": "dqn"}
    running = ray.is_initialized()  # another test of this process may have started Ray
    with pytest.raises(ConfigError, match=message):
        polopt.PolicyOptimizerTrainer({**config, "optimizer": optimizer, "env": Matrix})
    assert ray.is_initialized() == running


def test_wrong_name_in_a_later_episode_ends_the_run() -> None:
    def mapping(agent_id: str, episode: Any, rng: np.random.Generator) -> str:
        assert episode is not None
        return "a" if rng.random() < 0.9 else "c"

    config = {**SMALL, "min_sample_timesteps_per_iteration": 1000, "policies": ["a"]}
    trainer = polopt.A2C({**config, "env": Matrix, "policy_mapping_fn": mapping})
    with pytest.raises(
        EnvironmentAPIError, match=r"got 'c' for agent '(row|column)'. Allowed: 'a'"
    ):
        trainer.train()
    trainer.stop()


def test_mapping_that_draws_without_the_generator_is_explained() -> None:
    drawn = iter("aab" * 100)
    options: dict[str, Any] = {"policies": ["a", "b"], "policy_mapping_fn": lambda _: next(drawn)}
    with pytest.raises(
        (ConfigError, EnvironmentAPIError), match=r"must take the argument 'rng', 'episode'"
    ):
        polopt.A2C({**SMALL, **options, "env": Matrix}).train()


def test_episode_of_a_mapping_has_an_id() -> None:
    def sides(agent_id: str, episode: Any) -> str:
        assert episode.id_ == episode.episode_id == episode.number
        return "a" if (agent_id == "row") == (episode.id_ % 2 == 0) else "b"

    _, result = trained("A2C", env=Matrix, policies=["a", "b"], policy_mapping_fn=sides)
    assert set(result["env_runners"]["module_episode_returns_mean"]) == {"a", "b"}


def test_policies_need_several_agents() -> None:
    with pytest.raises(ConfigError, match="an environment with one agent"):
        polopt.A2C({**SMALL, "env": "CartPole-v1", "policies": ["a", "b"]}).train()


class Notes(polopt.Callbacks):
    """Notes the steps and the ends of episodes in the data of the episode."""

    def on_episode_step(self, *, episode: Any, worker: Any) -> None:
        episode.data.setdefault("returns", []).append(dict(episode.agent_returns))
        assert set(episode.info) == {"row", "column"}

    def on_episode_end(self, *, episode: Any, worker: Any) -> dict[str, float]:
        assert len(episode.data["returns"]) == episode.episode_len == 10
        assert episode.data["returns"][-1] == episode.agent_returns
        assert sum(episode.agent_returns.values()) == episode.episode_return
        return {"ends": 1.0}


@pytest.mark.parametrize("two", [False, True])
def test_callbacks_get_the_episode_of_all_agents(two: bool) -> None:
    options = {**SMALL, **FAST, **SHORT["A2C"], **(TWO if two else {}), "callbacks": Notes}
    trainer = polopt.A2C({**options, "env": Matrix})
    result = trainer.train()
    trainer.stop()
    assert result["env_runners"]["custom_metrics"]["ends_mean"] == 1.0
    assert result["env_runners"]["num_episodes"] == result["num_env_steps_sampled_lifetime"] // 10


class MaskedMatrix(Matrix):
    """A matrix game in which the observations have action masks, and only one action is allowed."""

    def observation_space(self, agent: str) -> Any:
        mask = spaces.Box(0, 1, (2,), np.int8)
        return spaces.Dict({"observation": spaces.Discrete(3, start=2), "action_mask": mask})

    def _all(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            value = {"observation": 4, "action_mask": np.array([0, 1], np.int8)}
        return super()._all(value)


def test_policy_may_have_no_agent_in_the_first_episodes() -> None:
    """Its slots also have observations, with valid masks."""
    options: dict[str, Any] = {**SMALL, **FAST, **SHORT["A2C"], "policies": ["early", "late"]}
    trainer = polopt.A2C(
        {
            **options,
            "env": MaskedMatrix,
            "policy_mapping_fn": lambda agent_id, episode: (
                "early" if episode.number < 9 else "late"
            ),
        }
    )
    result = trainer.train()
    trainer.stop()
    returns = result["env_runners"]["module_episode_returns_mean"]
    assert returns == {"early": 20.0, "late": 20.0}
    assert all(one.version > 0 for one in group_of(trainer).policies.values())


class PolicyReturns(polopt.Callbacks):
    """Sums the returns of each policy."""

    def on_episode_end(self, *, episode: Any, worker: Any) -> dict[str, float]:
        both = {episode.agent_policies[agent] for agent in episode.agent_returns}
        assert set(episode.policy_returns) == both
        return dict(episode.policy_returns)


def either(agent_id: str, rng: np.random.Generator) -> str:
    return "a" if agent_id == "row" or rng.random() < 0.5 else "b"


def test_return_of_a_policy_is_the_sum_over_its_agents() -> None:
    """In a game of 10 rounds, the row player always gets 1, and the column player always gets 3.
    Policy `a` gets 40 if it plays both, and 10 otherwise. Then `b` gets 30."""
    game = functools.partial(Matrix, payoffs=np.full((2, 2, 2), (1, 3)))
    options = {**SMALL, **FAST, **SHORT["A2C"], "policies": ["a", "b"], "callbacks": PolicyReturns}
    options |= {"policy_mapping_fn": either, "evaluation_interval": 1, "evaluation_duration": 3}
    trainer = polopt.A2C({**options, "env": lambda config: game()})
    result = trainer.train()
    agents = result["env_runners"]["agent_episode_returns_mean"]
    policies = result["env_runners"]["module_episode_returns_mean"]
    assert agents == {"row": 10.0, "column": 30.0}
    assert policies["b"] == 30.0
    # After less than 100 episodes, the window has the episodes of the callback.
    custom = result["env_runners"]["custom_metrics"]
    assert (custom["a_min"], custom["a_max"]) == (10.0, 40.0)
    assert custom["a_mean"] == policies["a"]
    evaluation = result["evaluation"]["env_runners"]
    assert evaluation["agent_episode_returns_mean"] == agents
    assert evaluation["module_episode_returns_mean"]["a"] in (10.0, 20.0, 30.0, 40.0)
    saved = trainer.save()
    again = type(trainer).from_checkpoint(
        saved, env=lambda config: game(), policy_mapping_fn=either, callbacks=PolicyReturns
    )
    kept = again.optimizer.metrics.episodes.report()
    assert kept["module_episode_returns_mean"] == policies
    trainer.stop()
    again.stop()


@pytest.mark.parametrize(
    "options", [{"compress_gradients": "topk"}, {"num_workers_below": 1}], ids=str
)
def test_option_that_several_policies_cannot_have(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*with several policies"):
        polopt.A3C({**SMALL, **TWO, "num_workers": 1, **options, "env": Matrix}).train()
