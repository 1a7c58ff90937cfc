"""Scripts for RLlib in which only one import was changed, so that they use polopt.

The name of a script begins with the release of RLlib for which it is written. `CONFIGS` has the
config that the builder in each script must pass to a preset. `...` stands for any value.
"""

from __future__ import annotations

from typing import Any

SCRIPTS: dict[str, str] = {}
CONFIGS: dict[str, dict[str, Any]] = {}


def _script(name: str, source: str, **config: Any) -> None:
    SCRIPTS[name], CONFIGS[name] = source, config


# ---- RLlib 2.7 --------------------------------------------------------------------------------

_script(
    "2.7 a3c",
    """
from polopt.rllib import A3CConfig

config = A3CConfig()
config = config.training(lr=0.01, grad_clip=30.0)
config = config.resources(num_gpus=0)
config = config.rollouts(num_rollout_workers=4)
config = config.environment("CartPole-v1")
print(config.to_dict())
algo = config.build()
print(algo.train()["episode_reward_mean"])
algo.stop()
""",
    lr=0.01,
    grad_clip=30.0,
    num_gpus=0,
    num_workers=4,
    env="CartPole-v1",
)
_script(
    "2.7 a2c tune",
    """
from ray import air, tune
from polopt.rllib import A2CConfig

config = A2CConfig()
print(config.sample_async)
config = config.training(
    lr=tune.grid_search([0.001, 0.0001]), use_critic=True, use_gae=True, lambda_=1.0,
    lr_schedule=None, entropy_coeff=0.01, microbatch_size=None, train_batch_size=200,
)
config = config.rollouts(
    num_rollout_workers=2, num_envs_per_worker=5, rollout_fragment_length="auto",
    recreate_failed_workers=True, observation_filter="MeanStdFilter",
)
config = config.reporting(min_time_s_per_iteration=5)
config = config.environment(env="CartPole-v1")
tune.Tuner(
    "A2C",
    run_config=air.RunConfig(stop={"episode_reward_mean": 200}),
    param_space=config.to_dict(),
).fit()
""",
    **{"lambda": 1.0},
    lr={"grid_search": [0.001, 0.0001]},
    entropy_coeff=0.01,
    train_batch_size=200,
    microbatch_size=None,
    num_workers=2,
    num_envs_per_worker=5,
    rollout_fragment_length=20,
    normalize_observations=True,
    min_time_s_per_iteration=5,
    env="CartPole-v1",
)
_script(
    "2.7 ddppo",
    """
from polopt.rllib import DDPPOConfig

config = DDPPOConfig().training(
    lr=0.003, keep_local_weights_in_sync=True, torch_distributed_backend="gloo",
    train_batch_size=500, sgd_minibatch_size=50, num_sgd_iter=10, kl_coeff=0.0,
)
config = config.resources(num_gpus=0, num_gpus_per_worker=0)
config = config.rollouts(num_rollout_workers=2, num_envs_per_worker=5)
config = config.exploration(explore=True, exploration_config={"type": "StochasticSampling"})
algo = config.build(env="CartPole-v1")
for _ in range(2):
    result = algo.train()
    print(result["episode_reward_mean"], result["num_env_steps_sampled"])
print(algo.save().checkpoint.path)
algo.stop()
""",
    lr=0.003,
    keep_local_weights_in_sync=True,
    sgd_minibatch_size=50,
    num_sgd_iter=10,
    kl_coeff=0.0,
    num_gpus=0,
    num_gpus_per_worker=0,
    num_workers=2,
    num_envs_per_worker=5,
    rollout_fragment_length=100,
    env="CartPole-v1",
)
_script(
    "2.7 custom env",
    """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from ray import tune
from ray.tune.registry import register_env
from polopt.rllib import PPOConfig


class SimpleCorridor(gym.Env):
    def __init__(self, config):
        self.end_pos, self.cur_pos = config["corridor_length"], 0
        self.action_space = Discrete(2)
        self.observation_space = Box(0.0, self.end_pos, shape=(1,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        self.cur_pos = 0
        return np.array([self.cur_pos], np.float32), {}

    def step(self, action):
        self.cur_pos = max(0, self.cur_pos + (1 if action else -1))
        done = self.cur_pos >= self.end_pos
        return np.array([self.cur_pos], np.float32), 1.0 if done else -0.1, done, False, {}


register_env("corridor", lambda config: SimpleCorridor(config))
config = (
    PPOConfig()
    .environment("corridor", env_config={"corridor_length": 5})
    .framework("torch")
    .rollouts(num_rollout_workers=1)
    .training(model={"fcnet_hiddens": [64], "vf_share_layers": True}, lr=1e-3)
    .resources(num_gpus=0)
)
stop = {"training_iteration": 50, "timesteps_total": 100000, "episode_reward_mean": 0.1}
tuner = tune.Tuner("PPO", param_space=config)
tuner.fit()
""",
    env="corridor",
    env_config={"corridor_length": 5},
    num_workers=1,
    model={"fcnet_hiddens": [64], "vf_share_layers": True},
    lr=1e-3,
    num_gpus=0,
)
_script(
    "2.7 callbacks",
    """
from ray import tune
from polopt.rllib import DefaultCallbacks, PPOConfig


class MyCallbacks(DefaultCallbacks):
    def on_episode_end(self, *, worker, base_env, policies, episode, env_index, **kwargs):
        episode.custom_metrics["twice"] = 2.0 * episode.length
        print(episode.total_reward, policies["default_policy"])

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["callback_ok"] = True


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .rollouts(num_rollout_workers=1, enable_connectors=True)
    .reporting(keep_per_episode_custom_metrics=True)
    .callbacks(MyCallbacks)
    .evaluation(
        evaluation_num_workers=0, evaluation_interval=2, evaluation_duration=3,
        evaluation_config=PPOConfig.overrides(explore=False),
    )
    .debugging(log_level="ERROR", seed=1)
    .fault_tolerance(recreate_failed_workers=True)
)
results = tune.run("PPO", config=config, stop={"training_iteration": 2})
""",
    env="CartPole-v1",
    num_workers=1,
    evaluation_num_workers=0,
    evaluation_interval=2,
    evaluation_duration=3,
    evaluation_config={"explore": False},
    seed=1,
)

_script(
    "2.7 dqn",
    """
from polopt.rllib import DQNConfig

config = DQNConfig()
print(config.replay_buffer_config)
replay_config = config.replay_buffer_config
replay_config.update(
    {
        "capacity": 60000,
        "prioritized_replay_alpha": 0.5,
        "prioritized_replay_beta": 0.5,
        "prioritized_replay_eps": 3e-6,
    }
)
config.training(replay_buffer_config=replay_config, lr_schedule=[[1, 1e-3], [500, 5e-3]])
config.exploration(exploration_config={"final_epsilon": 0.01, "epsilon_timesteps": 5000})
config.resources(num_gpus=0).rollouts(num_rollout_workers=1).environment("CartPole-v1")
algo = config.build()
print(algo.train()["episode_reward_mean"])
algo.stop()
""",
    lr=[[1, 1e-3], [500, 5e-3]],
    buffer_size=60000,
    learning_starts=1000,
    prioritized_replay=True,
    prioritized_replay_alpha=0.5,
    prioritized_replay_beta=0.5,
    final_prioritized_replay_beta=0.5,
    prioritized_replay_eps=3e-6,
    per_worker_epsilon=False,
    epsilon=[[0, 1.0], [5000, 0.01]],
    num_gpus=0,
    num_workers=1,
    env="CartPole-v1",
)
_script(
    "2.7 apex",
    """
from ray import air, tune
from polopt.rllib import ApexDQNConfig

config = ApexDQNConfig()
replay_config = config.replay_buffer_config.copy()
replay_config.update(
    {
        "type": "MultiAgentPrioritizedReplayBuffer",
        "capacity": 100000,
        "prioritized_replay_alpha": 0.45,
        "no_local_replay_buffer": True,
        "num_replay_buffer_shards": 1,
        "replay_buffer_shards_colocated_with_driver": True,
        "worker_side_prioritization": True,
    }
)
config = config.training(
    replay_buffer_config=replay_config, num_steps_sampled_before_learning_starts=2000,
    train_batch_size=32, n_step=3, training_intensity=4, target_network_update_freq=1000,
    max_requests_in_flight_per_sampler_worker=2, timeout_s_sampler_manager=0.0,
)
config = config.exploration(exploration_config={"type": "PerWorkerEpsilonGreedy"})
config = config.reporting(min_time_s_per_iteration=1, min_sample_timesteps_per_iteration=1000)
config = config.resources(num_gpus=0).rollouts(num_rollout_workers=2, num_envs_per_worker=8)
config = config.environment("CartPole-v1")
tune.Tuner(
    "ApexDQN",
    run_config=air.RunConfig(stop={"episode_reward_mean": 150, "timesteps_total": 250000}),
    param_space=config.to_dict(),
).fit()
""",
    buffer_size=100000,
    learning_starts=2000,
    prioritized_replay=True,
    prioritized_replay_alpha=0.45,
    prioritized_replay_beta=0.4,
    final_prioritized_replay_beta=0.4,
    prioritized_replay_eps=1e-6,
    num_replay_shards=1,
    train_batch_size=32,
    n_step=3,
    training_intensity=4,
    target_network_update_timesteps=1000,
    max_requests_in_flight_per_worker=2,
    per_worker_epsilon=True,
    epsilon=[[0, 1.0], [10000, 0.05]],
    min_time_s_per_iteration=1,
    min_sample_timesteps_per_iteration=1000,
    num_gpus=0,
    num_workers=2,
    num_envs_per_worker=8,
    env="CartPole-v1",
)
_script(
    "2.7 sac",
    """
from polopt.rllib import DefaultCallbacks, SACConfig


class Returns(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["return"] = episode.total_reward


config = (
    SACConfig()
    .environment("Pendulum-v1")
    .training(
        gamma=0.9, train_batch_size=32, tau=0.005, target_entropy="auto", n_step=1,
        optimization_config={
            "actor_learning_rate": 3e-4, "critic_learning_rate": 5e-4,
            "entropy_learning_rate": 1e-4,
        },
        replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 10000},
        num_steps_sampled_before_learning_starts=256,
    )
    .rollouts(num_rollout_workers=0, rollout_fragment_length=1)
    .callbacks(Returns)
)
algo = config.build()
print(algo.train()["episode_reward_mean"])
algo.stop()
""",
    env="Pendulum-v1",
    gamma=0.9,
    train_batch_size=32,
    tau=0.005,
    target_entropy="auto",
    n_step=1,
    actor_lr=3e-4,
    critic_lr=5e-4,
    alpha_lr=1e-4,
    prioritized_replay=False,
    buffer_size=10000,
    learning_starts=256,
    num_workers=0,
    rollout_fragment_length=1,
)

# ---- RLlib 2.37 -------------------------------------------------------------------------------

_script(
    "2.37 ppo",
    """
from polopt.rllib import PPOConfig

config = (
    PPOConfig()
    .api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
    .environment("CartPole-v1")
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=1)
    .learners(num_learners=0, num_gpus_per_learner=0)
    .training(
        gamma=0.9, lr=0.0003, train_batch_size_per_learner=512, mini_batch_size_per_learner=128,
        num_sgd_iter=6, vf_loss_coeff=0.01, vf_clip_param=float("inf"), use_kl_loss=False,
    )
    .rl_module(
        model_config_dict={
            "fcnet_hiddens": [32], "fcnet_activation": "relu", "vf_share_layers": True,
        }
    )
    .evaluation(evaluation_num_env_runners=1, evaluation_interval=1,
        evaluation_parallel_to_training=True)
)
algo = config.build()
result = algo.train()
print(result["env_runners"]["episode_return_mean"])
print(algo.compute_single_action([0.0, 0.0, 0.0, 0.0]))
algo.stop()
""",
    env="CartPole-v1",
    num_workers=1,
    num_cpus_per_worker=1,
    num_gpus=0,
    gamma=0.9,
    lr=0.0003,
    train_batch_size=512,
    rollout_fragment_length=512,
    sgd_minibatch_size=128,
    num_sgd_iter=6,
    vf_loss_coeff=0.01,
    vf_clip_param=None,
    kl_coeff=0.0,
    model={"fcnet_hiddens": [32], "fcnet_activation": "relu", "vf_share_layers": True},
    evaluation_num_workers=1,
    evaluation_interval=1,
)
_script(
    "2.37 impala",
    """
from ray import tune
from polopt.rllib import IMPALAConfig

config = (
    IMPALAConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2, num_envs_per_env_runner=5, rollout_fragment_length=50)
    .training(lr=tune.loguniform(1e-4, 1e-2), train_batch_size=500, grad_clip=30.0,
        num_aggregation_workers=0, broadcast_interval=1, learner_queue_size=16)
    .resources(num_gpus=0)
)
tuner = tune.Tuner(
    "IMPALA",
    tune_config=tune.TuneConfig(num_samples=2, metric="episode_reward_mean", mode="max"),
    run_config=tune.RunConfig(stop={"num_env_steps_sampled_lifetime": 10000}),
    param_space=config,
)
results = tuner.fit()
""",
    env="CartPole-v1",
    num_workers=2,
    num_envs_per_worker=5,
    rollout_fragment_length=50,
    lr=...,
    train_batch_size=500,
    grad_clip=30.0,
    num_gpus=0,
)
_script(
    "2.37 appo",
    """
from polopt.rllib import APPOConfig

config = APPOConfig().training(
    lr=0.01, grad_clip=30.0, train_batch_size_per_learner=50, clip_param=0.3, use_kl_loss=False,
    entropy_coeff=[[0, 0.01], [100000, 0.0]],
)
config = config.environment(env="CartPole-v1").env_runners(num_env_runners=1)
config.update_from_dict({"gamma": 0.95, "num_envs_per_worker": 2})
algo = config.build()
algo.train()
path = algo.save()
algo.restore(path)
algo.stop()
""",
    lr=0.01,
    grad_clip=30.0,
    train_batch_size=50,
    rollout_fragment_length=50,
    clip_param=0.3,
    kl_coeff=0.0,
    entropy_coeff=[[0, 0.01], [100000, 0.0]],
    env="CartPole-v1",
    num_workers=1,
    gamma=0.95,
    num_envs_per_worker=2,
)
_script(
    "2.37 attributes",
    """
from polopt.rllib import PPOConfig

config = PPOConfig()
config.env = "CartPole-v1"
config.num_env_runners = 0
config["lambda"] = 0.9
config.lr = config.lr / 2
config.env_config["max_episode_steps"] = 100
frozen = config.copy(copy_frozen=True)
try:
    frozen.lr = 1.0
except AttributeError as error:
    print(error)
assert frozen.num_env_runners == frozen["num_workers"] == config.get("num_rollout_workers") == 0
algo = frozen.copy(copy_frozen=False).build()
algo.train()
algo.stop()
""",
    **{"lambda": 0.9},
    env="CartPole-v1",
    num_workers=0,
    lr=2.5e-5,
    env_config={"max_episode_steps": 100},
)
_script(
    "2.37 pbt",
    """
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from polopt.rllib import PPOConfig

pbt = PopulationBasedTraining(
    time_attr="time_total_s", perturbation_interval=120, resample_probability=0.25,
    hyperparam_mutations={"lr": [1e-3, 5e-4, 1e-4], "clip_param": lambda: 0.2},
)
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=1)
    .training(train_batch_size=4000, lr=1e-4, num_sgd_iter=tune.choice([10, 20]), kl_coeff=1.0)
)
tune.Tuner(
    "PPO",
    tune_config=tune.TuneConfig(
        metric="env_runners/episode_return_mean", mode="max", scheduler=pbt, num_samples=2
    ),
    param_space=config,
).fit()
""",
    env="CartPole-v1",
    num_workers=1,
    train_batch_size=4000,
    lr=1e-4,
    num_sgd_iter=...,
    kl_coeff=1.0,
)

_script(
    "2.37 dqn",
    """
import gymnasium as gym
from ray import tune
from ray.tune.registry import register_env
from polopt.rllib import DQNConfig

register_env("short", lambda config: gym.make("CartPole-v1", **config))
config = (
    DQNConfig()
    .environment("short", env_config={"max_episode_steps": 100})
    .env_runners(num_env_runners=1, num_envs_per_env_runner=4)
    .training(
        lr=tune.grid_search([0.0005, 0.001]), train_batch_size_per_learner=32,
        replay_buffer_config={
            "type": "PrioritizedEpisodeReplayBuffer", "capacity": 50000, "alpha": 0.6, "beta": 0.4,
        },
        n_step=3, double_q=True, dueling=True, num_atoms=1,
        epsilon=[(0, 1.0), (10000, 0.02)], target_network_update_freq=500,
    )
    .evaluation(
        evaluation_interval=1, evaluation_num_env_runners=0, evaluation_duration=3,
        evaluation_parallel_to_training=False,
    )
)
tune.Tuner("DQN", param_space=config).fit()
""",
    env="short",
    env_config={"max_episode_steps": 100},
    num_workers=1,
    num_envs_per_worker=4,
    lr={"grid_search": [0.0005, 0.001]},
    train_batch_size=32,
    prioritized_replay=True,
    buffer_size=50000,
    prioritized_replay_alpha=0.6,
    prioritized_replay_beta=0.4,
    final_prioritized_replay_beta=0.4,
    n_step=3,
    double_q=True,
    dueling=True,
    epsilon=[(0, 1.0), (10000, 0.02)],
    target_network_update_timesteps=500,
    evaluation_interval=1,
    evaluation_num_workers=0,
    evaluation_duration=3,
)

# ---- RLlib 2.60 -------------------------------------------------------------------------------

_script(
    "2.60 ppo",
    """
from polopt.rllib import DefaultModelConfig, PPOConfig

config = (
    PPOConfig()
    .environment("Pendulum-v1", clip_actions=True)
    .env_runners(num_env_runners=2, num_envs_per_env_runner=4, gym_env_vectorize_mode="async")
    .learners(num_learners=1)
    .training(lr=2e-4, gamma=0.95, lambda_=0.9, minibatch_size=256, num_epochs=8,
        train_batch_size_per_learner=2048, grad_clip=0.5, shuffle_batch_per_epoch=True)
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], use_lstm=False))
    .debugging(seed=7)
)
algo = config.build_algo()
for _ in range(2):
    result = algo.train()
    print(result["env_runners"]["episode_return_mean"])
checkpoint = algo.save_to_path()
algo.restore_from_path(checkpoint)
algo.stop()
""",
    **{"lambda": 0.9},
    env="Pendulum-v1",
    clip_actions=True,
    num_workers=2,
    num_envs_per_worker=4,
    vectorization_mode="async",
    lr=2e-4,
    gamma=0.95,
    sgd_minibatch_size=256,
    num_sgd_iter=8,
    train_batch_size=2048,
    grad_clip=0.5,
    model={"fcnet_hiddens": [64, 64]},
    seed=7,
)
_script(
    "2.60 tune",
    """
from ray import tune
from polopt.rllib import PPOConfig

config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=1)
    .training(lr=tune.grid_search([0.001, 0.0005]), num_epochs=4)
)
tuner = tune.Tuner(
    config.algo_class,
    param_space=config,
    run_config=tune.RunConfig(
        stop={"env_runners/episode_return_mean": 150.0},
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
    ),
)
results = tuner.fit()
""",
    env="CartPole-v1",
    num_workers=1,
    lr={"grid_search": [0.001, 0.0005]},
    num_sgd_iter=4,
)
_script(
    "2.60 callbacks",
    """
from polopt.rllib import PPOConfig, RLlibCallback


class Lengths(RLlibCallback):
    def on_episode_end(self, *, episode, metrics_logger, env_runner, env, env_index, rl_module,
            prev_episode_chunks=None, **kwargs):
        metrics_logger.log_value("length", len(episode), reduce="mean", window=10)
        metrics_logger.log_value("return", episode.get_return())


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .callbacks(Lengths)
    .training(train_batch_size_per_learner=256)
)
algo = config.build_algo()
print(algo.train()["env_runners"]["custom_metrics"]["length_mean"])
algo.stop()
""",
    env="CartPole-v1",
    num_workers=0,
    train_batch_size=256,
    rollout_fragment_length=256,
)
_script(
    "2.60 lambda callbacks",
    """
from polopt.rllib import APPOConfig

config = (
    APPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2, max_requests_in_flight_per_env_runner=2)
    .learners(num_learners=0, num_aggregator_actors_per_learner=2)
    .callbacks(on_train_result=lambda algorithm, result, **kw: result.update(mine=1))
)
algo = config.build_algo()
assert algo.train()
algo.stop()
""",
    env="CartPole-v1",
    num_workers=2,
    max_requests_in_flight_per_worker=2,
)
_script(
    "2.60 lstm",
    """
import gymnasium as gym
from polopt.rllib import PPOConfig


def make(config):
    return gym.make("CartPole-v1")


config = (
    PPOConfig()
    .environment(make)
    .env_runners(num_env_runners=1, rollout_fragment_length=64, batch_mode="truncate_episodes")
    .rl_module(model_config={"use_lstm": True, "lstm_cell_size": 64})
    .evaluation(evaluation_interval=3, evaluation_duration=5, evaluation_duration_unit="episodes")
    .fault_tolerance(restart_failed_env_runners=True)
    .reporting(metrics_num_episodes_for_smoothing=100)
)
algo = config.build_algo()
assert algo.train()
algo.stop()
""",
    env=...,
    num_workers=1,
    rollout_fragment_length=64,
    model={"fcnet_hiddens": [256, 256], "use_lstm": True, "lstm_cell_size": 64},
    evaluation_interval=3,
    evaluation_duration=5,
)

_script(
    "2.60 sac",
    """
from polopt.rllib import DefaultModelConfig, RLlibCallback, SACConfig


class Lengths(RLlibCallback):
    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("length", len(episode), window=10)


config = (
    SACConfig()
    .environment("Pendulum-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=1, rollout_fragment_length="auto")
    .learners(num_learners=0)
    .training(
        initial_alpha=1.001, actor_lr=2e-4, critic_lr=8e-4, alpha_lr=9e-4, lr=None,
        target_entropy="auto", n_step=3, tau=0.005, train_batch_size_per_learner=64,
        target_network_update_freq=1, num_steps_sampled_before_learning_starts=500,
        replay_buffer_config={
            "type": "PrioritizedEpisodeReplayBuffer", "capacity": 100000, "alpha": 1.0, "beta": 0.0,
        },
    )
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="relu"))
    .reporting(min_sample_timesteps_per_iteration=600)
    .evaluation(evaluation_interval=1, evaluation_duration=2)
    .callbacks(Lengths)
)
algo = config.build_algo()
result = algo.train()
print(result["env_runners"]["episode_return_mean"])
algo.stop()
""",
    env="Pendulum-v1",
    num_workers=0,
    num_envs_per_worker=1,
    initial_alpha=1.001,
    actor_lr=2e-4,
    critic_lr=8e-4,
    alpha_lr=9e-4,
    target_entropy="auto",
    n_step=3,
    tau=0.005,
    train_batch_size=64,
    target_network_update_timesteps=1,
    learning_starts=500,
    prioritized_replay=True,
    buffer_size=100000,
    prioritized_replay_alpha=1.0,
    prioritized_replay_beta=0.0,
    final_prioritized_replay_beta=0.0,
    model={"fcnet_hiddens": [32]},
    min_sample_timesteps_per_iteration=600,
    evaluation_interval=1,
    evaluation_duration=2,
)

#: Expressions that polopt refuses, such as features that it does not have and misspelled keys, with
#: a part of each error message.
REFUSED = {
    "PPOConfig().multi_agent(policies=7)": "policies=7. Allowed: names, or a dict from names to",
    "PPOConfig().multi_agent(policies={'a': 7})": "policy 'a': got 7. Allowed: None, PolicySpec",
    "PPOConfig().multi_agent(policies={'a': PolicySpec(int)})": "got the policy class <class 'in",
    "PPOConfig().multi_agent(policies={'a': {'vtrace': False}})": "policy 'a': key 'vtrace'",
    "PPOConfig().multi_agent(policies_to_train=print)": "Allowed: a list of names, or None for all",
    "PPOConfig().multi_agent(observation_fn=print)": "to change what agents observe, wrap the env",
    "PPOConfig().multi_agent(policy_mapping_fn=lambda agent, episode, more: 'a')": (
        "requires the argument 'more'. Allowed: (agent_id, episode, worker, **kwargs)"
    ),
    "PPOConfig().multi_agent(algorithm_config_overrides_per_module={'a': {}}).validate()": (
        "needs the names of the policies in policies"
    ),
    "PPOConfig().multi_agent(policies=['b'], algorithm_config_overrides_per_module={'a': {}})"
    ".validate()": "unknown policy 'a'. Allowed: 'b'",
    "PPOConfig().multi_agent(policies={'a': PolicySpec('random')}).validate()": "and cannot learn",
    "PPOConfig.from_dict({'multiagent': 7})": "multiagent=7. Allowed: a dict",
    "PPOConfig().rl_module(rl_module_spec=RLModuleSpec(int))": "polopt has no RLModules",
    "PPOConfig().rl_module(rl_module_spec=MultiRLModuleSpec({}, int))": "networks that policies sh",
    "PPOConfig().rl_module(rl_module_spec=RLModuleSpec(load_state_path='a'))": "load_rl_module(pa",
    "PPOConfig().env_runners(env_to_module_connector=print)": "polopt has no connectors: wrap the",
    "PPOConfig().offline_data(input_='/tmp/out')": "polopt has no offline data",
    "PPOConfig().training(learner_class=int)": "to change the loss, write a policy",
    "PPOConfig().training(model={'use_attention': True}).environment('CartPole-v1').validate()": (
        "'use_lstm' is the only kind of memory"
    ),
    "PPOConfig().evaluation(evaluation_duration_unit='timesteps')": "whole episodes",
    "A3CConfig().training(clip_param=0.2)": "is an option of policy",
    "DQNConfig().training(replay_buffer_config={'storage_unit': 'sequences'})": (
        "key 'storage_unit': got 'sequences'. Allowed: 'timesteps'. Instead: optimizer 'sync_repl"
    ),
    "DQNConfig().training(replay_buffer_config={'type': 'ReservoirReplayBuffer'})": (
        "key 'type': got 'ReservoirReplayBuffer'. Allowed: EpisodeReplayBuffer, ReplayBuffer, "
    ),
    "SACConfig().training(replay_buffer_config={'batch_size_B': 8})": "Instead: train_batch_size",
    "SACConfig().training(replay_buffer_config={'capcity': 8})": "did you mean 'capacity'",
    "SACConfig().training(replay_buffer_config=8)": "replay_buffer_config=8. Allowed: a dict",
    "ApexDQNConfig().training(replay_buffer_config={'worker_side_prioritization': False})": (
        "Instead: DQN, whose driver computes priorities"
    ),
    "DQNConfig().exploration(exploration_config={'type': 'SoftQ'})": (
        "key 'type': got 'SoftQ'. Allowed: EpsilonGreedy, PerWorkerEpsilonGreedy"
    ),
    "DQNConfig().exploration(exploration_config={'initial_epsilo': 1})": "mean 'initial_epsilon'",
    "PPOConfig().exploration_config.update(type='Random')": "Allowed: {} or {'type': 'Stochastic",
    "SACConfig().training(n_step=(5, 2)).environment('Pendulum-v1').validate()": "[FEWEST, MOST]",
    "SACConfig().training(optimization_config={'actor_lr': 1})": "Allowed: actor_learning_rate, ",
    "PPOConfig().training(replay_buffer_config={'capacity': 8})": "For 'replay_buffer_config' of",
    "A2CConfig().training(use_kl_loss=True).validate()": "has no KL loss",
    "PPOConfig().training(optimizer={'eps': 1}).validate()": "torch_optimizer, adam_epsilon",
    "PPOConfig().env_runners(observation_filter='Own').validate()": "normalize_observations=True",
}
