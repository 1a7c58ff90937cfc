"""Hyperparameters of Stable-Baselines3 as options of polopt."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from torch import nn

import polopt
from polopt import sb3_defaults
from polopt.common.config import ConfigError
from polopt.rllib.sb3_defaults import _DEFAULTS, _OFF_POLICY, _ON_POLICY
from polopt.trainers.experiment import Experiment

PRESETS = {
    "PPO": polopt.SyncPPO,
    "A2C": polopt.A2C,
    "DQN": polopt.DQN,
    "SAC": polopt.SAC,
    "TD3": polopt.TD3,
    "DDPG": polopt.TD3,
}


@pytest.mark.parametrize("algorithm", PRESETS)
def test_preset_takes_the_defaults(algorithm: str) -> None:
    options = sb3_defaults(algorithm, total_timesteps=1000, n_envs=2)
    env = "Pendulum-v1" if algorithm in ("SAC", "TD3", "DDPG") else "CartPole-v1"
    parsed = Experiment.parse({**options, "env": env}, PRESETS[algorithm].preset)
    assert parsed.rollout.num_envs_per_worker == 2
    if algorithm in ("SAC", "TD3", "DDPG", "DQN"):
        # One update of a batch for each `train_freq` steps of the 2 environments.
        batch, frequency = (32, 4) if algorithm == "DQN" else (256, 1)
        assert options["training_intensity"] == batch / (frequency * 2)
        assert options["random_timesteps"] == 100


def test_each_algorithm_has_its_own_values() -> None:
    ppo, a2c = sb3_defaults("PPO"), sb3_defaults("A2C")
    assert (ppo["rollout_fragment_length"], ppo["sgd_minibatch_size"], ppo["lr"]) == (
        2048,
        64,
        3e-4,
    )
    assert (ppo["vf_loss_coeff"], a2c["vf_loss_coeff"]) == (0.5, 1.0)
    assert (a2c["torch_optimizer"], a2c["lambda"], a2c["lr"]) == ("rmsprop", 1.0, 7e-4)
    dqn = sb3_defaults("DQN", total_timesteps=5000)
    assert dqn["epsilon"] == [[0, 1.0], [500, 0.05]]
    assert (dqn["double_q"], dqn["dueling"]) == (False, False)
    assert dqn["target_network_update_timesteps"] == 10_000
    assert sb3_defaults("TD3")["policy_delay"] == 2
    ddpg = sb3_defaults("DDPG")
    assert (ddpg["policy_delay"], ddpg["target_noise"], ddpg["exploration_noise"]) == (1, 0.0, 0.0)
    assert ddpg["model"]["fcnet_hiddens"] == [400, 300]


class NormalActionNoise:
    """As the class of Stable-Baselines3."""

    def __init__(self, sigma: Any) -> None:
        self._sigma = sigma


@pytest.mark.parametrize(
    ("algorithm", "given", "expected"),
    [
        ("PPO", {"n_steps": 16, "batch_size": 8}, {"rollout_fragment_length": 16}),
        ("PPO", {"target_kl": 0.02}, {"kl_stop": pytest.approx(0.03)}),
        (
            "PPO",
            {"policy_kwargs": {"net_arch": {"pi": [9], "vf": [9]}, "activation_fn": nn.ReLU}},
            {"model": {"fcnet_hiddens": [9], "fcnet_activation": "relu"}},
        ),
        ("SAC", {"ent_coef": 0.2}, {"initial_alpha": 0.2, "target_entropy": None}),
        ("SAC", {"ent_coef": "auto_0.1"}, {"initial_alpha": 0.1, "target_entropy": "auto"}),
        ("SAC", {"train_freq": 8, "gradient_steps": -1}, {"training_intensity": 256.0}),
        ("TD3", {"action_noise": NormalActionNoise(np.full(2, 0.3))}, {"exploration_noise": 0.3}),
        ("A2C", {"use_rms_prop": False}, {"adam_epsilon": 1e-5}),
    ],
)
def test_arguments_of_stable_baselines3_are_translated(
    algorithm: str, given: Any, expected: Any
) -> None:
    made = sb3_defaults(algorithm, **given)
    assert {key: made[key] for key in expected} == expected


def test_learning_rate_of_the_remaining_share() -> None:
    schedule = sb3_defaults("PPO", learning_rate=lambda left: left * 1e-3, total_timesteps=100)[
        "lr"
    ]
    assert schedule[0] == [0, 1e-3]
    assert schedule[-1] == [100, 0.0]
    assert schedule[10] == [50, pytest.approx(5e-4)]


@pytest.mark.parametrize(
    ("algorithm", "given", "said"),
    [
        ("PP0", {}, r"did you mean 'PPO'.*Allowed: PPO, A2C, DQN, SAC, TD3, DDPG"),
        ("PPO", {"use_sde": True}, "polopt has no gSDE"),
        ("DQN", {}, "needs total_timesteps"),
        ("PPO", {"learning_rate": lambda left: left}, "total_timesteps is needed"),
        ("PPO", {"policy_kwargs": {"net_arch": {"pi": [1], "vf": [2]}}}, "the same layers"),
        ("TD3", {"action_noise": NormalActionNoise(np.arange(2.0))}, "one standard deviation"),
        ("SAC", {"train_freq": (1, "episode")}, "Allowed: a number of steps"),
    ],
)
def test_what_polopt_cannot_do_is_refused(algorithm: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sb3_defaults(algorithm, **given)


def test_one_train_is_one_rollout() -> None:
    trainer = polopt.SyncPPO(
        env="CartPole-v1", **sb3_defaults("PPO", n_steps=32, batch_size=16, n_epochs=1, n_envs=2)
    )
    assert trainer.train()["num_env_steps_sampled_lifetime"] == pytest.approx(64, abs=8)
    trainer.stop()


@pytest.mark.parametrize("algorithm", _DEFAULTS)
def test_defaults_are_those_of_the_installed_library(algorithm: str) -> None:
    theirs = pytest.importorskip("stable_baselines3")
    parameters = inspect.signature(getattr(theirs, algorithm)).parameters
    common = _ON_POLICY if algorithm in ("PPO", "A2C") else _OFF_POLICY
    for name, value in {**common, **_DEFAULTS[algorithm]}.items():
        assert parameters[name].default == value, name
