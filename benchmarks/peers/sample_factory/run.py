"""Sample Factory's APPO.

    python benchmarks/peers/sample_factory/run.py CASE [--seconds 5] [--seed 0]

All cases have two rollout workers, one policy worker and one learner, each in an asynchronous
process. Each rollout worker has two groups of environments. One group steps while the policy acts
for the other group. The cases use one epoch and do not use recurrence, V-trace or normalisation.
Sample Factory does not write files while the clock runs. Batch and rollout have Sample Factory's
default sizes (1,024 rows, 32 steps), which are faster than the sizes of polopt's fragments.
Environments step in their own processes, so only steps from which the learner learned are counted.

- `appo-8`, `appo-10`: CartPole-v1. The number is the number of environments per worker. Policy and
  value have MLPs of 64x64 tanh units. Gymnasium's checker is off. The faster case counts.
- `learn`, `learn-acrobot`: seconds until CartPole-v1 and Acrobot-v1 are solved, with 8 environments
  per worker. Other settings are the defaults. V-trace is on (`learn-vtrace*`) or off.
- `ppo-8-*`, `ppo-10-*`: the number is the number of environments per worker. 2,048 rows per batch,
  rollouts of 128 steps, 4 epochs of shuffled minibatches of 256. Sample Factory samples while it
  learns, so rows may come from earlier weights. The faster case counts. These cases run
  HalfCheetah-v4, because the releases of Gymnasium that Sample Factory supports do not have
  HalfCheetah-v5. Model, observations and rewards of the two versions are the same. Standard
  deviations do not depend on the observation. On MinAtar's Breakout, policy and value share the CNN
  of MinAtar's paper. Workers send images of bool, which become float32 before the network.
- `pong`: ALE/Pong-v5, 4 environments per worker. Policy and value share the network of Mnih et al.
  (2015), which reads four grey frames of 84x84. Gymnasium preprocesses the frames, because the
  supported releases do not have ale-py's vector environment. Steps are not multiplied by the number
  of skipped frames.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
import torch
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from sample_factory.train import make_runner
from tasks import BREAKOUT, make_breakout

FOREVER = 10**10
#: Options of the cases `ppo-*`.
PPO = {
    "batch_size": 256,  # rows of a minibatch
    "num_batches_per_epoch": 8,
    "num_epochs": 4,
    "rollout": 128,
    "shuffle_minibatches": True,
    "learning_rate": 3e-4,
    "ppo_clip_ratio": 0.2,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.0,
    "adaptive_stddev": False,
}


class Ticks(AlgoObserver):
    """Reports each training iteration to a clock and ends the run when the clock is done."""

    def __init__(self, seconds: float, task: str) -> None:
        self._clock: measuring.RateClock | measuring.GoalClock | None = None
        self._seconds = seconds
        self._task = task  # task to solve, or empty if the rate is measured
        self.result: dict[str, Any] = {}

    def on_start(self, runner: Any) -> None:
        """Called when everything is built."""
        if self._task:
            self._clock = measuring.GoalClock(self._seconds, self._task)
        else:
            self._clock = measuring.RateClock(self._seconds)

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        """Called after each update."""
        steps = sum(runner.env_steps.values())
        if isinstance(self._clock, measuring.GoalClock):
            returns = runner.policy_avg_stats.get("reward", [[]])[0]
            enough = len(returns) >= measuring.EPISODES
            ended = self._clock.tick(steps, sum(returns) / len(returns) if enough else None)
        else:
            assert self._clock is not None
            ended = self._clock.tick(steps)
        if ended and not self.result:
            self.result = self._clock.result()
            runner.event_loop.stop()


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Makes an environment of Gymnasium."""
    make = make_breakout if name == BREAKOUT else partial(gymnasium.make, name)
    return make(disable_env_checker=True)


def make_pong(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Makes ALE/Pong-v5 with observations `[4, 84, 84]`. The releases of Gymnasium that Sample
    Factory supports do not have an id for this environment."""
    from ale_py.env import AtariEnv
    from gymnasium.wrappers import AtariPreprocessing, FrameStack, TimeLimit
    from sample_factory.envs.env_wrappers import NumpyObsWrapper

    game = AtariEnv("pong", frameskip=1, repeat_action_probability=0.25)
    return NumpyObsWrapper(FrameStack(TimeLimit(AtariPreprocessing(game), 27_000), 4))


class MinAtarCNN(Encoder):
    """The convolution and the hidden layer of MinAtar's paper (Young and Tian, 2019)."""

    def __init__(self, cfg: Any, obs_space: Any) -> None:
        super().__init__(cfg)
        height, width, channels = obs_space["obs"].shape
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 16, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * (height - 2) * (width - 2), 128),
            torch.nn.ReLU(),
        )
        self.layers = torch.jit.script(layers)  # as in Sample Factory's own encoders

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the features `[B, 128]` of images `[B, H, W, C]`."""
        return self.layers(obs["obs"].permute(0, 3, 1, 2))

    def get_out_size(self) -> int:
        """Returns the number of features."""
        return 128


TASKS = {
    "pong": "pong",
    "acrobot": "Acrobot-v1",
    "halfcheetah": "HalfCheetah-v4",
    "breakout": BREAKOUT,
}


def task_of(case: str) -> str:
    """Returns the name of the environment of a case."""
    return next((TASKS[word] for word in case.split("-") if word in TASKS), "CartPole-v1")


def config_of(case: str, seed: int, folder: str) -> Any:
    """Returns the configuration of a case."""
    options = {
        "algo": "APPO",
        "env": task_of(case),
        "experiment": "bench",
        "train_dir": folder,
        "device": "cpu",
        "seed": seed,
        "num_workers": 2,
        "num_envs_per_worker": 4 if case == "pong" else 10 if "10" in case else 8,
        "worker_num_splits": 2,
        "use_rnn": False,
        "recurrence": 1,
        "with_vtrace": "vtrace" in case,
        "normalize_input": False,
        "normalize_returns": False,
        "train_for_env_steps": FOREVER,
        "train_for_seconds": FOREVER,
        "save_every_sec": FOREVER,
        "experiment_summaries_interval": FOREVER,
        # The default pins each worker to a core of the whole machine.
        "set_workers_cpu_affinity": False,
    }
    if case.startswith("ppo"):
        options |= PPO
    if case == "pong":
        options |= {
            "encoder_conv_architecture": "convnet_atari",
            "nonlinearity": "relu",
            "obs_scale": 255.0,
        }
    elif task_of(case) != BREAKOUT:
        options |= {"actor_critic_share_weights": False, "nonlinearity": "tanh"}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    if task_of(case) not in ("pong", BREAKOUT):
        arguments += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv=arguments)
    return parse_full_cfg(parser, arguments)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training, or the seconds until a task is
    solved."""
    register_env(task_of(args.case), make_pong if args.case == "pong" else make_env)
    if task_of(args.case) == BREAKOUT:
        global_model_factory().register_encoder_factory(MinAtarCNN)
    learns = args.case.startswith("learn")
    ticks = Ticks(args.seconds, task_of(args.case) if learns else "")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        _, runner = make_runner(config_of(args.case, args.seed, folder))
        runner.register_observer(ticks)
        runner.init()
        runner.run()
        # The learner process of version 2.1.1 sometimes does not end, and the parent waits for it.
        for process in multiprocessing.active_children():
            process.kill()
    if not ticks.result:
        raise RuntimeError("Sample Factory ended before the measurement did")
    return ticks.result


LEARN = ("learn", "learn-vtrace", "learn-acrobot", "learn-vtrace-acrobot")
PPO_RATES = [f"ppo-{envs}-{task}" for task in ("halfcheetah", "breakout") for envs in (8, 10)]
RATES = ("appo-8", "appo-10", "pong", *PPO_RATES)
CASES = dict.fromkeys((*RATES, *LEARN), train)

if __name__ == "__main__":
    packages = ("sample-factory", "torch", "gymnasium", "ale-py", "numpy")
    measuring.main(__doc__, CASES, packages)
