"""polopt's cases.

    python benchmarks/peers/polopt/run.py CASE [--seconds 5] [--seed 0]

Unless stated otherwise, a case has two workers, and MLPs of 64x64 tanh units for policy and value.
Environments are stepped one after another (`vectorization_mode: sync`), as in the peers.
CartPole-v1 has a faster vector implementation. polopt uses it by default, but among these cases
only `a3c-vector` uses it.
Hyper-parameters that affect speed are the same as in each peer's script:

- `a3c`, `a2c`: 8 environments per worker, 20 steps. `a3c-untrained` has a learning rate of almost
  0, so all runs have equally short episodes. Otherwise, runs with longer episodes would have fewer
  resets, which cost time.
- `ppo`: 2,048 rows per batch, 4 epochs of minibatches of 256. `ppo-wide`: 256x256
  units, and two threads for the gradient (the workers wait meanwhile).
- `dqn`: 8 environments per worker, 8 steps, a batch of 32 rows for 4 environment steps. Workers
  sample while the driver learns. Dueling networks and double Q-learning are off, because the peer
  has neither.
- `apex`, `apex-learned`: four samplers whose environments take 5 ms a step, and two replay shards.
  The learner learns from batches of 512 rows as fast as it can. `apex` measures the rate of
  environment steps, and `apex-learned` the rate of learned rows.
- `ddppo`: RLlib 0.8.5's defaults: 5 environments per worker, 100 steps, 10 epochs of minibatches of
  50 rows on each worker.
- `*-pendulum`, `*-halfcheetah`: the same settings on Pendulum-v1 and HalfCheetah-v5.
- `ppo-breakout`: the settings of `ppo` on MinAtar's Breakout, with the network of MinAtar's paper.
- `decoupled-ppo*`: decoupled PPO with `async_samples`, which samples while it learns. Samples are
  up to two batches old. Batches, epochs and minibatches are the same as in `ppo`.
- `async-samples*`: `async_samples` with the A2C policy. It samples as `a3c` does.
- `ppo-halfcheetah-evaluated`: evaluates two episodes after every ten batches (20,480 steps) between
  iterations. `-evaluated-beside`: an evaluation worker plays them during training.
- `*-ray`: calls through Ray instead of sockets. `ddppo*-gloo`: sums over gloo. `*-torch`:
  `fast_cpu: false`.
- `sample`: one worker in this process, 8 environments, 128 steps per fragment. It also computes
  values and advantages.
- `collect-sync`, `collect-async`: two collectors of 8 environments (`collectors_serving.py`).
- `pong-a3c`, `pong-ppo`: ALE/Pong-v5, 4 environments per worker, the network of Mnih et al. (2015),
  ale-py's vector environment. Fragments have 20 and 128 steps.
- `impala`, `appo`: 512 rows per batch, 2 x 8 environments, 32 steps, and the presets' lag bound.
  APPO has one epoch, as in RLlib and Sample Factory.
- `loop-*`: whole training loops in one process, with the settings of `peers/sb3/run.py`.
  `-one-core`: the process has one core. `-two-cores`: `num_cpus_for_driver` is 2.
- `learn-sac`: as in `peers/sb3/run.py`, with the settings of `loop-sac-two-cores`.
- Other `learn*`: a tuned example, up to a mean return of 475 (Acrobot-v1: -100). `*-uneven`: each
  step of the second worker's environments takes 1 ms longer.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
import ray
import yaml
from tasks import make_breakout

import polopt

EXAMPLES = Path(__file__).resolve().parents[3] / "tuned_examples"
LEARN = {
    "learn": "cartpole_ppo",
    "learn-appo": "cartpole_appo",
    "learn-decoupled-ppo": "cartpole_decoupled_ppo",
    "learn-impala": "cartpole_impala",
    "learn-acrobot": "acrobot_ppo",
    "learn-acrobot-appo": "acrobot_appo",
    "learn-acrobot-impala": "acrobot_impala",
}
UNEVEN = {f"{name}-uneven": example for name, example in LEARN.items()}
PACKAGES = ("ray", "torch", "gymnasium", "numpy")
CARTPOLE = {"env": "CartPole-v1", "vectorization_mode": "sync"}
PENDULUM = {"env": "Pendulum-v1", "vectorization_mode": "sync"}
HALF_CHEETAH = {"env": "HalfCheetah-v5", "vectorization_mode": "sync"}
BREAKOUT = {"env": lambda _: make_breakout(), "vectorization_mode": "sync"}
PPO: dict[str, Any] = {
    "rollout_fragment_length": 128,
    "lr": 3e-4,
    "entropy_coeff": 0.0,
    "num_sgd_iter": 4,
    "sgd_minibatch_size": 256,
}
DQN: dict[str, Any] = {
    "num_workers": 2,
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 8,
    "collection": "overlapped",
    "train_batch_size": 32,
    "training_intensity": 8.0,
    "dueling": False,
    "double_q": False,
}
APEX: dict[str, Any] = {
    "env": lambda context: Paced(),
    "num_workers": 4,
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 50,
    "num_replay_shards": 2,
    "train_batch_size": 512,
    "buffer_size": 100_000,
    "learning_starts": 2000,
    "training_intensity": 1e6,
    "error_buffer": 10**12,
    "prefetch_batches": 16,
    "n_step": 3,
    "dueling": False,
    "model": {"fcnet_hiddens": [256, 256]},
}
DDPPO: dict[str, Any] = {
    "rollout_fragment_length": 100,
    "num_sgd_iter": 10,
    "sgd_minibatch_size": 50,
    "lr": 5e-5,
    "lambda": 1.0,
    "clip_param": 0.3,
    "vf_clip_param": 10.0,
    "vf_loss_coeff": 1.0,
    "kl_coeff": 0.2,
    "entropy_coeff": 0.0,
    "grad_clip": None,
}
PONG: dict[str, Any] = {"env": "ale_py:ALE/Pong-v5", "num_envs_per_worker": 4}
PONG |= {"vectorization_mode": "vector_entry_point", "min_sample_timesteps_per_iteration": 1000}
DECOUPLED_PPO: dict[str, Any] = {
    **PPO,
    "optimizer": "async_samples",
    "policy": "decoupled_ppo",
    "num_envs_per_worker": 8,
    "train_batch_size": 2048,
    "max_rollout_lag": 2,
    "max_requests_in_flight_per_worker": 2,
}
LOOP: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 1,
    "learning_starts": 1000,
    "model": {"fcnet_hiddens": [256, 256]},
    "min_sample_timesteps_per_iteration": 1000,  # the default of the presets DQN, SAC and TD3
}
LOOPS: dict[str, dict[str, Any]] = {
    "dqn": {
        "env": "CartPole-v1",
        "optimizer": "sync_replay",
        "policy": "dqn",
        "train_batch_size": 128,
        "training_intensity": 32.0,
        "rollout_fragment_length": 4,
        "dueling": False,
        "double_q": False,
    },
    **{
        name: {
            **BREAKOUT,
            "optimizer": "sync_replay",
            "policy": "dqn",
            "train_batch_size": rows,
            "training_intensity": rows / 4,
            "rollout_fragment_length": 4,
            "buffer_size": 100_000,
            "dueling": False,
            "double_q": False,
            "model": {},
        }
        for name, rows in (("breakout", 32), ("breakout128", 128))
    },
    **{
        name: {
            "env": "HalfCheetah-v5",
            "optimizer": "sync_replay",
            "policy": name,
            "train_batch_size": 256,
            "training_intensity": 256.0,
            "rollout_fragment_length": 1,
            "min_sample_timesteps_per_iteration": 50,  # 1,000 steps would take seconds
        }
        for name in ("sac", "td3", "crossq")
    },
}
ASYNC_SAMPLES = {"optimizer": "async_samples", "policy": "a2c", "num_envs_per_worker": 8}
TRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "a3c": ("A3C", CARTPOLE),
    "a3c-untrained": ("A3C", {**CARTPOLE, "lr": 1e-9}),
    "a2c": ("A2C", CARTPOLE),
    "ppo": ("SyncPPO", {**CARTPOLE, **PPO}),
    "ppo-wide": (
        "SyncPPO",
        {**CARTPOLE, **PPO, "model": {"fcnet_hiddens": [256, 256]}, "num_cpus_for_driver": 2},
    ),
    "dqn": ("DQN", {**CARTPOLE, **DQN}),
    "apex": ("ApexDQN", APEX),
    "apex-learned": ("ApexDQN", APEX),
    "ddppo": ("DDPPO", {**CARTPOLE, "num_envs_per_worker": 5, **DDPPO}),
    "a3c-pendulum": ("A3C", PENDULUM),
    "ppo-pendulum": ("SyncPPO", {**PENDULUM, **PPO}),
    "a3c-halfcheetah": ("A3C", HALF_CHEETAH),
    "ppo-halfcheetah": ("SyncPPO", {**HALF_CHEETAH, **PPO}),
    "ppo-breakout": ("SyncPPO", {**BREAKOUT, **PPO}),
    "decoupled-ppo": ("PolicyOptimizerTrainer", {**CARTPOLE, **DECOUPLED_PPO}),
    "decoupled-ppo-halfcheetah": ("PolicyOptimizerTrainer", {**HALF_CHEETAH, **DECOUPLED_PPO}),
    "decoupled-ppo-breakout": ("PolicyOptimizerTrainer", {**BREAKOUT, **DECOUPLED_PPO}),
    "ddppo-halfcheetah": ("DDPPO", {**HALF_CHEETAH, "num_envs_per_worker": 5, **DDPPO}),
    "async-samples": ("PolicyOptimizerTrainer", {**CARTPOLE, **ASYNC_SAMPLES}),
    "async-samples-halfcheetah": ("PolicyOptimizerTrainer", {**HALF_CHEETAH, **ASYNC_SAMPLES}),
    "a3c-vector": (
        "A3C",
        {**CARTPOLE, "vectorization_mode": "vector_entry_point", "num_envs_per_worker": 64},
    ),
    "impala": ("IMPALA", {**CARTPOLE, "num_envs_per_worker": 8}),
    "appo": ("APPO", {**CARTPOLE, "num_envs_per_worker": 8}),
    "pong-a3c": ("A3C", {**PONG, "grads_per_step": 20}),  # a round takes seconds
    "pong-ppo": ("SyncPPO", {**PONG, **PPO}),
}
for name, options in LOOPS.items():
    for count, cores in ((1, "one-core"), (2, "two-cores")):
        TRAINING[f"loop-{name}-{cores}"] = (
            "PolicyOptimizerTrainer",
            {**CARTPOLE, **LOOP, **options, "num_cpus_for_driver": count},
        )
for workers, suffix in ((0, ""), (1, "-beside")):
    preset, options = TRAINING["ppo-halfcheetah"]
    TRAINING[f"ppo-halfcheetah-evaluated{suffix}"] = (
        preset,
        {
            **options,
            "min_sample_timesteps_per_iteration": 2048,
            "evaluation_interval": 10,
            "evaluation_duration": 2,
            "evaluation_num_workers": workers,
        },
    )
for name in ("a3c", "async-samples", "ddppo"):
    for case in (name, f"{name}-halfcheetah"):
        preset, options = TRAINING[case]
        TRAINING[f"{case}-ray"] = preset, {**options, "transport": "ray"}
        if name == "ddppo":
            TRAINING[f"{case}-gloo"] = preset, {**options, "backend": "gloo"}
for case in ("a3c", "ppo", "ddppo"):
    preset, options = TRAINING[case]
    TRAINING[f"{case}-torch"] = preset, {**options, "fast_cpu": False}


def start_ray() -> None:
    """Starts Ray on this machine."""
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        address="local",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training. With `apex-learned`, it measures the
    rows per second that the driver learned from."""
    preset, config = TRAINING[args.case]
    start_ray()
    trainer = getattr(polopt, preset)(config={"num_workers": 2, **config, "seed": args.seed})
    clock = measuring.RateClock(args.seconds, args.turns)
    learned = args.case == "apex-learned"
    over = False
    while not over:
        result = trainer.train()
        learned_rows = trainer.optimizer.metrics.num_updates * config.get("train_batch_size", 0)
        over = clock.tick(learned_rows if learned else result["num_env_steps_sampled_lifetime"])
    trainer.stop()
    return clock.result()


class Paced(gymnasium.Wrapper):
    """CartPole-v1 whose steps take at least 5 ms."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        """Sleeps, then steps."""
        time.sleep(0.005)
        return super().step(action)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second of one worker."""
    factory = polopt.GradientWorkerSet.create_factory(
        "CartPole-v1",
        "ppo",
        num_workers=0,
        rollout_fragment_length=128,
        num_envs_per_worker=8,
        vectorization_mode="sync",
        seed=args.seed,
    )
    worker = factory().local
    clock = measuring.RateClock(args.seconds, args.turns)
    steps = 0
    while not clock.tick(steps):
        steps += worker.sample().env_steps
    return clock.result()


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the frames per second of a Collector."""
    from collectors_serving import Polopt

    start_ray()
    sync = args.case == "collect-sync"
    made = {"env": "CartPole-v1", "envs": 8, "sync": sync, "frames": 2000}
    collecting = Polopt({**made, "options": {"vectorization_mode": "sync"}}, module=False)
    clock = measuring.RateClock(args.seconds, args.turns)
    frames = 0
    while not clock.tick(frames):
        frames += collecting.next()
    collecting.stop()
    return clock.result()


class SlowOfSecondWorker(gymnasium.Wrapper):
    """A wrapper in which steps of the second worker's environments take 1 ms longer."""

    def __init__(self, env: gymnasium.Env, worker_index: int) -> None:
        super().__init__(env)
        self._longer_s = 1e-3 if worker_index == 2 else 0.0

    def step(self, action: Any) -> Any:
        """Waits and then steps the environment."""
        if self._longer_s:
            time.sleep(self._longer_s)
        return super().step(action)


def make_uneven(context: Any) -> gymnasium.Env:
    """Makes the environment that the options name. It is slower in the second worker."""
    env = gymnasium.make(context["id"], disable_env_checker=True)
    return SlowOfSecondWorker(env, context.worker_index)


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until a task is solved."""
    name = {**LEARN, **UNEVEN}[args.case]
    example = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    task = example["config"]["env"]
    config = {**example["config"], "vectorization_mode": "sync", "seed": args.seed}
    if args.case in UNEVEN:
        config |= {"env": make_uneven, "env_config": {"id": task}}
    start_ray()
    # One result per update, so the clock sees when the goal is reached.
    config["min_sample_timesteps_per_iteration"] = 0
    trainer = getattr(polopt, example["run"])(config=config)
    clock = measuring.GoalClock(args.seconds, task)
    while True:
        result = trainer.train()
        mean = result["env_runners"]["episode_return_mean"]
        if clock.tick(result["num_env_steps_sampled_lifetime"], mean):
            break
    trainer.stop()
    return clock.result()


def learn_sac(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until HalfCheetah-v5 is solved."""
    preset, config = TRAINING["loop-sac-two-cores"]
    start_ray()
    starts = {"learning_starts": 5000, "random_timesteps": 5000}
    # An iteration has the steps of one episode.
    starts["min_sample_timesteps_per_iteration"] = 1000
    trainer = getattr(polopt, preset)(config={**config, **starts, "seed": args.seed})
    clock = measuring.GoalClock(args.seconds, "HalfCheetah-v5")
    returns: deque[float] = deque(maxlen=measuring.EPISODES_OF_SAC)
    over = False
    while not over:
        result = trainer.train()
        returns.append(result["env_runners"]["episode_return_mean_since_report"])
        mean = sum(returns) / len(returns) if len(returns) == returns.maxlen else None
        over = clock.tick(result["num_env_steps_sampled_lifetime"], mean)
    trainer.stop()
    return clock.result()


CASES = {
    **dict.fromkeys(TRAINING, train),
    "sample": sample,
    "collect-sync": collect,
    "collect-async": collect,
    **dict.fromkeys([*LEARN, *UNEVEN], learn),
    "learn-sac": learn_sac,
}

if __name__ == "__main__":
    measuring.main(__doc__, CASES, PACKAGES)
