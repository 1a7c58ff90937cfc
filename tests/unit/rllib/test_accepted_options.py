"""Options of RLlib that change nothing, or that become other options of polopt."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from flat_configs import flat
from gymnasium import spaces
from ray import tune

from polopt.common.config import ConfigError
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.model_config import ModelConfig
from polopt.rllib import A2CConfig, DQNConfig, PPOConfig, RLModuleSpec, SACConfig
from polopt.rllib.other_libraries import FIXED, RLLIB_IGNORED, RLLIB_SILENT


class SingleAgentEnvRunner:
    """As RLlib's class of this name."""


GRID = tune.grid_search([1, 2])


def config_of(options: dict[str, Any], builder: Any = PPOConfig) -> Any:
    return flat(builder.from_dict(options))


@pytest.mark.parametrize("name", sorted(RLLIB_IGNORED | RLLIB_SILENT))
def test_option_that_changes_nothing_is_accepted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polopt"):
        for value in FIXED.get(name, ()):
            assert config_of({name: value}) == {}
        assert caplog.messages == []
        if name.startswith("logger_"):
            return  # decides where results are written
        assert config_of({name: "something else"}) == {}
        said = [one for one in caplog.messages if f"{name}='something else' is ignored" in one]
    assert len(said) == (name in RLLIB_IGNORED)


@pytest.mark.parametrize(
    ("builder", "given", "expected"),
    [
        (PPOConfig, {"env_runner_cls": SingleAgentEnvRunner, "worker_cls": None}, {}),
        (PPOConfig, {"evaluation_num_episodes": 3}, {"evaluation_duration": 3}),
        (PPOConfig, {"remote_worker_envs": True}, {"vectorization_mode": "async"}),
        (A2CConfig, {"use_gae": False, "use_critic": True}, {"lambda": 1.0}),
        (PPOConfig, {"use_gae": False, "lambda": 0.5}, {"lambda": 1.0}),
        (PPOConfig, {"lambda": 0.5, "use_gae": False}, {"lambda": 1.0}),
        (PPOConfig, {"lambda": 0.5, "use_gae": True}, {"lambda": 0.5}),
        (A2CConfig, {"use_gae": True, "use_critic": False}, {"use_critic": False}),
        (PPOConfig, {"clip_rewards": True}, {"clip_raw_rewards": "sign"}),
        (PPOConfig, {"clip_rewards": 10.0}, {"clip_raw_rewards": 10.0}),
        (DQNConfig, {"clip_rewards": 2.5}, {"clip_raw_rewards": 2.5}),
        (
            PPOConfig,
            {"clip_rewards": 5.0, "normalize_rewards": True},
            {"clip_rewards": 5.0, "normalize_rewards": True},
        ),
        (
            SACConfig,
            {"n_step": (2, 5)},
            {"n_step": (2, 5), "rollout_fragment_length": 5, "training_intensity": 51.2},
        ),
        (
            PPOConfig,
            {"vf_share_layers": True, "model": {"fcnet_hiddens": [3]}},
            {"model": {"vf_share_layers": True, "fcnet_hiddens": [3]}},
        ),
        (
            PPOConfig,
            {"vf_share_layers": True, "model": {"vf_share_layers": False, "fcnet_hiddens": [3]}},
            {"model": {"vf_share_layers": False, "fcnet_hiddens": [3]}},
        ),
        (PPOConfig, {"multiagent": {"policies": {}, "policies_to_train": None}}, ...),
        (
            PPOConfig,
            {"exploration_config": {"type": "StochasticSampling", "random_timesteps": 0}},
            {},
        ),
        (
            SACConfig,
            {"exploration_config": {"type": "StochasticSampling", "random_timesteps": 7}},
            {"random_timesteps": 7},
        ),
        (
            SACConfig,
            {"Q_model": {"fcnet_hiddens": [9]}, "policy_model": {"fcnet_hiddens": [9]}},
            {"model": {"fcnet_hiddens": [9]}},
        ),
        (SACConfig, {"optimization": {"actor_learning_rate": 0.5}}, {"actor_lr": 0.5}),
        (
            DQNConfig,
            {"exploration_fraction": 0.2, "schedule_max_timesteps": 100},
            {"epsilon": [[0, 1.0], [20, 0.02]]},
        ),
        (
            DQNConfig,
            {"model": {"epsilon": [(0, 1.0), (7, 0.1)], "fcnet_hiddens": [9]}},
            {
                "epsilon": [(0, 1.0), (7, 0.1)],
                "model": {"fcnet_hiddens": [9], "fcnet_activation": "tanh"},
            },
        ),
        (
            DQNConfig,
            {"initial_epsilon": 0.5, "final_epsilon": 0.1, "epsilon_timesteps": 30},
            {"epsilon": [[0, 0.5], [30, 0.1]]},
        ),
        (
            DQNConfig,
            {"exploration_config": {"type": "EpsilonGreedy", "epsilon_timesteps": GRID}},
            {
                "epsilon": {"grid_search": [[[0, 1.0], [1, 0.05]], [[0, 1.0], [2, 0.05]]]},
            },
        ),
        (
            DQNConfig,
            {"replay_buffer_config": {"capacity": 7, "replay_batch_size": 32}},
            {"buffer_size": 7},
        ),
    ],
)
def test_option_becomes_an_option_of_polopt(builder: Any, given: Any, expected: Any) -> None:
    made = config_of(given, builder)
    assert made == expected or (expected is ... and not made.get("policies"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fcnet_activation": "Swish"}, {"fcnet_activation": "silu"}),
        ({"fcnet_activation": None}, {"fcnet_activation": "linear"}),
        ({"fcnet_kernel_initializer": "xavier_uniform_", "fcnet_bias_initializer": None}, {}),
        ({"head_fcnet_hiddens": [], "head_fcnet_activation": "tanh"}, {}),
        (
            {"head_fcnet_hiddens": [4], "head_fcnet_activation": "tanh", "fcnet_hiddens": [5]},
            {"fcnet_hiddens": [5, 4]},
        ),
    ],
)
def test_options_of_the_network(given: Any, expected: Any) -> None:
    expected = {"fcnet_hiddens": [256, 256], **expected}
    assert config_of({"model": given})["model"] == expected
    spec = RLModuleSpec(model_config_dict=given)
    assert flat(PPOConfig().rl_module(rl_module_spec=spec))["model"] == expected


def test_network_without_activations_is_linear() -> None:
    for model in ({"fcnet_activation": "linear"}, {"fcnet_hiddens": []}):
        config = ModelConfig(**model)  # type: ignore[arg-type]
        network = make_network(
            spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2), None, 2, False, config
        )
        x, y = torch.randn(2, 5, 3)
        with torch.no_grad():
            for of_x, of_y, of_both in zip(*map(network, (x, y, (x + y) / 2)), strict=True):
                torch.testing.assert_close((of_x + of_y) / 2, of_both)


@pytest.mark.parametrize(
    ("builder", "given", "said"),
    [
        (PPOConfig, {"env_runner_cls": dict}, "'env_runner_cls': got <class 'dict'>"),
        (
            SACConfig,
            {
                "q_model_config": {"fcnet_hiddens": [1]},
                "policy_model_config": {"fcnet_hiddens": [2]},
            },
            "q_model_config and policy_model_config differ",
        ),
        (
            PPOConfig,
            {"model": {"head_fcnet_hiddens": [3]}},
            "Allowed: the activation of the layers",
        ),
        (
            DQNConfig,
            {"exploration_config": {"final_epsilon": tune.uniform(0.0, 1.0)}},
            "Tune searches 'final_epsilon'. Allowed: tune.grid_search of one value",
        ),
    ],
)
def test_what_means_something_else_is_refused(builder: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(given, builder)
