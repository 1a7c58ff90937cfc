"""RLlib's options of several agents give the options of polopt, and train."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from flat_configs import flat

from polopt.common.config import ConfigError
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_group import PolicyGroup
from polopt.rllib import (
    DefaultModelConfig,
    DQNConfig,
    MultiRLModuleSpec,
    PolicySpec,
    PPOConfig,
    RLlibCallback,
    RLModuleSpec,
    to_rl_module,
)
from polopt.rllib.views import environments_of
from polopt.rollouts.envs.agent_policies import AgentPolicies
from polopt.rollouts.envs.agent_vector_env import MappedEpisode


class Guess:
    """An environment with RLlib's new API and agents 0 and 1. Each gets a reward for the action 1.
    An episode has 4 steps."""

    possible_agents = (0, 1)
    observation_spaces = dict.fromkeys(possible_agents, gymnasium.spaces.Box(-1.0, 1.0, (2,)))
    action_spaces = dict.fromkeys(possible_agents, gymnasium.spaces.Discrete(2))

    def __init__(self, config: Any = None) -> None:
        self._steps = 0

    def get_agent_ids(self) -> tuple[int, ...]:
        return self.possible_agents

    def _observations(self) -> dict[int, np.ndarray]:
        return {agent: np.full(2, agent, np.float32) for agent in self.possible_agents}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._steps = 0
        return self._observations(), {}

    def step(self, actions: dict[int, Any]) -> Any:
        self._steps += 1
        ended = {"__all__": self._steps == 4}
        rewards = {agent: float(action) for agent, action in actions.items()}
        return self._observations(), rewards, ended, {"__all__": False}, {}


def class_of_rllib(name: str, module: str = "ray.rllib.policy") -> type:
    return type(name, (), {"__module__": module})


def agents_of(**options: Any) -> dict[str, Any]:
    config: dict[str, Any] = flat(PPOConfig().multi_agent(**options))
    return config


def two_policies(config: Any = PPOConfig, **options: Any) -> Any:
    given = {
        "policies": {"p0", "p1"},
        "policy_mapping_fn": lambda agent_id, episode, **kwargs: f"p{agent_id}",
    }
    return (
        config()
        .environment(Guess)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .training(train_batch_size=64)
        .multi_agent(**{**given, **options})
    )


# ---- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"b", "a"}, {"a": {}, "b": {}}),
        (frozenset({"b", "a"}), {"a": {}, "b": {}}),
        (["b", "a"], {"b": {}, "a": {}}),
        (("b", "a"), {"b": {}, "a": {}}),
        ({"a": None, "b": PolicySpec()}, {"a": {}, "b": {}}),
        ({"a": (None, None, None, {})}, {"a": {}}),
        ({"a": PolicySpec(config={"num_epochs": 3})}, {"a": {"num_sgd_iter": 3}}),
        ({"a": (None, "obs", "act", {"lambda_": 0.5})}, {"a": {"lambda": 0.5}}),
        ({"a": {"lr_schedule": [[0, 0.1]]}}, {"a": {"lr": [[0, 0.1]]}}),
        ({"a": PolicySpec(config=PPOConfig.overrides(lr=0.1))}, {"a": {"lr": 0.1}}),
        ({"a": PolicySpec(config=PPOConfig().training(lr=0.1))}, {"a": {"lr": 0.1}}),
        ({"a": PolicySpec(A2CPolicy)}, {"a": {"policy": A2CPolicy}}),
        ({"a": {"policy": "a2c", "lr": 0.1}}, {"a": {"policy": "a2c", "lr": 0.1}}),
        ({"a": PolicySpec("ppo")}, {"a": {}}),
        ({"a": PolicySpec(class_of_rllib("PPOTorchPolicy"))}, {"a": {}}),
        ({"a": PolicySpec(class_of_rllib("APPOTorchPolicy"))}, {"a": {"policy": "appo"}}),
    ],
)
def test_policies_in_every_form_of_rllib(given: Any, expected: dict[str, Any]) -> None:
    found = agents_of(policies=given)
    assert found == {"policies": expected}
    assert list(found["policies"]) == list(expected)


def test_policy_keeps_the_options_of_the_network_of_the_run() -> None:
    config = PPOConfig().rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[3], vf_share_layers=True)
    )
    config.multi_agent(policies={"a": {"model": {"fcnet_hiddens": [4]}}, "b": {}})
    assert flat(config)["policies"] == {
        "a": {"model": {"fcnet_hiddens": [4], "vf_share_layers": True}},
        "b": {},
    }


def test_modules_and_overrides_are_options_of_policies() -> None:
    module = RLModuleSpec(
        module_class=class_of_rllib("DefaultPPOTorchRLModule", "ray.rllib.algorithms.ppo"),
        model_config=DefaultModelConfig(fcnet_hiddens=[4], max_seq_len=9),
    )
    config = PPOConfig().rl_module(
        model_config={"fcnet_hiddens": [3], "vf_share_layers": True},
        rl_module_spec=MultiRLModuleSpec(rl_module_specs={"a": module, "b": RLModuleSpec()}),
        algorithm_config_overrides_per_module={"b": PPOConfig.overrides(lr=0.1)},
    )
    expected = {"a": {"model": {"fcnet_hiddens": [4]}}, "b": {"lr": 0.1}}
    assert flat(config)["policies"] == expected
    config.multi_agent(policies=["b", "a", "c"])
    assert flat(config)["policies"] == {"b": {"lr": 0.1}, "a": expected["a"], "c": {}}
    config.multi_agent(policies=["b"])
    with pytest.raises(ConfigError, match=r"rl_module_spec: unknown policy 'a'. Allowed: 'b'"):
        flat(config)


def test_module_of_the_only_policy_is_the_network_of_the_run() -> None:
    spec = RLModuleSpec(model_config={"fcnet_hiddens": [4]})
    config = PPOConfig().rl_module(rl_module_spec=spec)
    assert flat(config) == {"model": {"fcnet_hiddens": [4]}}


@pytest.mark.parametrize("name", ["RandomPolicy", "RandomRLModule"])
def test_policy_of_rllib_that_acts_at_random_is_a_frozen_policy(name: str) -> None:
    spec = RLModuleSpec(module_class=class_of_rllib(name, "ray.rllib.examples"))
    modules = MultiRLModuleSpec(rl_module_specs={"p0": RLModuleSpec(), "p1": spec})
    config = two_policies(policies_to_train=["p0"]).rl_module(rl_module_spec=modules)
    assert flat(config)["policies"] == {"p0": {}, "p1": {}}
    algo = config.build_algo()
    policy = algo.get_policy("p1")
    observations = np.random.default_rng(0).uniform(-1.0, 1.0, (100, 2)).astype(np.float32)
    logits = policy.action_params(observations)
    assert np.abs(logits[:, 0] - logits[:, 1]).max() < 0.1  # almost uniform
    before = policy.get_weights().flat.copy()
    algo.train()
    np.testing.assert_array_equal(policy.get_weights().flat, before)
    algo.stop()
    config.multi_agent(policies_to_train=None)
    with pytest.raises(ConfigError, match="policy 'p1' acts at random and cannot learn"):
        flat(config)


def test_policy_of_dqn_that_acts_at_random_always_explores() -> None:
    spec = PolicySpec(class_of_rllib("RandomPolicy"))
    config = DQNConfig().multi_agent(policies={"a": spec, "b": {}}, policies_to_train=["b"])
    assert flat(config)["policies"] == {"a": {"epsilon": 1.0}, "b": {}}


def test_old_dict_becomes_options() -> None:
    def mapping(agent_id: str) -> str:
        return "a"

    given = {
        "policies": {"a": (None, None, None, {"gamma": 0.5}), "b": (None, None, None, {})},
        "policy_mapping_fn": mapping,
        "policies_to_train": ("a",),
        "count_steps_by": "agent_steps",
        "observation_fn": None,
    }
    expected = {
        "policies": {"a": {"gamma": 0.5}, "b": {}},
        "policy_mapping_fn": mapping,
        "policies_to_train": ["a"],
        "count_steps_by": "agent_steps",
    }
    assert flat(PPOConfig.from_dict({"multiagent": given})) == expected
    config = PPOConfig()
    config["multiagent"]["policies"] = ["a"]
    assert flat(config) == {"policies": {"a": {}}}
    with pytest.raises(TypeError, match="'polices'; did you mean 'policies'"):
        PPOConfig.from_dict({"multiagent": {"polices": {}}})


def test_only_connector_is_the_one_that_flattens() -> None:
    def FlattenObservations(**options: Any) -> None:
        raise AssertionError("polopt does not call it")

    module = {"FlattenObservations": FlattenObservations}
    flattens = eval("lambda env, spaces, device: FlattenObservations(multi_agent=True)", module)
    assert flat(PPOConfig().env_runners(env_to_module_connector=flattens)) == {}
    both = eval("lambda env: [FlattenObservations(), Other()]", module)
    with pytest.raises(ConfigError, match="polopt has no connectors"):
        PPOConfig().env_runners(env_to_module_connector=both)


# ---- mappings ---------------------------------------------------------------------------------


class CallableMapping:
    def __call__(self, agent_id: Any, episode: Any, worker: Any, **kwargs: Any) -> Any:
        return (agent_id, episode.episode_id, worker.worker_index)


MAPPINGS: dict[str, tuple[Callable[..., Any], Any]] = {
    "agent": (lambda agent_id: agent_id, 1),
    "anything": (lambda *_, **__: "a", "a"),
    "agent and anything": (lambda aid, *a, **kw: aid, 1),
    "new": (lambda agent_id, episode, **kwargs: (agent_id, hash(episode.id_)), (1, 7)),
    "another name": (lambda aid, eps: (aid, eps.episode_id, eps.env_id), (1, 7, 3)),
    "old": (lambda agent_id, episode, worker, **kw: (episode.id_, worker.worker_index), (7, 2)),
    "object": (CallableMapping(), (1, 7, 2)),
    "default": (lambda agent_id, opponent="b": opponent, "b"),
    "rng": (lambda agent_id, rng: rng, "a generator"),
    "keywords": (lambda agent_id, *, worker, episode: (episode.id_, worker.worker_index), (7, 2)),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_mapping_gets_the_arguments_of_rllib(name: str) -> None:
    from polopt.rollouts.envs.agent_policies import caller_of

    given, expected = MAPPINGS[name]
    mapping = agents_of(policy_mapping_fn=given)["policy_mapping_fn"]
    call = caller_of(mapping)
    assert call is not None
    further = {"episode": MappedEpisode(7, 3), "worker": 2, "rng": "a generator"}
    assert call(1, further) == expected


def test_mapping_of_self_play_changes_sides() -> None:
    mapping = agents_of(
        policy_mapping_fn=lambda agent_id, episode, **kwargs: (
            "main" if hash(episode.id_) % 2 == agent_id else "other"
        )
    )["policy_mapping_fn"]
    policies = AgentPolicies({"main": [0, 1], "other": [0, 1]}, mapping)
    choose = policies.chooser(lambda: np.random.default_rng(0), 1)
    sides = [[choose(agent, MappedEpisode(i, 0)) for agent in (0, 1)] for i in range(4)]
    assert sides == [[0, 1], [1, 0], [0, 1], [1, 0]]


def test_episode_of_a_mapping_names_what_it_has() -> None:
    mapping = agents_of(policy_mapping_fn=lambda agent_id, episode: episode.total_reward)
    choose = AgentPolicies({"a": [0]}, mapping["policy_mapping_fn"]).chooser(
        lambda: np.random.default_rng(0), 0
    )
    with pytest.raises(
        AttributeError, match=r"no 'total_reward' in polopt. It has id_, episode_id"
    ):
        choose(0, MappedEpisode(0, 0))


@pytest.mark.parametrize(
    "mapping",
    [
        lambda agent_id, episode: random.choice(["p0", "p1"]),
        lambda agent_id: random.choice(["p0", "p1"]),
    ],
)
def test_mapping_may_draw(mapping: Callable[..., str]) -> None:
    """RLlib up to 1.8 passed no episode, and asked the mapping in each episode, too."""
    config = two_policies(policy_mapping_fn=mapping)
    algo = config.build_algo()
    result = algo.train()
    algo.stop()
    assert set(result["learners"]) >= {"p0", "p1"}


# ---- algorithms -------------------------------------------------------------------------------


class Remember(RLlibCallback):
    seen: list[Any] = []  # noqa: RUF012 - the test reads it

    def on_episode_end(self, *, episode: Any, policies: Any, **kwargs: Any) -> None:
        assert [episode.module_for(agent) for agent in (0, 1, 2)] == ["p0", "p1", None]
        self.seen.append((list(policies), dict(episode.agent_returns), episode.total_reward))


def test_algorithm_has_policies_by_name() -> None:
    pytest.importorskip("ray.rllib.algorithms.ppo")
    algo = (
        two_policies(policies={"p0": {"lr": 0.5}, "p1": PolicySpec()}, policies_to_train=["p1"])
        .callbacks(Remember)
        .build_algo()
    )
    frozen = algo.get_policy("p0").get_weights().flat.copy()
    result = algo.train()
    assert result["num_agent_steps_sampled"] == result["agent_timesteps_total"] == 2 * 64
    assert result["num_env_steps_sampled"] == 64
    names, returns, total = Remember.seen[-1]
    assert (names, set(returns), total) == (["p0", "p1"], {0, 1}, sum(returns.values()))
    assert isinstance(algo.get_policy(), PolicyGroup)
    assert algo.get_policy("p0").config.lr == 0.5
    np.testing.assert_array_equal(algo.get_policy("p0").get_weights().flat, frozen)
    with pytest.raises(ValueError, match=r"no policy 'p3'. Allowed: 'p0', 'p1'"):
        algo.get_policy("p3")
    for name in ("p0", "p1"):
        policy = algo.get_policy(name)
        for observation in np.eye(2, dtype=np.float32):
            action = algo.compute_single_action(observation, policy_id=name, explore=False)
            assert action == policy.predict(observation)[0]
        module = to_rl_module(policy)
        np.testing.assert_array_equal(
            module.state_dict()["pi.net.mlp.0.bias"], policy.model.policy_head.bias.detach()
        )
    for call in (algo.compute_single_action, algo.get_module):
        with pytest.raises(ValueError, match="no policy 'default_policy'"):
            call(*[np.zeros(2, np.float32)] * (call == algo.compute_single_action))
    played = algo.evaluate()["env_runners"]
    assert (played["num_episodes"], played["episode_len_mean"]) == (10, 4.0)
    algo.stop()


class Rows(RLlibCallback):
    def on_episode_start(
        self, *, episode: Any, base_env: Any, env_index: int, **kwargs: Any
    ) -> None:
        assert episode.length == 0
        assert episode.last_observation_for(1).tolist() == [1.0, 1.0]
        assert isinstance(base_env.get_sub_environments()[env_index], Guess)
        episode.custom_metrics["rows"] = 0

    def on_postprocess_trajectory(
        self,
        *,
        episode: Any,
        postprocessed_batch: Any,
        policy_id: str,
        agent_id: int,
        **kwargs: Any,
    ) -> None:
        assert policy_id == f"p{agent_id}"
        assert (postprocessed_batch["obs"] == agent_id).all()
        episode.custom_metrics["rows"] += len(postprocessed_batch["rewards"])

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        assert episode.get_agents() == [0, 1]
        assert episode.last_action_for(0) in (0, 1)


def test_callbacks_see_the_trajectories_of_all_agents() -> None:
    algo = two_policies().env_runners(rollout_fragment_length=6).callbacks(Rows).build_algo()
    metrics = algo.train()["env_runners"]["custom_metrics"]
    algo.stop()
    assert (metrics["rows_min"], metrics["rows_max"]) == (8.0, 8.0)


class AgainstThePast(RLlibCallback):
    """As RLlib's `SelfPlayCallback`."""

    weights: Any = None

    def on_train_result(self, *, algorithm: Any, result: Any, **kwargs: Any) -> None:
        if result["training_iteration"] > 1:
            return

        def mapping(agent_id: int, episode: Any, **kwargs: Any) -> str:
            return "main" if hash(episode.id_) % 2 == agent_id else "main_v1"

        added = algorithm.add_policy("main_v1", copy_of="main", policy_mapping_fn=mapping)
        type(self).weights = added.get_weights().flat.copy()


def test_self_play_adds_and_removes_policies() -> None:
    algo = (
        two_policies(policies=["main"], policy_mapping_fn=lambda agent_id, episode: "main")
        .callbacks(AgainstThePast)
        .build_algo()
    )
    assert "main_v1" not in algo.train()["learners"]
    main, past = algo.get_policy("main"), algo.get_policy("main_v1")
    np.testing.assert_array_equal(main.get_weights().flat, AgainstThePast.weights)
    assert "main" in algo.train()["learners"]
    np.testing.assert_array_equal(past.get_weights().flat, AgainstThePast.weights)
    assert (main.get_weights().flat != AgainstThePast.weights).any()
    for wrong in ({}, {"policy_cls": A2CPolicy}, {"copy_of": "main", "policy_cls": A2CPolicy}):
        with pytest.raises(ConfigError, match=r"add_policy: got .* Allowed: copy_of"):
            algo.add_policy("main_v2", **wrong)
    with pytest.raises(AttributeError, match=r"add_policy\(name, copy_of=...\)"):
        algo.add_module("main_v2", RLModuleSpec())
    algo.remove_policy("main_v1", policy_mapping_fn=lambda agent_id, episode: "main")
    with pytest.raises(ValueError, match="no policy 'main_v1'"):
        algo.get_policy("main_v1")
    algo.train()
    algo.stop()


def test_options_of_a_policy_are_checked_by_the_run() -> None:
    config = two_policies(policies={"p0": {"train_batch_size": 3}, "p1": {}})
    with pytest.raises(ConfigError, match=r"policy 'p0' in 'policies': .*'train_batch_size'"):
        config.build_algo()


def test_environments_in_processes_are_not_there_for_callbacks() -> None:
    vector = SimpleNamespace(envs=[object()], processes=object())  # as in `AgentProcesses`
    worker = SimpleNamespace(sampler=SimpleNamespace(env=SimpleNamespace(vector=vector)))
    with pytest.raises(AttributeError, match=r"no single environments.*vectorization_mode"):
        environments_of(worker)
