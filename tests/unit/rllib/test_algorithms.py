"""Tests of the algorithms with RLlib's constructor: options, results, methods and files."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from flat_configs import flat
from gymnasium.spaces import Box, Discrete
from ray.tune.registry import get_trainable_cls

import polopt
import polopt.rllib as rllib
from polopt import ConfigError
from polopt.rllib.agents import a3c, dqn, pg, ppo, sac  # type: ignore[import-not-found]
from polopt.rllib.algorithm import algorithm_of
from polopt.rllib.algorithms.algorithm import Algorithm  # type: ignore[import-not-found]
from polopt.rllib.algorithms.ppo import PPO, PPOConfig  # type: ignore[import-not-found]
from polopt.rllib.rllib_defaults import ALGORITHMS, TUNE_NAMES
from polopt.rllib.rllib_options import flat_config

SMALL = {"num_workers": 0, "train_batch_size": 64, "num_sgd_iter": 1, "framework": "torch"}


class Walk(gymnasium.Env[np.ndarray, int]):
    """An environment of `length` steps, with one option."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, config: Any) -> None:
        self.length, self.steps = config.get("length", 5), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps >= self.length, False, {}


@pytest.fixture
def trained() -> Any:
    trainer = ppo.PPOTrainer(env=Walk, config={**SMALL, "env_config": {"length": 4}})
    yield trainer, trainer.train()
    trainer.stop()


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_accepts_its_own_defaults(name: str) -> None:
    algorithm = algorithm_of(name)
    whole = dict(algorithm.DEFAULT_CONFIG)
    assert flat_config(whole, algorithm, name) == flat_config({}, algorithm, name)
    algorithm.parse_config({**whole, "env": "CartPole-v1"})
    assert whole["num_envs_per_worker"] == (5 if name.startswith("DDPPO") else 1)


def test_dict_and_builder_and_arguments_mean_the_same() -> None:
    given = {"lr": 1e-3, "num_rollout_workers": 0, "minibatch_size": 32, "lambda_": 0.9}
    builder = PPOConfig().environment("CartPole-v1").training(**{k: given[k] for k in ("lr",)})
    builder.env_runners(num_env_runners=0).training(minibatch_size=32, lambda_=0.9)
    of_dict = PPO.parse_config({**given, "env": "CartPole-v1"})
    assert PPO.parse_config(builder.to_dict()).to_dict() == of_dict.to_dict()
    assert of_dict.policy.lr == 1e-3  # type: ignore[attr-defined]
    assert of_dict.rollout.num_envs_per_worker == 1


def test_value_that_is_no_default_wins_over_another_name() -> None:
    config = {**ppo.DEFAULT_CONFIG, "num_env_runners": 5, "env": "CartPole-v1"}
    assert PPO.parse_config(config).rollout.num_workers == 5


def test_units_and_defaults_of_replay_are_those_of_rllib() -> None:
    options = flat_config({}, dqn.DQNTrainer, "")
    assert options["target_network_update_timesteps"] == 500
    assert options["training_intensity"] == 32 / 4  # a batch of 32 rows for each fragment of 4
    assert options["prioritized_replay"] is True
    assert options["epsilon"][-1] == (10_000, 0.02)
    assert flat_config({}, sac.SACTrainer, "")["target_network_update_freq"] == 1
    given = {"exploration_config": {"epsilon_timesteps": 50, "final_epsilon": 0.1}}
    assert flat_config(given, dqn.DQNTrainer, "")["epsilon"] == [[0, 1.0], [50, 0.1]]
    config = dqn.DEFAULT_CONFIG.copy()
    config["target_network_update_freq"] = 7
    assert flat_config(config, dqn.DQNTrainer, "")["target_network_update_timesteps"] == 7


@pytest.mark.parametrize(("name", "least_s"), [("PPO", 0), ("A3CTrainer", 5), ("APPO", 10)])
def test_iteration_lasts_as_long_as_in_rllib(name: str, least_s: float) -> None:
    cls = algorithm_of(name)
    assert cls.parse_config({"env": Walk}).trainer.min_time_s_per_iteration == least_s
    # The names of RLlib 0.8, 1.10 and 2.0. None and 0 mean that there is no limit.
    for key in ("min_iter_time_s", "min_time_s_per_reporting", "min_time_s_per_iteration"):
        for given, expected in ((0, 0.0), (None, 0.0), (2, 2.0)):
            limits = cls.parse_config({"env": Walk, key: given}).trainer
            assert limits.min_time_s_per_iteration == expected
            assert limits.min_sample_timesteps_per_iteration == 0


def test_iteration_without_a_limit_is_one_batch() -> None:
    options = {"num_workers": 0, "env": Walk, "train_batch_size": 30, "framework": "torch"}
    trainer = a3c.A2CTrainer({**options, "rollout_fragment_length": 15, "min_iter_time_s": None})
    steps = [trainer.train()["timesteps_this_iter"] for _ in range(2)]
    trainer.stop()
    assert steps == [30, 30]


def test_pg_is_a2c_without_critic_on_one_batch() -> None:
    options = {"num_workers": 0, "env": Walk, "train_batch_size": 30, "framework": "torch"}
    trainer = pg.PGTrainer(config={**options, "rollout_fragment_length": 30, "gamma": 0.5})
    batch = trainer._run.workers.local.next_batch()
    result = trainer.train()
    policy = trainer.get_policy().config
    trainer.stop()
    assert result["timesteps_this_iter"] == 30
    # The episodes have 5 steps with a reward of 1.
    np.testing.assert_allclose(batch["advantages"][:5, 0], [1.9375, 1.875, 1.75, 1.5, 1.0])
    assert (policy.lr, policy.grad_clip, policy.entropy_coeff) == (4e-4, None, 0.0)


def test_networks_of_sac_are_one_network() -> None:
    one = {"fcnet_hiddens": [8]}
    options = flat_config({"Q_model": one, "policy_model": one}, sac.SACTrainer, "")
    assert options["model"] == one
    with pytest.raises(ConfigError, match="Allowed: the same layers"):
        flat_config(
            {"q_model_config": one, "policy_model_config": {"fcnet_hiddens": [4]}},
            sac.SACTrainer,
            "",
        )


def test_option_of_a_builder_is_found_under_all_names_in_its_dict() -> None:
    options = PPOConfig().training(train_batch_size_per_learner=64).to_dict()
    assert options["train_batch_size"] == options.train_batch_size_per_learner == 64
    options |= {"num_env_runners": 3}
    assert options.pop("num_workers") == 3
    assert "num_rollout_workers" not in options
    assert flat(PPOConfig().training(lr=5e-5)) == {"lr": 5e-5}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_wokers": 2}, "unexpected keyword argument 'num_wokers'; did you mean 'num_workers'"),
        ({"noisy": True, "env": "CartPole-v1"}, "'noisy'"),
        ("CartPole-v1", "Allowed: a dict or a builder"),
    ],
)
def test_wrong_config_is_refused(config: Any, said: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        PPO(config=config)


def test_ignored_option_of_a_dict_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    config = {**SMALL, "learner_queue_size": 17, "env": Walk}
    with caplog.at_level(logging.WARNING, "polopt"):
        ppo.PPOTrainer(config=config).stop()
    assert sum("learner_queue_size=17 is ignored" in message for message in caplog.messages) == 1


# ---- results and files ------------------------------------------------------------------------


def test_results_have_the_keys_of_all_generations_before_callbacks_see_them() -> None:
    class Reads(rllib.DefaultCallbacks):
        def on_train_result(self, *, algorithm, result, **others):  # type: ignore[no-untyped-def]
            result["seen"] = result["episode_reward_mean"]
            result["custom_metrics"]["mine"] = algorithm.config["lr"]

    config = PPOConfig().environment(Walk).callbacks(Reads).env_runners(num_env_runners=0)
    algo = config.training(train_batch_size=60, num_epochs=1).build()
    algo.train()
    result = algo.train()
    algo.stop()
    assert result["seen"] == result["episode_reward_mean"] == 5.0
    assert result["custom_metrics"]["mine"] == 5e-5
    assert result["timesteps_total"] == 120, "one train() is one batch"
    assert result["episodes_total"] == 24
    assert result["num_env_steps_sampled_this_iter"] == 60
    assert result["num_env_steps_trained_this_iter"] == 60
    assert result["hist_stats"]["episode_reward"] == [5.0] * 24
    assert result["hist_stats"]["episode_lengths"] == [5] * 24
    for block in ("sampler_results", "env_runners"):
        assert result[block]["episode_reward_max"] == 5.0
    learner = result["info"]["learner"]["default_policy"]
    assert learner["learner_stats"]["cur_lr"] == pytest.approx(5e-5)
    assert learner["learner_stats"]["total_loss"] == learner["total_loss"]
    assert result["info"]["num_env_steps_trained"] == result["counters"]["num_env_steps_trained"]


def test_results_are_written_where_rllib_writes_them(trained: Any, tmp_path: Path) -> None:
    trainer, _ = trained
    folder = Path(trainer.logdir)
    assert folder.parent == Path("~/ray_results").expanduser()
    assert folder.name.startswith("PPOTrainer_Walk_")
    assert {path.name for path in folder.iterdir()} >= {"result.json", "progress.csv"}
    assert list(folder.glob("events.out.tfevents.*"))
    creator = lambda config: SimpleNamespace(logdir=str(tmp_path / "own"))  # noqa: E731
    (tmp_path / "own").mkdir()
    algo = PPO(env=Walk, config=SMALL, logger_creator=creator)
    assert Path(algo.logdir) == tmp_path / "own"
    algo.stop()
    algo = PPO(env=Walk, config={**SMALL, "logger_config": {"logdir": str(tmp_path / "third")}})
    assert Path(algo.logdir) == tmp_path / "third"
    algo.stop()


# ---- methods ----------------------------------------------------------------------------------


def test_actions_are_sampled_unless_explore_is_false() -> None:
    algo = PPO(env=Walk, config=SMALL)
    observation = np.zeros(2, np.float32)
    assert {int(algo.compute_single_action(observation)) for _ in range(60)} == {0, 1}
    assert len({int(algo.compute_action(observation, explore=False)) for _ in range(20)}) == 1
    assert algo.compute_single_action(observation, full_fetch=True)[1:] == ([], {})
    actions = algo.compute_actions({"a": observation, "b": observation}, explore=False)
    assert set(actions) == {"a", "b"}
    policy = algo.get_policy()
    batch, state, info = policy.compute_actions([observation, observation])
    assert (len(batch), state, info, policy.get_initial_state()) == (2, [], {}, [])
    assert {int(one) for one in policy.compute_actions([observation] * 60)[0]} == {0, 1}
    assert len({*map(int, policy.compute_actions([observation] * 60, explore=False)[0])}) == 1
    assert {*map(int, algo.compute_actions([observation] * 60))} == {0, 1}
    assert isinstance(policy, polopt.Policy)
    assert policy.observation_space == Walk.observation_space
    algo.stop()
    given = PPO.DEFAULT_CONFIG.copy() | {**SMALL, "explore": False}
    before = given.to_dict()
    quiet = PPO(env=Walk, config=given)
    assert given == before, "a trainer does not change the config that it gets"
    assert "env" not in SMALL
    assert PPO.DEFAULT_CONFIG["env"] is None
    assert len({int(quiet.compute_single_action(observation)) for _ in range(20)}) == 1
    quiet.stop()


def test_memory_has_the_form_of_rllib() -> None:
    config = {**SMALL, "model": {"use_lstm": True, "lstm_cell_size": 4}}
    algo = PPO(env=Walk, config=config)
    state = algo.get_policy().get_initial_state()
    action, following, _ = algo.compute_single_action(np.zeros(2, np.float32), state)
    assert action in (0, 1)
    assert following[0].shape == state[0].shape
    again, _, _ = algo.get_policy().compute_single_action(np.zeros(2, np.float32), following)
    assert again in (0, 1)
    algo.stop()


def test_module_chooses_the_actions_of_the_policy(trained: Any) -> None:
    trainer, _ = trained
    module = trainer.get_module()
    out = module.forward_inference({"obs": torch.zeros(3, 2)})
    assert out["action_dist_inputs"].shape == (3, 2)
    best = out["action_dist_inputs"].argmax(1)
    assert (out["actions"] == best).all()
    dist = module.get_inference_action_dist_cls().from_logits(out["action_dist_inputs"])
    assert (dist.to_deterministic().sample() == best).all()
    assert dist.sample().shape == (3,)


def test_checkpoints_are_restored_by_path(trained: Any, tmp_path: Path) -> None:
    from polopt.rllib.core.rl_module.rl_module import RLModule  # type: ignore
    from polopt.rllib.policy.policy import Policy  # type: ignore

    trainer, first = trained
    saved = trainer.save(str(tmp_path / "saved"))
    assert saved == str(tmp_path / "saved") == saved.checkpoint.path
    other = Algorithm.from_checkpoint(saved)  # the class of the environment is known here
    assert isinstance(other, ppo.PPOTrainer)
    assert (other.iteration, other.config["env_config"]) == (1, {"length": 4})
    assert other.config["train_batch_size"] == 64
    np.testing.assert_array_equal(
        other.get_policy().get_weights().flat, trainer.get_policy().get_weights().flat
    )
    second = other.train()
    other.stop()
    assert second["training_iteration"] == 2
    for count in ("timesteps_total", "num_env_steps_sampled", "num_env_steps_trained"):
        assert second[count] == first[count] + 64, "counts go on"
    assert second["episodes_total"] > first["episodes_total"] + 10
    inner = tmp_path / "saved" / "learner_group" / "learner" / "rl_module" / "default_policy"
    rows = {"obs": torch.zeros(1, 2)}
    np.testing.assert_array_equal(
        RLModule.from_checkpoint(inner).forward_inference(rows)["action_dist_inputs"],
        trainer.get_module().forward_inference(rows)["action_dist_inputs"],
    )
    trainer.get_policy().export_checkpoint(tmp_path / "exported")
    policy = Policy.from_checkpoint(tmp_path / "exported")
    assert policy["default_policy"].compute_single_action(np.zeros(2, np.float32))[0] in (0, 1)


def test_checkpoint_of_another_process_keeps_its_options(tmp_path: Path) -> None:
    algo = dqn.DQNTrainer(
        env="CartPole-v1", config={"target_network_update_freq": 7, "learning_starts": 50}
    )
    saved = algo.save(str(tmp_path / "saved"))
    algo.stop()
    from polopt.rllib import algorithm

    algorithm._configs_of_checkpoints.clear()
    again = Algorithm.from_checkpoint(saved)
    assert type(again) is dqn.DQNTrainer
    assert again.experiment.policy.target_network_update_timesteps == 7
    assert again.config["target_network_update_freq"] == 7
    again.stop()


def test_workers_run_functions_with_environments(trained: Any) -> None:
    trainer, _ = trained
    assert trainer.workers.foreach_worker(lambda worker: worker.worker_index) == [0]
    trainer.workers.foreach_env(lambda env: setattr(env.unwrapped, "length", 9))
    assert trainer.workers.local_worker().foreach_env(lambda env: env.unwrapped.length) == [9]
    assert trainer.env_runner.env.unwrapped.length == 9
    assert trainer.workers.local_worker().get_policy().observation_space == Walk.observation_space
    with pytest.raises(AttributeError, match="Use foreach_worker"):
        trainer.workers.remote_workers()


def test_names_in_tune_are_those_of_rllib() -> None:
    rllib.register()
    for name, cls in TUNE_NAMES.items():
        assert get_trainable_cls(name) is algorithm_of(cls)
    from polopt.rllib.agents.registry import get_agent_class  # type: ignore

    assert get_agent_class("APEX") is algorithm_of("ApexDQN")
    with pytest.raises(ConfigError, match="algorithm 'ES': polopt has no evolution strategies"):
        get_agent_class("ES")
    assert a3c.DEFAULT_CONFIG["rollout_fragment_length"] == 10
    assert isinstance(PPO.get_default_config(), PPOConfig)
    assert ppo.PPOTrainer.get_default_config()["lr"] == 5e-5
