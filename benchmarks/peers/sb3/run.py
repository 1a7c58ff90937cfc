"""Stable-Baselines3.

    python benchmarks/peers/sb3/run.py CASE [--seconds 5] [--seed 0]

Stable-Baselines3 always trains in one process. Most cases that measure rates have 16 environments,
the total of polopt's two workers, or 8, a usual number. `subproc` steps each environment in its own
process. The fastest case counts. Unless stated otherwise, policy and value have MLPs of 64x64 tanh
units. torch has one thread, and Gymnasium's checker is off.

- `a2c-16x10`, `a2c-8x20`: the numbers are environments and steps. Updates have 160 rows, like a
  gradient of A3C. `a2c-16x20`: updates have 320 rows, like a batch of A2C. The default of
  Stable-Baselines3, 8 x 5, is slower. These cases use RMSprop.
- `dqn-*`: a batch of 32 rows for 4 environment steps, as in the DQN paper, and 64x64 relu units.
- `ppo-*`: 2,048 rows per batch, 4 epochs of minibatches of 256. There are also cases for
  HalfCheetah-v5, and for MinAtar's Breakout with the CNN of MinAtar's paper. `wide`: 256x256 units.
- `result-*`: returns at a budget, see `benchmarks/results.py`. Most hyper-parameters come from RL
  Baselines3 Zoo, with schedules over the budget. HalfCheetah-v5 has the Zoo's settings for
  HalfCheetah-v4. RL Baselines3 Zoo does not have MinAtar's Breakout. PPO on Breakout has the Zoo's
  hyper-parameters for Atari and the CNN of MinAtar's paper. DQN on Breakout has the settings of
  `breakout_dqn` in `benchmarks/results.py`. CrossQ has the defaults of sb3-contrib.
- `loop-*`: whole training loops with 256x256 units and one environment. SAC, TD3 and CrossQ make an
  update of 256 rows for each step of HalfCheetah-v5. DQN makes an update of 128 rows for 4 steps of
  CartPole-v1. `loop-breakout*`: DQN on MinAtar's Breakout with the CNN of MinAtar's paper, and
  updates of 32 rows, or 128 rows (`loop-breakout128*`), for 4 steps. `-one-core`: the process has
  one core. `-two-cores`: torch has two threads.
- `learn-sac`: the settings of `loop-sac-two-cores`. Learning begins after 5,000 random steps, and
  all other hyper-parameters are the defaults.
- `learn-ppo`, `learn-a2c`: hyper-parameters of RL Baselines3 Zoo for CartPole-v1. PPO learns for
  100,000 steps with a decreasing learning rate and clip range.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
import numpy as np
import torch
from sb3_contrib import CrossQ
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from tasks import make_breakout

FOREVER = 10**9
ENVS: dict[str, Any] = {
    "pendulum": "Pendulum-v1",
    "halfcheetah": "HalfCheetah-v5",
    "breakout": make_breakout,
}
MODEL = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
A2C_OPTIONS: dict[str, Any] = {"gae_lambda": 1.0, "ent_coef": 0.01}
PPO_OPTIONS: dict[str, Any] = {"n_epochs": 4, "batch_size": 256, "learning_rate": 3e-4}


def falling(start: float) -> Callable[[float], float]:
    """Returns a schedule that decreases linearly from `start` to 0 over the budget."""
    return lambda left: start * left


#: Zoo's settings of CartPole-v1 and CartPoleNoVel-v1.
ZOO_CARTPOLE: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": falling(1e-3),
    "clip_range": falling(0.2),
}


class Ticks(BaseCallback):
    """Reports each round to a clock. A round is a rollout and its update."""

    def __init__(
        self,
        clock: measuring.RateClock | measuring.GoalClock | measuring.BudgetClock,
        every: int = 1,
        fewest: int = measuring.EPISODES,
    ) -> None:
        """Reports at most once per `every` steps. Reports mean returns once `fewest` episodes have
        ended."""
        super().__init__()
        self._clock = clock
        self._every, self._fewest = every, fewest
        self._reported = 0
        self._over = False

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._reported + self._every:
            self._reported = self.num_timesteps
            self.report()

    def report(self) -> None:
        """Reports the round that has ended."""
        if isinstance(self._clock, measuring.RateClock):
            self._over = self._clock.tick(self.num_timesteps)
            return
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        enough = len(returns) >= self._fewest
        mean = sum(returns) / len(returns) if enough else None
        self._over = self._clock.tick(self.num_timesteps, mean)

    def _on_step(self) -> bool:
        return not self._over


def make_envs(env: Any, number: int, seed: int, subproc: bool = False) -> Any:
    """Makes a vector environment with episode statistics."""
    return make_vec_env(
        env,
        number,
        seed=seed,
        env_kwargs={"disable_env_checker": True},
        vec_env_cls=SubprocVecEnv if subproc else DummyVecEnv,
        # The default start method starts a Python that imports torch for each environment.
        vec_env_kwargs={"start_method": "fork"} if subproc else None,
    )


def train_ppo(args: argparse.Namespace, cls: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Measures the environment steps per second of PPO. The name of a case is
    `ppo-environments[-options]`.

    Args:
        args: the case is one of `PPO_RATES`.
        cls: the class of the algorithm.
        model: the arguments of its policy.
    """
    _, number, *options = args.case.split("-")
    env = next((ENVS[option] for option in options if option in ENVS), "CartPole-v1")
    envs = make_envs(env, int(number), args.seed, "subproc" in options)
    if "wide" in options:
        model = {**model, "net_arch": {"pi": [256, 256], "vf": [256, 256]}}
    common: dict[str, Any] = {"policy_kwargs": model, "seed": args.seed, "device": "cpu"}
    clock = measuring.RateClock(args.seconds)
    learner = cls("MlpPolicy", envs, n_steps=2048 // int(number), **common, **PPO_OPTIONS)
    learner.learn(FOREVER, callback=Ticks(clock))
    envs.close()
    return clock.result()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training. The name of a case is
    `algorithm-environments[-options]`."""
    if args.case in PPO_RATES:
        return train_ppo(args, PPO, MINATAR_MODEL if "breakout" in args.case else MODEL)
    algorithm, size, *options = args.case.split("-")
    number, _, steps = size.partition("x")
    env = next((ENVS[option] for option in options if option in ENVS), "CartPole-v1")
    envs = make_envs(env, int(number), args.seed, "subproc" in options)
    common: dict[str, Any] = {"policy_kwargs": MODEL, "seed": args.seed, "device": "cpu"}
    model: Any
    if algorithm == "dqn":
        updates = max(1, int(number) // 4)
        common |= {"policy_kwargs": {"net_arch": [64, 64]}, "gradient_steps": updates}
        common["train_freq"] = 4 * updates // int(number)
        model = DQN("MlpPolicy", envs, learning_starts=1000, **common)
    else:
        model = A2C("MlpPolicy", envs, n_steps=int(steps), **common, **A2C_OPTIONS)
    clock = measuring.RateClock(args.seconds)
    model.learn(FOREVER, callback=Ticks(clock))
    envs.close()
    return clock.result()


#: Arguments of the cases `loop-*`, by algorithm.
LOOPS: dict[str, dict[str, Any]] = {
    "dqn": {"batch_size": 128, "train_freq": 4, "gradient_steps": 1},
    **{
        name: {"batch_size": rows, "train_freq": 4, "gradient_steps": 1, "buffer_size": 100_000}
        for name, rows in (("breakout", 32), ("breakout128", 128))
    },
    **{
        name: {"batch_size": 256, "train_freq": 1, "gradient_steps": 1}
        for name in ("sac", "td3", "crossq")
    },
}
LOOP_CASES = tuple(f"loop-{name}-{cores}" for name in LOOPS for cores in ("one-core", "two-cores"))


def loop_of(args: argparse.Namespace, classes: dict[str, Any]) -> dict[str, Any]:
    """Measures the environment steps per second of a whole training loop.

    Args:
        args: the case is one of `LOOP_CASES`.
        classes: the classes of the algorithms by name.
    """
    name = args.case.split("-")[1]
    on_breakout = name.startswith("breakout")
    env = "CartPole-v1" if name == "dqn" else ENVS["breakout" if on_breakout else "halfcheetah"]
    envs = make_envs(env, 1, args.seed)
    model = classes["dqn" if on_breakout else name](
        "MlpPolicy",
        envs,
        policy_kwargs=MINATAR_MODEL if on_breakout else {"net_arch": [256, 256]},
        learning_starts=1000,
        seed=args.seed,
        **LOOPS[name],
    )
    clock = measuring.RateClock(args.seconds)
    model.learn(FOREVER, callback=Ticks(clock))
    envs.close()
    return clock.result()


def loop(args: argparse.Namespace) -> dict[str, Any]:
    """Measures one of `LOOP_CASES`."""
    torch.set_num_threads(measuring.CORES)
    return loop_of(args, {"dqn": DQN, "sac": SAC, "td3": TD3, "crossq": CrossQ})


def learn_sac_of(args: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """Measures the seconds until HalfCheetah-v5 is solved.

    Args:
        args: the parsed command line.
        cls: the class of SAC.
    """
    envs, fewest = make_envs("HalfCheetah-v5", 1, args.seed), measuring.EPISODES_OF_SAC
    model = cls(
        "MlpPolicy",
        envs,
        policy_kwargs={"net_arch": [256, 256]},
        learning_starts=5000,
        stats_window_size=fewest,
        seed=args.seed,
        **LOOPS["sac"],
    )
    clock = measuring.GoalClock(args.seconds, "HalfCheetah-v5")
    model.learn(FOREVER, callback=Ticks(clock, every=1000, fewest=fewest))
    envs.close()
    return clock.result()


def learn_sac(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until HalfCheetah-v5 is solved."""
    torch.set_num_threads(measuring.CORES)
    return learn_sac_of(args, SAC)


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until CartPole-v1 is solved."""
    envs = make_envs("CartPole-v1", 8, args.seed)
    common: dict[str, Any] = {"policy_kwargs": MODEL, "seed": args.seed, "device": "cpu"}
    if args.case == "learn-a2c":
        model = A2C("MlpPolicy", envs, ent_coef=0.0, **common)
        steps = 500_000
    else:
        model = PPO(
            "MlpPolicy",
            envs,
            **ZOO_CARTPOLE,
            **common,
        )
        steps = 100_000
    clock = measuring.GoalClock(args.seconds)
    model.learn(steps, callback=Ticks(clock))
    envs.close()
    return clock.result()


class MinAtarCNN(BaseFeaturesExtractor):
    """The convolution and the hidden layer of MinAtar's paper (Young and Tian, 2019)."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=128)
        height, width, channels = observation_space.shape
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 16, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * (height - 2) * (width - 2), 128),
            torch.nn.ReLU(),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations.float().permute(0, 3, 1, 2))


MINATAR_MODEL: dict[str, Any] = {
    "features_extractor_class": MinAtarCNN,
    "net_arch": [],
    "activation_fn": torch.nn.ReLU,
}


def halfcheetah(seed: int, env_steps: int) -> Any:
    """PPO on HalfCheetah-v5 with Zoo's settings for HalfCheetah-v4."""
    envs = VecNormalize(make_envs("HalfCheetah-v5", 1, seed), gamma=0.98)
    relu = torch.nn.ReLU
    network = {"net_arch": {"pi": [256, 256], "vf": [256, 256]}, "activation_fn": relu}
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=512,
        batch_size=64,
        gamma=0.98,
        learning_rate=2.0633e-05,
        ent_coef=0.000401762,
        clip_range=0.1,
        n_epochs=20,
        gae_lambda=0.92,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs={**network, "log_std_init": -2, "ortho_init": False},
        seed=seed,
        device="cpu",
    )


def stateless_cartpole(seed: int, env_steps: int) -> Any:
    """RecurrentPPO on CartPole-v1 without velocities with Zoo's settings for CartPoleNoVel-v1."""
    from sb3_contrib import RecurrentPPO

    return RecurrentPPO(
        "MlpLstmPolicy",
        make_envs(positions_only, 8, seed),
        **ZOO_CARTPOLE,
        seed=seed,
        device="cpu",
    )


def positions_only(**options: Any) -> gymnasium.Env[Any, Any]:
    """Makes CartPole-v1 whose observations are the positions of cart and pole."""
    env = gymnasium.make("CartPole-v1", **options)
    space = env.observation_space
    box = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=space.dtype)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], box)


def breakout(seed: int, env_steps: int) -> Any:
    """PPO on MinAtar's Breakout."""
    return PPO(
        "MlpPolicy",
        make_envs(make_breakout, 8, seed),
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=falling(2.5e-4),
        clip_range=falling(0.1),
        vf_coef=0.5,
        ent_coef=0.01,
        policy_kwargs=MINATAR_MODEL,
        seed=seed,
        device="cpu",
    )


def acrobot_dqn(seed: int, env_steps: int) -> Any:
    """DQN on Acrobot-v1 with Zoo's settings. Epsilon decreases over as many steps as in the Zoo."""
    return DQN(
        "MlpPolicy",
        make_envs("Acrobot-v1", 1, seed),
        learning_rate=6.3e-4,
        batch_size=128,
        buffer_size=50_000,
        learning_starts=0,
        target_update_interval=250,
        train_freq=4,
        gradient_steps=-1,
        exploration_fraction=0.12 * 100_000 / env_steps,
        exploration_final_eps=0.1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )


def cartpole_dqn(seed: int, env_steps: int) -> Any:
    """DQN on CartPole-v1 with Zoo's settings, whose budget is 50,000 steps."""
    return DQN(
        "MlpPolicy",
        make_envs("CartPole-v1", 1, seed),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )


def breakout_dqn(seed: int, env_steps: int) -> Any:
    """DQN on MinAtar's Breakout."""
    return DQN(
        "MlpPolicy",
        make_envs(make_breakout, 1, seed),
        learning_rate=2.5e-4,
        batch_size=32,
        buffer_size=100_000,
        learning_starts=5000,
        target_update_interval=1000,
        train_freq=4,
        gradient_steps=1,
        exploration_fraction=100_000 / env_steps,
        exploration_final_eps=0.1,
        policy_kwargs=MINATAR_MODEL,
        seed=seed,
        device="cpu",
    )


def pendulum_sac(seed: int, env_steps: int) -> Any:
    """SAC on Pendulum-v1 with Zoo's settings."""
    envs = make_envs("Pendulum-v1", 1, seed)
    return SAC("MlpPolicy", envs, learning_rate=1e-3, seed=seed, device="cpu")


def pendulum_td3(seed: int, env_steps: int) -> Any:
    """TD3 on Pendulum-v1 with Zoo's settings."""
    return TD3(
        "MlpPolicy",
        make_envs("Pendulum-v1", 1, seed),
        gamma=0.98,
        buffer_size=200_000,
        learning_starts=10_000,
        action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
        train_freq=1,
        gradient_steps=1,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [400, 300]},
        seed=seed,
        device="cpu",
    )


def mujoco_sac(env: str) -> Callable[[int, int], Any]:
    """SAC with Zoo's settings for MuJoCo: the defaults, and learning begins after 10,000 steps."""

    def make(seed: int, env_steps: int) -> Any:
        envs = make_envs(env, 1, seed)
        return SAC("MlpPolicy", envs, learning_starts=10_000, seed=seed, device="cpu")

    return make


def halfcheetah_crossq(seed: int, env_steps: int) -> Any:
    """CrossQ with its defaults, but critics as wide as SAC's. Its paper has a width of 2,048."""
    from sb3_contrib import CrossQ

    return CrossQ(
        "MlpPolicy",
        make_envs("HalfCheetah-v5", 1, seed),
        learning_starts=5000,
        policy_kwargs={"net_arch": {"pi": [256, 256], "qf": [256, 256]}},
        seed=seed,
        device="cpu",
    )


def reach_budget(args: argparse.Namespace) -> dict[str, Any]:
    """Records the learning curve up to `--env-steps`. Then evaluates `--episodes` episodes."""
    model = RESULTS[args.case](args.seed, args.env_steps)
    clock = measuring.BudgetClock(args.env_steps)
    ticks = Ticks(clock, every=500, fewest=1) if args.episodes else Ticks(clock)
    model.learn(args.env_steps, callback=ticks)
    ticks.report()  # the last round
    found = clock.result()
    if args.episodes:
        model.get_env().seed(measuring.EVALUATION_SEED + args.seed)
        found["return"], _ = evaluate_policy(model, model.get_env(), args.episodes)
        found["return"] = float(found["return"])
    return found


RESULTS = {
    "result-dqn-acrobot": acrobot_dqn,
    "result-dqn-cartpole": cartpole_dqn,
    "result-dqn-breakout": breakout_dqn,
    "result-sac-pendulum": pendulum_sac,
    "result-td3-pendulum": pendulum_td3,
    "result-sac-halfcheetah": mujoco_sac("HalfCheetah-v5"),
    "result-sac-hopper": mujoco_sac("Hopper-v5"),
    "result-crossq-halfcheetah": halfcheetah_crossq,
    "result-halfcheetah": halfcheetah,
    "result-stateless-cartpole": stateless_cartpole,
    "result-breakout": breakout,
}
PPO_RATES = (
    "ppo-8",
    "ppo-16",
    "ppo-16-subproc",
    "ppo-16-wide",
    "ppo-16-pendulum",
    *(
        f"{case}-{env}"
        for env in ("halfcheetah", "breakout")
        for case in ("ppo-16", "ppo-16-subproc")
    ),
)
RATES = (
    "a2c-8x20",
    "a2c-16x10",
    "a2c-16x10-subproc",
    "a2c-16x20",
    "a2c-16x20-subproc",
    "a2c-16x10-pendulum",
    "dqn-1",
    "dqn-8",
    "dqn-16",
    *PPO_RATES,
)
CASES = {
    **dict.fromkeys(RATES, train),
    **dict.fromkeys(LOOP_CASES, loop),
    **dict.fromkeys(RESULTS, reach_budget),
    "learn-ppo": learn,
    "learn-a2c": learn,
    "learn-sac": learn_sac,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("stable-baselines3", "torch", "gymnasium", "numpy"))
