"""RLlib 2.60 on its new API stack.

    python benchmarks/peers/rllib/run.py CASE [--seconds 5] [--seed 0]

Unless stated otherwise, a case has two EnvRunners in their own processes and a learner in the
driver. On two cores, this is faster than a learner in another process. Policy and value have
separate MLPs of 64x64 tanh units. Gymnasium's checker is off. RLlib returns one result per update,
its fastest setting.

- `sample`: one SingleAgentEnvRunner in this process, 8 environments, 128 steps of each per sample.
- `ppo`, `ppo-pendulum`: 8 environments per runner, 2,048 rows per batch, 4 epochs of minibatches of
  256. The KL penalty is off, because it costs a little time. RLlib adds a masked row at the end of
  each episode and fragment, so an update has 33 to 36 minibatches instead of 32.
- `ppo-halfcheetah`, `ppo-breakout`: the settings of `ppo` on other tasks. On HalfCheetah-v5, the
  standard deviations do not depend on the observation. On MinAtar's Breakout, the network is the
  CNN of MinAtar's paper. This CNN is an RLModule of this file, in which policy and value share the
  hidden layer. RLlib's own networks would need twice the work, because they do not share this
  layer. Images of bool become float32 in the network.
- `pong-ppo`: ALE/Pong-v5, 4 environments per runner, 1,024 rows per batch. The network of Mnih et
  al. (2015) reads four grey frames of 84x84. As in polopt, the environment is ale-py's vector
  environment. Its uint8 images are converted to the format of RLlib's networks.
- `impala`, `appo`: the same runners, fragments of 32 steps, 512 rows per batch, one epoch.
- `learn`: RLlib's tuned example for CartPole-v1 (`cartpole_ppo.py`), two runners of 8 environments.
  `learn-impala`, `learn-appo`: RLlib's examples for IMPALA and APPO, `*-8` with 8 environments per
  runner. `*-acrobot`: the same settings on Acrobot-v1, for which RLlib does not have an example.
- `result-simple-spread`: the mean return on `simple_spread` at a budget, with one shared policy and
  the settings of `MPE_PPO` in `benchmarks/results.py`, but without normalisation. One process.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import ray
import tasks
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env

NATURE = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
MLP = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
GAUSSIAN = replace(MLP, free_log_std=True)
CNN = DefaultModelConfig(
    conv_filters=NATURE,
    conv_activation="relu",
    head_fcnet_hiddens=[512],
    head_fcnet_activation="relu",
    vf_share_layers=True,
)


class MinAtarCNN(TorchRLModule, ValueFunctionAPI):
    """The convolution and the hidden layer of MinAtar's paper (Young and Tian, 2019), shared by
    policy and value."""

    def setup(self) -> None:
        """Makes the layers."""
        height, width, channels = self.observation_space.shape
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 16, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * (height - 2) * (width - 2), 128),
            torch.nn.ReLU(),
        )
        self.policy_head = torch.nn.Linear(128, int(self.action_space.n))
        self.value_head = torch.nn.Linear(128, 1)

    def _features(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layers(batch[Columns.OBS].float().permute(0, 3, 1, 2))

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy_head(self._features(batch))}

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        features = self._features(batch)
        logits = self.policy_head(features)
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        """Returns values `[B]`."""
        features = self._features(batch) if embeddings is None else embeddings
        return self.value_head(features).squeeze(-1)


def base(env: str, envs: int, seed: int, **env_config: Any) -> PPOConfig:
    """Returns a config with two runners, and the learner in this process."""
    return (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=envs)
        .learners(num_learners=0)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
        .debugging(seed=seed, log_level="ERROR")
    )


def with_shared(config: PPOConfig, rows: int, model: DefaultModelConfig | None) -> PPOConfig:
    """Sets the hyper-parameters of the PPO cases, except `learn`. If `model` is None, uses
    `MinAtarCNN`."""
    config.training(
        train_batch_size_per_learner=rows,
        minibatch_size=256,
        num_epochs=4,
        lr=3e-4,
        lambda_=0.95,
        clip_param=0.2,
        vf_clip_param=float("inf"),
        grad_clip=0.5,
        use_kl_loss=False,
    )
    if model is None:
        return config.rl_module(rl_module_spec=RLModuleSpec(module_class=MinAtarCNN))
    return config.rl_module(model_config=model)


def start_ray() -> None:
    """Starts Ray on this machine."""
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        address="local",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def make_pong(context: Any) -> Any:
    """Makes ale-py's vector environment with images in the format of RLlib's networks: floats,
    channels last."""
    import ale_py  # noqa: F401  # registers the environments
    import gymnasium
    import numpy as np
    from gymnasium.wrappers.vector import TransformObservation

    def transformed(obs: Any) -> Any:
        return np.ascontiguousarray(obs.transpose(0, 2, 3, 1), dtype=np.float32) / 255.0

    envs = gymnasium.make_vec(
        "ALE/Pong-v5", context["num_envs"], vectorization_mode="vector_entry_point"
    )
    one = gymnasium.spaces.Box(0.0, 1.0, (84, 84, 4), np.float32)
    space = gymnasium.vector.utils.batch_space(one, context["num_envs"])
    return TransformObservation(envs, transformed, space, one)


#: Environment and network of the cases of PPO. None stands for `MinAtarCNN`.
PPO_TASKS: dict[str, tuple[str, DefaultModelConfig | None]] = {
    "ppo": ("CartPole-v1", MLP),
    "ppo-pendulum": ("Pendulum-v1", MLP),
    "ppo-halfcheetah": ("HalfCheetah-v5", GAUSSIAN),
    "ppo-breakout": ("breakout", None),
}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training."""
    start_ray()
    if args.case == "pong-ppo":
        register_env("pong", make_pong)
        config = base("pong", 4, args.seed).env_runners(
            gym_env_vectorize_mode="vector_entry_point", sample_timeout_s=600
        )
        config = with_shared(config, 1024, CNN)
    else:
        ray.cloudpickle.register_pickle_by_value(tasks)  # because workers cannot import this module
        register_env("breakout", lambda context: tasks.make_breakout(**context))
        env, model = PPO_TASKS[args.case]
        config = with_shared(base(env, 8, args.seed, disable_env_checker=True), 2048, model)
    algorithm = config.build_algo()
    clock = measuring.RateClock(args.seconds)
    while not clock.tick(steps_of(algorithm.train())):
        pass
    algorithm.stop()
    return clock.result()


def steps_of(result: dict[str, Any]) -> int:
    """Returns the environment steps since the start. The first results of IMPALA and APPO may lack
    this number."""
    return int(result["env_runners"].get("num_env_steps_sampled_lifetime", 0))


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second of one runner."""
    config = base("CartPole-v1", 8, args.seed, disable_env_checker=True)
    runner = SingleAgentEnvRunner(config=with_shared(config, 2048, MLP), worker_index=1)
    clock = measuring.RateClock(args.seconds)
    steps = 0
    while not clock.tick(steps):
        episodes = runner.sample(num_timesteps=8 * 128, random_actions=False)
        steps += sum(len(episode) for episode in episodes)
        runner.get_metrics()  # otherwise they accumulate
    runner.stop()
    return clock.result()


def base_async(algorithm: str, env: str, envs: int, seed: int) -> Any:
    """Returns a config like `base`, but for IMPALA or APPO, and without an aggregation process."""
    config: Any = IMPALAConfig() if algorithm == "impala" else APPOConfig()
    return (
        config.environment(env, disable_env_checking=True)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=envs)
        .learners(num_learners=0, num_aggregator_actors_per_learner=0)
        .reporting(
            min_time_s_per_iteration=0,
            min_sample_timesteps_per_iteration=0,
            metrics_num_episodes_for_smoothing=measuring.EPISODES,
        )
        .debugging(seed=seed, log_level="ERROR")
    )


def train_async(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second of IMPALA and APPO in training."""
    start_ray()
    config = base_async(args.case, "CartPole-v1", 8, args.seed)
    config.env_runners(rollout_fragment_length=32)
    config.training(train_batch_size_per_learner=512).rl_module(model_config=MLP)
    algorithm = config.build_algo()
    clock = measuring.RateClock(args.seconds)
    while not clock.tick(steps_of(algorithm.train())):
        pass
    algorithm.stop()
    return clock.result()


def learn_async(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until IMPALA or APPO solves a task, with the settings of its example."""
    start_ray()
    name = args.case.split("-")
    env = "Acrobot-v1" if "acrobot" in name else "CartPole-v1"
    config = base_async(name[1], env, 8 if "8" in name else 1, args.seed)
    config.rl_module(model_config=DefaultModelConfig(vf_share_layers=True))
    config.training(vf_loss_coeff=0.05, entropy_coeff=0.0)
    if name[1] == "impala":
        config.training(train_batch_size_per_learner=500, grad_clip=40.0, lr=5e-4)
    else:
        config.training(circular_buffer_iterations_per_batch=2)
    algorithm = config.build_algo()
    clock = measuring.GoalClock(args.seconds, env)
    while True:
        result = algorithm.train()
        if clock.tick(steps_of(result), result["env_runners"].get("episode_return_mean")):
            break
    algorithm.stop()
    return clock.result()


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until CartPole-v1 is solved."""
    start_ray()
    config = (
        base("CartPole-v1", 8, args.seed, disable_env_checker=True)
        .training(lr=3e-4, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True
            )
        )
        .reporting(metrics_num_episodes_for_smoothing=measuring.EPISODES)
    )
    algorithm = config.build_algo()
    clock = measuring.GoalClock(args.seconds)
    while True:
        result = algorithm.train()
        if clock.tick(steps_of(result), result["env_runners"].get("episode_return_mean")):
            break
    algorithm.stop()
    return clock.result()


def reach_budget(args: argparse.Namespace) -> dict[str, Any]:
    """Records the learning curve on `simple_spread` up to `--env-steps`."""
    from mpe2 import simple_spread_v3
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

    start_ray()
    register_env("spread", lambda _: ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
    model = DefaultModelConfig(
        fcnet_hiddens=[128, 128], fcnet_activation="tanh", vf_share_layers=False
    )
    config = with_shared(base("spread", 16, args.seed), 1600, model)
    config.env_runners(num_env_runners=0, rollout_fragment_length=100)
    config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
    config.training(num_epochs=5, minibatch_size=480, gamma=0.9, entropy_coeff=0.01)
    config.training(lr=[[0, 1e-3], [args.env_steps, 1e-4]])
    config.reporting(metrics_num_episodes_for_smoothing=measuring.EPISODES)
    algorithm = config.build_algo()
    clock = measuring.BudgetClock(args.env_steps)
    while True:
        result = algorithm.train()
        if clock.tick(steps_of(result), result["env_runners"].get("episode_return_mean")):
            break
    algorithm.stop()
    return clock.result()


CASES = {
    "sample": sample,
    **dict.fromkeys([*PPO_TASKS, "pong-ppo"], train),
    "learn": learn,
    "result-simple-spread": reach_budget,
    "impala": train_async,
    "appo": train_async,
    **{
        f"learn-{algorithm}{env}{envs}": learn_async
        for algorithm in ("impala", "appo")
        for env in ("", "-acrobot")
        for envs in ("", "-8")
    },
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("ray", "torch", "gymnasium", "numpy"))
