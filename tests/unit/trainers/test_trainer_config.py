"""Tests of the flat config of a trainer. Each config class parses its keys, and errors are raised
before Ray starts."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import gymnasium
import pytest
import ray
from gymnasium.envs.classic_control import CartPoleEnv

from polopt.common.config import ConfigError
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.callbacks import Callbacks
from polopt.trainers.experiment import Experiment, doubtful
from polopt.trainers.presets import A2C, A3C, DDPPO, PRESETS, SAC, SyncPPO
from polopt.trainers.trainer import PolicyOptimizerTrainer

ENV = {"env": "CartPole-v1"}


def parse(options: dict[str, Any], preset: dict[str, Any] | None = None) -> Experiment:
    return Experiment.parse({**ENV, **options}, preset or {})


@pytest.mark.parametrize("nested", [False, True])
def test_defaults_of_a_preset_follow_what_the_user_chooses(nested: bool) -> None:
    """An error never names a key that the user has not given, only because a preset sets it."""

    def apex(**options: Any) -> Any:
        given = {"optimizer": {"name": "async_replay", **options}} if nested else options
        return parse(given, PRESETS["ApexDQN"].preset).optimizer

    uniform = apex(prioritized_replay=False)
    assert uniform.final_prioritized_replay_beta == 1.0
    assert apex().final_prioritized_replay_beta == 0.4
    with pytest.raises(ConfigError, match=r"'final_prioritized_replay_beta': got 0\.4"):
        apex(prioritized_replay=False, final_prioritized_replay_beta=0.4)
    assert apex(buffer_size=5000).learning_starts == 5000
    assert apex(buffer_size=50_000).learning_starts == 10_000
    assert parse({"buffer_size": 500}, PRESETS["DQN"].preset).optimizer.learning_starts == 500
    with pytest.raises(ConfigError, match="'learning_starts': got 6000"):
        apex(buffer_size=5000, learning_starts=6000)


def test_each_key_goes_to_its_owner() -> None:
    experiment = parse(
        {
            "min_sample_timesteps_per_iteration": 7,
            "num_workers": 3,
            "env_config": {"sutton_barto_reward": True},
            "clip_param": 0.3,
            "lambda": 0.9,
            "model": {"fcnet_hiddens": [32, 16]},
            "train_batch_size": 512,
        }
    )
    assert experiment.trainer.min_sample_timesteps_per_iteration == 7
    assert experiment.rollout.num_workers == 3
    assert experiment.rollout.env_config == {"sutton_barto_reward": True}
    assert experiment.policy.to_dict()["clip_param"] == 0.3
    assert experiment.policy.lambda_ == 0.9
    assert experiment.policy.model.fcnet_hiddens == (32, 16)
    assert experiment.optimizer.to_dict()["train_batch_size"] == 512
    assert (experiment.policy_name, experiment.optimizer_name) == ("ppo", "sync_samples")


def test_user_options_override_the_preset() -> None:
    assert parse({}, SyncPPO.preset).rollout.rollout_fragment_length == 128
    assert (
        parse({"rollout_fragment_length": 9}, SyncPPO.preset).rollout.rollout_fragment_length == 9
    )
    assert parse({}).rollout.rollout_fragment_length == 20


def test_plugin_by_name_dict_or_class() -> None:
    by_dict = parse({"optimizer": {"name": "async_gradients", "grads_per_step": 3}})
    assert by_dict.optimizer_class is AsyncGradients
    assert by_dict.optimizer.to_dict()["grads_per_step"] == 3
    by_class = parse({"optimizer": AsyncGradients, "policy": PPOPolicy})
    assert (by_class.optimizer_name, by_class.policy_name) == ("async_gradients", "ppo")
    with_options = parse({"policy": {"name": "ppo", "lambda_": 0.5}})
    assert with_options.policy.to_dict()["lambda"] == 0.5
    # A preset fixes the name. The plugin's options may come in a dict with or without this name.
    for given in ({"grads_per_step": 3}, {"name": "async_gradients", "grads_per_step": 3}):
        assert parse({"optimizer": given}, A3C.preset).optimizer.to_dict()["grads_per_step"] == 3


@pytest.mark.parametrize(
    ("options", "preset", "said"),
    [
        ({"gama": 1}, {}, r"unknown key 'gama'; did you mean 'gamma'\? Similar: gamma"),
        ({"zzz": 1}, {}, r"unknown key 'zzz'\. None of the \d+ names is similar \(`polopt list"),
        ({"use_lstm": True}, {}, r"'use_lstm' is an option of the network. Set it with model="),
        ({"grads_per_step": 1}, {}, r"'grads_per_step' is an option of optimizer 'async_grad"),
        ({"clip_param": 1}, A2C.preset, r"'clip_param' is an option of policy .*'ppo'"),
        ({"optimizer": {"name": "sync_samples", "grads_per_step": 1}}, {}, "'grads_per_step'"),
        ({"optimizer": "sync_sample"}, {}, r"did you mean 'sync_samples'\?"),
        ({"policy": "pp0"}, {}, r"did you mean 'ppo'\?"),
        ({"optimizer": {"x": 1}}, {}, "a name, or a dict with a 'name'"),
        ({"optimizer": {"name": ["x"]}}, {}, "a name, or a dict with a 'name'"),
        ({"optimizer": 3}, {}, "a name, or a dict with a 'name'"),
        ({"optimizer": int}, {}, "a subclass of"),
        ({"optimizer": "sync_samples"}, A3C.preset, "this preset always uses 'async_gradients'"),
        ({"policy": {"name": "ppo"}}, A3C.preset, "this preset always uses 'a3c'"),
        ({"num_workers": "many"}, {}, "'num_workers': got 'many'"),
        ({"num_workers": -1}, {}, "'num_workers': got -1; allowed: greater than or equal to 0"),
        ({"num_workers": True}, {}, "'num_workers': got True"),
        ({"lr": -1}, {}, "'lr': got -1"),
        ({"lr": [[5, 1.0], [5, 2.0]]}, {}, "'lr'"),
        ({"model": {"fcnet_hidens": [3]}}, {}, "fcnet_hidens"),
        ({"env": None}, {}, "key 'env' is missing"),
        ({"num_workers": 0}, A3C.preset, "'async_gradients' with num_workers=0"),
        ({"num_workers": 0}, DDPPO.preset, "'decentralized_allreduce' with num_workers=0"),
        ({3: 4}, {}, "got key 3. Allowed: strings"),
    ],
)
def test_bad_config_is_one_error(
    options: dict[Any, Any], preset: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(options, preset)
    assert "\n" not in str(caught.value)


def test_config_must_be_a_dict() -> None:
    with pytest.raises(ConfigError, match="a dict of keys to values"):
        Experiment.parse([("env", "CartPole-v1")], {})  # type: ignore[arg-type]


@pytest.mark.parametrize("env", ["CartPole-v1", CartPoleEnv])
def test_environment_in_place_of_the_config_is_one_error(env: Any) -> None:
    for options in ({}, {"num_workers": 0}):
        with pytest.raises(ConfigError) as caught:
            SyncPPO(env, **options)
        assert str(caught.value).endswith(f"If this is the environment, pass it as env={env!r}")
    with pytest.raises(ConfigError, match=r"got ''\. Allowed: a dict"):
        SyncPPO("", env=env)


@pytest.mark.parametrize("preset", PRESETS.values())
def test_parse_accepts_what_to_dict_returns(
    preset: type[PolicyOptimizerTrainer],
) -> None:
    portable = json.dumps(parse({"seed": 3}, preset.preset).to_dict())
    for again in (preset.preset, {}):
        assert json.dumps(Experiment.parse(json.loads(portable), again).to_dict()) == portable


class Unsupported(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Text(5)
    action_space = gymnasium.spaces.Discrete(2)


class UnsupportedActions(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def two_cartpoles() -> Any:
    return gymnasium.make_vec("CartPole-v1", 2)


def broken_env() -> Any:
    raise OSError("no such simulator")


# Gymnasium's vector environments log errors when an environment that could not be made is
# garbage-collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("preset", PRESETS.values())
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "CartPole-v9"}, "CartPole"),
        ({"env": "Cartpol-v1"}, r"did you mean 'CartPole-v1'\?"),
        ({"env": 7}, "'env': got 7"),
        ({"env": Unsupported}, "observation space Text"),
        ({"env": UnsupportedActions}, "Sequence"),
        ({"env": broken_env}, "cannot be made .* OSError: no such simulator"),
        ({"env_config": {"no_such": 1}}, "cannot be made with env_config .*'no_such'"),
        ({"vectorization_mode": "vector_entry_point", "env": cartpole}, "vectorization_mode"),
        ({"env": two_cartpoles, "num_envs_per_worker": 8}, "num_envs_per_worker.: got 8"),
        ({"autoreset_mode": "same_step"}, "resets in mode"),
        ({"gama": 1}, "gamma"),
    ],
)
def test_error_comes_before_ray_starts(
    preset: type[PolicyOptimizerTrainer], options: dict[str, Any], said: str, monkeypatch: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started, or a worker, for a config that is wrong")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("polopt.trainers.run.Run._start", refuse)
    with pytest.raises(ConfigError, match=said):
        preset({**ENV, **options})


# ---- keyword arguments, automatic values --------------------------------------------------------


def unpicklable(key: str) -> dict[str, Any]:
    """Returns options in which the value of `key` refers to a lock."""
    lock = threading.Lock()

    def make(**config: Any) -> Any:
        with lock:
            return CartPoleEnv()

    class LockedPolicy(PPOPolicy):
        def get_weights(self) -> Any:
            with lock:
                return super().get_weights()

    class LockedCallbacks(Callbacks):
        def on_sample_end(self, **options: Any) -> None:
            with lock:
                return

    values = {
        "env": make,
        "env_config": {"lock": lock},
        "policy": LockedPolicy,
        "callbacks": LockedCallbacks,
    }
    return {"env": lambda **config: CartPoleEnv(), key: values[key]}


@pytest.mark.parametrize("key", ["env", "env_config", "policy", "callbacks"])
def test_value_that_cannot_be_sent_to_workers_is_named(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    options = unpicklable(key)
    message = rf"key '{key}': got .*: TypeError: cannot pickle '_thread.lock' object"
    with pytest.raises(ConfigError, match=message):
        PolicyOptimizerTrainer({**options, "num_workers": 1})
    evaluated = {**options, "num_workers": 0, "optimizer": "sync_samples"}
    with pytest.raises(ConfigError, match=message):
        PolicyOptimizerTrainer({**evaluated, "evaluation_interval": 1, "evaluation_num_workers": 1})
    if key in ("env", "env_config"):
        changed = {"evaluation_interval": 1, "evaluation_num_workers": 1}
        changed["evaluation_config"] = options
        with pytest.raises(ConfigError, match=message.replace("key '", "key 'evaluation_config.")):
            PolicyOptimizerTrainer({**ENV, "num_workers": 0, **changed})
    parse(evaluated).make_worker_config()  # without remote workers, nothing is pickled


def test_keyword_arguments_stand_beside_the_dict() -> None:
    small = {"num_envs_per_worker": 2, "model": {"fcnet_hiddens": [4]}}
    trainers = [
        SyncPPO({**small, "env": "CartPole-v1", "num_workers": 0, "lambda": 0.5, "seed": 1}),
        SyncPPO(small, env="CartPole-v1", num_workers=0, lambda_=0.5, seed=1),
        SyncPPO(**small, env="CartPole-v1", num_workers=0, lambda_=0.5, seed=1),
    ]
    configs = [trainer.experiment.to_dict() for trainer in trainers]
    for trainer in trainers:
        trainer.stop()
    assert configs[0] == configs[1] == configs[2]
    assert "num_workers" not in small


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"lr": 1e-3}, {"lr": 1e-3}, r"key 'lr': got 0\.001 in config and 0\.001 as a keyword"),
        ({"lambda_": 0.5}, {"lambda": 0.4}, "two names"),
        ({}, {"nun_workers": 0}, r"did you mean 'num_workers'\?"),
        ([("lr", 1e-3)], {}, "Allowed: a dict"),
    ],
)
def test_wrong_keyword_arguments_are_one_error(config: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SyncPPO(config, env="CartPole-v1", **options)


@pytest.mark.parametrize(
    ("key", "preset"),
    [
        ("sgd_minibatch_size", A2C.preset),
        ("train_batch_size", A2C.preset),
        ("train_batch_size", {"optimizer": "async_samples"}),
    ],
)
def test_automatic_options_are_none(key: str, preset: dict[str, Any]) -> None:
    for options in ({}, {key: None}, {key: 0}):
        found = parse(options, preset)
        values = {**found.policy.to_dict(), **found.optimizer.to_dict()}
        assert values[key] is None
    with pytest.raises(ConfigError, match=rf"'{key}': got -1"):
        parse({key: -1}, preset)
    with pytest.raises(ConfigError, match=rf"'{key}': got True"):
        parse({key: True}, preset)


def test_only_workers_that_compute_gradients_reserve_gpus() -> None:
    """The workers below a gradient worker start without a GPU, so Tune reserves none for them."""
    options = {"num_workers": 2, "num_workers_below": 3, "num_gpus_per_worker": 0.5}
    request = A3C.default_resource_request({**ENV, **options})
    gradient_worker, below = {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0}
    assert request.bundles == [{"CPU": 1.0}, *[gradient_worker] * 2, *[below] * 6]


# ---- options that are probably mistakes -------------------------------------------------------

#: A batch of 2 * 16 rows.
ROWS = {"rollout_fragment_length": 16, "num_envs_per_worker": 2, "num_workers": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sgd_minibatch_size": 4096}, "sgd_minibatch_size=4096: a batch has at most 32 rows"),
        ({"sgd_minibatch_size": 97, "num_workers": 3}, "a batch has at most 96 rows"),
        ({"sgd_minibatch_size": 49, "train_batch_size": 33}, ""),  # two fragments, 64 rows
        ({"sgd_minibatch_size": 65, "train_batch_size": 33}, "a batch has at most 64 rows"),
        ({"sgd_minibatch_size": 96, "num_workers": 3}, ""),
        ({"sgd_minibatch_size": 128}, ""),  # the default
        ({"sgd_minibatch_size": None}, ""),
        ({"lr": 0}, "lr=0.0: the weights with this learning rate never change"),
        ({"lr": [[0, 0.0], [100, 0.0]]}, "never change"),
        ({"lr": [[0, 1e-3], [100, 0.0]]}, ""),
        (
            {"sgd_minibatch_size": 97, "num_workers": 3, "optimizer": "sync_gradients"},
            "a batch has at most 32 rows",
        ),
    ],
)
def test_options_that_are_probably_a_mistake_warn(options: dict[str, Any], said: str) -> None:
    texts = doubtful(Experiment.parse({"env": "CartPole-v1", **ROWS, **options}, {}))
    assert len(texts) == bool(said)
    assert all(said in text for text in texts)


def test_learning_rate_that_no_segment_uses_may_be_zero() -> None:
    rates = {"actor_lr": 1e-4, "critic_lr": 1e-4, "alpha_lr": 1e-4}
    for given, said in (({**rates, "lr": 0}, []), ({**rates, "alpha_lr": 0}, ["alpha_lr=0.0"])):
        texts = doubtful(Experiment.parse({"env": "Pendulum-v1", **given}, SAC.preset))
        assert [text.partition(":")[0] for text in texts] == said


def test_trainer_logs_what_is_probably_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polopt"):
        PolicyOptimizerTrainer(env="CartPole-v1", **ROWS, lr=0).stop()
    assert [text for text in caplog.messages if "never change" in text]
