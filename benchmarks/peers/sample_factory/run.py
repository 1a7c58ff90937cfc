"""Sample Factory's APPO.

    python benchmarks/peers/sample_factory/run.py CASE [--seconds 5] [--seed 0]

Two rollout workers, one policy worker and one learner, each an asynchronous process. Each rollout
worker has two groups of environments, one of which steps while the policy acts for the other. No
recurrence, no V-trace, one epoch, no normalisation, and nothing is written while the clock runs.
Batch and rollout are its defaults (1,024 rows, 32 steps), which are faster than polopt's fragments.
Environments step in processes of their own, so only steps that were learned are counted.

- `appo-8`, `appo-10`: CartPole-v1, environments per worker. MLPs of 64x64 tanh units for policy
  and value. Gymnasium's checker off. The faster case counts.
- `learn`, `learn-acrobot`: seconds until CartPole-v1 and Acrobot-v1 are solved, 8 environments per
  worker. Its defaults but for the above, V-trace on (`learn-vtrace*`) or off.
- `ppo-8-*`, `ppo-10-*`: environments per worker. 2,048 rows per batch, rollouts of 128 steps, 4
  epochs of shuffled minibatches of 256. It samples while it learns, so that rows may be of earlier
  weights. The faster case counts. On HalfCheetah-v4, because the releases of Gymnasium that it
  supports have no HalfCheetah-v5. Model, observations and rewards are the same. Standard deviations
  do not depend on the observation. On MinAtar's Breakout: the CNN of MinAtar's paper, shared by
  policy and value. Images of bool are sent as such and become float32 before the network.
- `pong`: ALE/Pong-v5, 4 environments per worker, the network of Mnih et al. (2015), shared by
  policy and value, over four grey frames of 84x84. Gymnasium's preprocessing: the releases that it
  supports have no vector environment of ale-py. Steps are not multiplied by the frames skipped.
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
#: Of the cases `ppo-*`.
PPO = {
    "batch_size": 256,  # of a minibatch
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
        self._task = task  # to be solved. Empty: the rate is measured
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
    """An environment of Gymnasium."""
    make = make_breakout if name == BREAKOUT else partial(gymnasium.make, name)
    return make(disable_env_checker=True)


def make_pong(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """ALE/Pong-v5, `[4, 84, 84]`. These releases have no registered name for it."""
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
        self.layers = torch.jit.script(layers)  # as in Sample Factory's own

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Features `[B, 128]` of images `[B, H, W, C]`."""
        return self.layers(obs["obs"].permute(0, 3, 1, 2))

    def get_out_size(self) -> int:
        """Number of features."""
        return 128


TASKS = {
    "pong": "pong",
    "acrobot": "Acrobot-v1",
    "halfcheetah": "HalfCheetah-v4",
    "breakout": BREAKOUT,
}


def task_of(case: str) -> str:
    """Name of a case's environment."""
    return next((TASKS[word] for word in case.split("-") if word in TASKS), "CartPole-v1")


def config_of(case: str, seed: int, folder: str) -> Any:
    """Configuration of a case."""
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
    """Environment steps per second in training, or seconds until a task is solved."""
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
        # Its learner process sometimes does not end (2.1.1), and the parent waits for it.
        for process in multiprocessing.active_children():
            process.kill()
    if not ticks.result:
        raise RuntimeError("it ended before it was measured")
    return ticks.result


LEARN = ("learn", "learn-vtrace", "learn-acrobot", "learn-vtrace-acrobot")
PPO_RATES = [f"ppo-{envs}-{task}" for task in ("halfcheetah", "breakout") for envs in (8, 10)]
RATES = ("appo-8", "appo-10", "pong", *PPO_RATES)
CASES = dict.fromkeys((*RATES, *LEARN), train)

if __name__ == "__main__":
    packages = ("sample-factory", "torch", "gymnasium", "ale-py", "numpy")
    measuring.main(__doc__, CASES, packages)
