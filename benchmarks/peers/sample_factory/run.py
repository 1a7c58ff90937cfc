"""Sample Factory's APPO.

    python benchmarks/peers/sample_factory/run.py CASE [--seconds 5] [--seed 0]

Two rollout workers, one policy worker and one learner, each an asynchronous process; each rollout
worker has two groups of environments, one of which steps while the policy acts for the other. No
recurrence, no V-trace, one epoch, no normalisation, and nothing is written while the clock runs.
Batch and rollout are its defaults (1,024 rows, 32 steps), which are faster than polopt's fragments.
Environments step in processes of their own, so it counts the steps that it learned from.

- `appo-8`, `appo-10`: CartPole-v1, environments per worker; MLPs of 64x64 tanh units for policy
  and value. Gymnasium's checker off. The faster case counts.
- `learn`, `learn-acrobot`: seconds until CartPole-v1 and Acrobot-v1 are solved, 8 environments per
  worker; its defaults but for the above, V-trace on (`learn-vtrace*`) or off.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

FOREVER = 10**10


class Ticks(AlgoObserver):
    """Reports each training iteration to a clock and ends the run when the clock is done."""

    def __init__(self, seconds: float, task: str) -> None:
        self._clock: measuring.RateClock | measuring.GoalClock | None = None
        self._seconds = seconds
        self._task = task  # to be solved; empty: the rate is measured
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
    return gymnasium.make(name, disable_env_checker=True)


def make_pong(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """ALE/Pong-v5, `[4, 84, 84]`; these releases have no registered name for it."""
    from ale_py.env import AtariEnv
    from gymnasium.wrappers import AtariPreprocessing, FrameStack, TimeLimit
    from sample_factory.envs.env_wrappers import NumpyObsWrapper

    game = AtariEnv("pong", frameskip=1, repeat_action_probability=0.25)
    return NumpyObsWrapper(FrameStack(TimeLimit(AtariPreprocessing(game), 27_000), 4))


def task_of(case: str) -> str:
    """Name of a case's environment."""
    if case == "pong":
        return case
    return "Acrobot-v1" if "acrobot" in case else "CartPole-v1"


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
        "num_envs_per_worker": 4 if case == "pong" else 10 if case == "appo-10" else 8,
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
    if case == "pong":
        options |= {
            "encoder_conv_architecture": "convnet_atari",
            "nonlinearity": "relu",
            "obs_scale": 255.0,
        }
    else:
        options |= {"actor_critic_share_weights": False, "nonlinearity": "tanh"}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    if case != "pong":
        arguments += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv=arguments)
    return parse_full_cfg(parser, arguments)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Environment steps per second in training, or seconds until a task is solved."""
    register_env(task_of(args.case), make_pong if args.case == "pong" else make_env)
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
CASES = dict.fromkeys(("appo-8", "appo-10", "pong", *LEARN), train)

if __name__ == "__main__":
    packages = ("sample-factory", "torch", "gymnasium", "ale-py", "numpy")
    measuring.main(__doc__, CASES, packages)
