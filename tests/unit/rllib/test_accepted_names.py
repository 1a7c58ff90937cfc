"""Names of RLlib in configs, stop keys and Tune's registry."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_helpers import rewrite

import polopt
from polopt.common.config import ConfigError
from polopt.policies.networks.model_config import ModelConfig
from polopt.rllib.other_libraries import ALSO_OF_RLLIB, OTHER_NAMES
from polopt.trainers import presets
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import Experiment
from polopt.trainers.flat_config import aliases_for
from polopt.trainers.presets import PRESETS, SyncPPO
from polopt.trainers.results import check_stop_keys

ENV = {"env": "CartPole-v1"}


def parse(options: dict[str, Any], preset: dict[str, Any] = SyncPPO.preset) -> Experiment:
    return Experiment.parse({**ENV, **options}, preset)


def test_each_name_belongs_to_an_option_of_a_preset_or_of_the_network() -> None:
    known: dict[str, str] = {}
    for preset in PRESETS.values():
        known |= aliases_for({}, preset.preset)
    model = type(parse({}).policy.model).other_names()
    assert model == {"custom_model": "custom", "custom_model_config": "custom_options"}
    missing = {"replay_sequence_length": "sequence_length", "replay_burn_in": "burn_in"}
    assert known | model | missing == OTHER_NAMES | {"lambda_": "lambda"}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("num_env_runners", "num_workers", 5),
        ("num_envs_per_env_runner", "num_envs_per_worker", 5),
        ("minibatch_size", "sgd_minibatch_size", 5),
        ("num_epochs", "num_sgd_iter", 5),
        ("lr_schedule", "lr", 0.5),
        ("entropy_coeff_schedule", "entropy_coeff", 0.5),
        ("timesteps_per_iteration", "min_sample_timesteps_per_iteration", 5),
        ("num_gpus_per_learner", "num_gpus", 0.5),
    ],
)
def test_names_are_accepted(name: str, key: str, value: float) -> None:
    assert parse({name: value}).to_dict() == parse({key: value}).to_dict()
    assert parse({name: value, key: value}).to_dict() == parse({key: value}).to_dict()
    with pytest.raises(ConfigError, match=f"{name!r} and {key!r} are two names of {key!r}"):
        parse({name: value, key: value / 2})


def test_names_are_accepted_in_dicts_of_options() -> None:
    assert parse({"policy": {"name": "ppo", "num_epochs": 2}}).policy.to_dict()["num_sgd_iter"] == 2
    one = {"num_envs_per_env_runner": 1}
    assert parse({"evaluation_config": one}).trainer.evaluation_config.num_envs_per_worker == 1
    shards = {"name": "async_replay", "num_replay_buffer_shards": 3}
    options = parse(
        {"policy": "dqn", "optimizer": shards, "num_workers": 3}, {}
    ).optimizer.to_dict()
    assert options["num_replay_shards"] == 3
    with pytest.raises(ConfigError, match="two names"):
        SyncPPO({"num_env_runners": 1}, env="CartPole-v1", num_workers=0)


def test_wrong_value_names_the_key() -> None:
    with pytest.raises(ConfigError, match="'num_sgd_iter': got 0"):
        parse({"num_epochs": 0})


def test_option_changes_under_its_other_name() -> None:
    trainer = polopt.SyncPPO(num_workers=0, **ENV)
    trainer.optimizer.policy.set_option("entropy_coeff_schedule", 0.5)
    assert trainer.optimizer.policy.config.entropy_coeff == 0.5
    trainer.stop()


def test_checkpoint_names_no_module_under_another_name(tmp_path: Path) -> None:
    made = polopt.SyncPPO(num_workers=0, **ENV)
    saved = tmp_path / "checkpoint"
    made.save(str(saved))
    made.stop()
    rewrite(
        saved, lambda _tensors, tree: tree["config"]["policy"]["model"].update(custom_model="a:X")
    )
    with pytest.raises(CheckpointError, match=r"config/policy/model/custom_model.*got 'a:X'"):
        read_trainer_state(saved)


def test_missing_stop_key_of_an_older_release_names_the_new_key() -> None:
    with pytest.raises(ConfigError, match=r"It is now 'env_runners/num_episodes_l"):
        check_stop_keys(["episodes_total"], {"env_runners": {}})


class Network(torch.nn.Linear):
    """A network of the user."""

    def __init__(self, observation_space: Any, action_space: Any, width: int = 1) -> None:
        super().__init__(4, 2)


def test_network_of_the_user_has_names_of_rllib() -> None:
    given = {"custom_model": Network, "custom_model_config": {"width": 5}}
    assert ModelConfig.parse(given) == ModelConfig(custom=Network, custom_options={"width": 5})
    with pytest.raises(ConfigError, match="are two names of 'custom'"):
        ModelConfig.parse({"custom": Network, "custom_model": torch.nn.ReLU})


def test_name_that_rllib_is_about_to_take(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_warned", set())
    monkeypatch.setitem(sys.modules, "ray.rllib", mock.Mock())
    with caplog.at_level(logging.WARNING, "polopt"):
        polopt.register()
    messages = caplog.messages
    named = [name for name in PRESETS if any(f"registers {name!r}" in text for text in messages)]
    assert {"APPO", "IMPALA"} <= set(named) <= {"APPO", "IMPALA", "DQN", "SAC"}
    assert len(messages) == len(named)


def test_names_of_rllib_are_those_that_it_registers() -> None:
    registry = pytest.importorskip("ray.rllib.algorithms.registry")
    names = set(PRESETS) | {"PPO", "DQN", "SAC"}
    assert names & set(registry.ALGORITHMS) == set(ALSO_OF_RLLIB)
