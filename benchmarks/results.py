"""Measures the returns of polopt and its peers after a fixed number of environment steps.

    python benchmarks/results.py                                   # all runs. Takes hours
    python benchmarks/results.py --only HalfCheetah-v5 --seeds 0 1 # two seeds of one task
    python benchmarks/results.py --page                            # only writes page and figures

Each run is a new process, with one thread per process. A run of polopt trains
`tuned_examples/NAME.yaml` or an example of `UNTUNED`. A run of a peer starts a script of
`benchmarks/peers` in the virtual environment of the peer. After each run, the script stores the
result in `benchmarks/results/tasks.jsonl`. Later calls skip the stored runs. To measure a run
again, delete its line in this file. At the end, the script writes the tables to `docs/tasks.md` and
the learning curves to `docs/images/task-*.png`. A trainer without stored runs gets a row with "not
run".

The return of a run is the mean undiscounted return of the last 100 training episodes at the budget,
with sampled actions. If `Task.episodes` is above 0, it is the mean return of this number of
evaluation episodes at the budget, without exploration. The tables show the interquartile mean over
seeds with a 95 percent interval (percentile bootstrap over seeds). Wall time is the median over
seeds, without start-up and evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from about import about
from environments import CACHE, PEERS, PeerError, make_environment
from intervals import interquartile_mean, interval
from processes import run as run_process
from stored_runs import read_runs, write_runs

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/tasks.jsonl"
PAGE = ROOT / "docs/tasks.md"
PRESET_ORDER = (
    *("A3C", "A2C", "SyncPPO", "DDPPO", "IMPALA", "APPO", "DQN", "SAC", "TD3", "PQN", "ApexDQN"),
    "PolicyOptimizerTrainer",
)
PUBLISHED = ROOT / "command_line/published_cells.json"
IMAGES = ROOT / "docs/images"
EXAMPLES = ROOT / "tuned_examples"
SEEDS = (0, 1, 2, 3, 4)
#: Approximate number of points of a learning curve that are stored.
POINTS = 100
#: A run that takes longer is stopped and counts as failed.
LIMIT_S = 4 * 3600.0
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")


class Cell(NamedTuple):
    """One trainer on one task.

    Attributes:
        title: title of the row in the table.
        source: name of a tuned example, key of `UNTUNED`, or `PEER:CASE` for a case of
            `benchmarks/peers/PEER/run.py`.
    """

    title: str
    source: str


class Task(NamedTuple):
    """An environment with a budget, and the trainers that run on it.

    Attributes:
        env_steps: budget of each run.
        cells: the trainers.
        goal: mean return at which the task counts as solved. The table then shows how many steps
            each seed needed to reach it. None means that the table has no such column.
        episodes: number of evaluation episodes at the budget. With 0, the return is the mean over
            training episodes.
        decimals: decimals of the returns in the table.
    """

    env_steps: int
    cells: tuple[Cell, ...]
    goal: float | None = None
    episodes: int = 0
    decimals: int = 0


def breakout(config: Any) -> Any:
    """Makes MinAtar's Breakout, as `make_breakout` in `peers/common/tasks.py` does."""
    from tasks import make_breakout

    return make_breakout()


#: A batch of 1,024 rows has two fragments of 64 steps x 8 environments. It has as many rows as the
#: batches of `halfcheetah_ppo` and `breakout_ppo`.
DECOUPLED_PPO: dict[str, Any] = {
    "optimizer": "async_samples",
    "policy": "decoupled_ppo",
    "num_workers": 2,
    "rollout_fragment_length": 64,
    "train_batch_size": 1024,
    "max_rollout_lag": 2,
    "max_requests_in_flight_per_worker": 2,
}
#: SAC on MuJoCo with the learning rates of CleanRL's SAC. As in CleanRL, the first 5,000 steps are
#: random.
MUJOCO_SAC: dict[str, Any] = {
    "learning_starts": 5000,
    "random_timesteps": 5000,
    "actor_lr": 3e-4,
    "critic_lr": 1e-3,
    "alpha_lr": 1e-3,
    "buffer_size": 100_000,
}
#: DQN on CartPole-v1. The options that are given here are the settings of RL Zoo for
#: Stable-Baselines3.
CARTPOLE_DQN: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 256,
    "buffer_size": 50_000,
    "learning_starts": 1000,
    "train_batch_size": 64,
    "training_intensity": 32.0,
    "lr": 2.3e-3,
    "epsilon": [[0, 1.0], [8000, 0.04]],
    "target_network_update_freq": 128,
    "model": {"fcnet_hiddens": [256, 256]},
}
#: DQN on Acrobot-v1 with the algorithm of Stable-Baselines3 and the settings of RL Zoo.
ACROBOT_ZOO_DQN: dict[str, Any] = {
    "env": "Acrobot-v1",
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 4,
    "min_sample_timesteps_per_iteration": 4000,
    "buffer_size": 50_000,
    "learning_starts": 128,
    "train_batch_size": 128,
    "training_intensity": 128.0,
    "lr": 6.3e-4,
    "epsilon": [[0, 1.0], [12_000, 0.1]],
    "target_network_update_freq": 250,
    "double_q": False,
    "dueling": False,
    "grad_clip": 10.0,
    "model": {"fcnet_hiddens": [256, 256]},
}
#: PPO on the tasks of MPE2, whose episodes have 25 steps.
MPE_PPO: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 16,
    "rollout_fragment_length": 100,
    "model": {"fcnet_hiddens": [128, 128]},
    "normalize_observations": True,
    "normalize_rewards": True,
    "num_sgd_iter": 5,
    "sgd_minibatch_size": 480,
    # With a gamma of 0.99, seed 0 of simple_spread returned -64 after 1,000,000 steps. With 0.9, it
    # returned -52 after 100,000 steps. An episode has 25 steps.
    "gamma": 0.9,
    "lr": [[0, 1e-3], [300_000, 1e-4]],
    "entropy_coeff": 0.01,
}
#: Number of evaluation episodes of the tasks for DQN, PQN, SAC and TD3.
EVALUATION_EPISODES = 100
#: Budget of the tasks with SAC on MuJoCo.
MUJOCO_SAC_STEPS = 100_000
#: Examples that are not in `tuned_examples/`.
UNTUNED: dict[str, dict[str, Any]] = {
    # At first, the policy rarely reaches the goal of Acrobot-v1, and PQN does not replay old
    # fragments. With a lambda of 0.95, a success affects the targets of more of the steps before
    # it. CleanRL's settings (4 x 128 steps, lambda 0.65, epsilon falling over 250,000 steps)
    # returned -194 with seed 0.
    "acrobot_pqn": {
        "run": "PQN",
        "config": {
            "env": "Acrobot-v1",
            "num_workers": 0,
            "num_envs_per_worker": 16,
            "rollout_fragment_length": 32,
            "lambda": 0.95,
            "lr": [[0, 1e-3], [500_000, 0.0]],
            "epsilon": [[0, 1.0], [100_000, 0.05]],
            "model": {"fcnet_hiddens": [120, 84]},
            "min_sample_timesteps_per_iteration": 4096,
        },
    },
    "acrobot_zoo_dqn": {"run": "DQN", "config": ACROBOT_ZOO_DQN},
    # Double Q-learning and a dueling network.
    "cartpole_double_dqn": {"run": "DQN", "config": CARTPOLE_DQN},
    # The algorithm of Stable-Baselines3, which has neither, with its limit of the gradient norm.
    "cartpole_dqn": {
        "run": "DQN",
        "config": {**CARTPOLE_DQN, "double_q": False, "dueling": False, "grad_clip": 10.0},
    },
    # With the default `tau` of 0.005. The `tau` of the tuned example `halfcheetah_sac` was chosen
    # with runs of 40,000 steps. Their seeds, 100 and 101, are not in the results. These runs
    # learned faster with a `tau` of 0.01 or 0.02. They learned more slowly with a `gamma` of 0.98,
    # with three-step returns, and with a learning rate of the actor of 1e-3. RL Zoo's SAC has a
    # `tau` of 0.02 on PyBullet's HalfCheetah.
    "halfcheetah_sac_slow_targets": {
        "run": "SAC",
        "config": {"env": "HalfCheetah-v5", **MUJOCO_SAC},
    },
    # Chosen before the first run: twice as many updates, which begin after 1,000 random steps.
    "halfcheetah_sac_twice": {
        "run": "SAC",
        "config": {
            "env": "HalfCheetah-v5",
            **MUJOCO_SAC,
            "learning_starts": 1000,
            "random_timesteps": 1000,
            "training_intensity": 512.0,
        },
    },
    "halfcheetah_crossq": {
        "run": "PolicyOptimizerTrainer",
        "config": {
            "env": "HalfCheetah-v5",
            "optimizer": "sync_replay",
            "policy": "crossq",
            "num_workers": 0,
            "num_envs_per_worker": 1,
            "rollout_fragment_length": 8,
            "min_sample_timesteps_per_iteration": 1000,
            "train_batch_size": 256,
            "training_intensity": 256.0,
            "learning_starts": 5000,
            "random_timesteps": 5000,
            "buffer_size": 100_000,
        },
    },
    "hopper_sac": {"run": "SAC", "config": {"env": "Hopper-v5", **MUJOCO_SAC}},
    # The epsilon schedule and the buffer size are from MinAtar's paper. The paper makes one update
    # per frame, for 5M frames.
    "breakout_dqn": {
        "run": "DQN",
        "config": {
            "env": breakout,
            "num_envs_per_worker": 4,
            "rollout_fragment_length": 4,
            "buffer_size": 100_000,
            "learning_starts": 5000,
            "train_batch_size": 32,
            "training_intensity": 8.0,
            "lr": 2.5e-4,
            "epsilon": [[0, 1.0], [100_000, 0.1]],
            "target_network_update_freq": 250,
            "model": {"conv_filters": [[16, 3, 1]], "post_fcnet_hiddens": [128]},
            "min_sample_timesteps_per_iteration": 4000,
        },
    },
    "breakout_ppo": {
        "run": "SyncPPO",
        "config": {
            "env": breakout,
            "num_workers": 0,
            "num_envs_per_worker": 8,
            "rollout_fragment_length": 128,
            "lr": [[0, 1e-3], [2_000_000, 0]],
            "num_sgd_iter": 4,
            "sgd_minibatch_size": 256,
        },
    },
    # The settings of `halfcheetah_ppo`, but workers sample while the driver learns.
    "halfcheetah_decoupled_ppo": {
        "run": "PolicyOptimizerTrainer",
        "config": {
            **yaml.safe_load((EXAMPLES / "halfcheetah_ppo.yaml").read_text())["config"],
            **DECOUPLED_PPO,
        },
    },
    "breakout_decoupled_ppo": {
        "run": "PolicyOptimizerTrainer",
        "config": {
            "env": breakout,
            "num_envs_per_worker": 8,
            "lr": [[0, 1e-3], [2_000_000, 0]],
            "num_sgd_iter": 4,
            "sgd_minibatch_size": 256,
            **DECOUPLED_PPO,
        },
    },
    # Several agents.
    "simple_spread_ppo": {"run": "SyncPPO", "config": {"env": "mpe2:simple_spread_v3", **MPE_PPO}},
    "simple_tag_ppo": {
        "run": "SyncPPO",
        "config": {
            "env": "mpe2:simple_tag_v3",
            "policies": ["hunters", "prey"],
            "policy_mapping_fn": {"adversary_*": "hunters", "*": "prey"},
            **MPE_PPO,
        },
    },
    "simple_spread_dqn": {
        "run": "DQN",
        "config": {
            "env": "mpe2:simple_spread_v3",
            "num_envs_per_worker": 4,
            "rollout_fragment_length": 4,
            "min_sample_timesteps_per_iteration": 2000,
            "buffer_size": 200_000,
            "learning_starts": 5000,
            "train_batch_size": 64,
            "training_intensity": 8.0,
            "lr": 5e-4,
            "epsilon": [[0, 1.0], [20_000, 0.05]],
            "model": {"fcnet_hiddens": [128, 128]},
        },
    },
    "simple_spread_sac": {
        "run": "SAC",
        "config": {
            "env": "mpe2:simple_spread_v3",
            "env_config": {"continuous_actions": True},
            "num_envs_per_worker": 1,
            "rollout_fragment_length": 8,
            "min_sample_timesteps_per_iteration": 1000,
            "buffer_size": 200_000,
            "learning_starts": 5000,
            "random_timesteps": 1500,
            "train_batch_size": 256,
            "training_intensity": 64.0,
            "lr": 5e-4,
        },
    },
    # Two policies, because an observation does not say whether its agent is an archer or a knight.
    # In single runs that are not stored, one shared policy reached 10 and fell to 5 again.
    "knights_archers_ppo": {
        "run": "SyncPPO",
        "config": {
            "env": "pettingzoo.butterfly:knights_archers_zombies_v11",
            "env_config": {"max_zombies": 10, "max_cycles": 900},
            "policies": ["archers", "knights"],
            "policy_mapping_fn": {"archer_*": "archers", "knight_*": "knights"},
            "num_workers": 0,
            "num_envs_per_worker": 8,
            "rollout_fragment_length": 256,
            "model": {"fcnet_hiddens": [128, 128]},
            "gamma": 0.99,
            "num_sgd_iter": 8,
            "sgd_minibatch_size": 512,
            "lr": [[0, 5e-4], [400_000, 5e-5]],
            "entropy_coeff": 0.01,
        },
    },
    "breakout_a3c": {
        "run": "A3C",
        "config": {
            "env": breakout,
            "num_workers": 2,
            "num_envs_per_worker": 8,
            "rollout_fragment_length": 20,
            "lr": [[0, 1e-3], [2_000_000, 0]],
            "lambda": 0.95,
            "grad_clip": 5.0,
        },
    },
}
TASKS: dict[str, Task] = {
    "HalfCheetah-v5": Task(
        1_000_000,
        (
            Cell("SyncPPO", "halfcheetah_ppo"),
            Cell("DDPPO", "halfcheetah_ddppo"),
            Cell("AsyncSamples, decoupled PPO", "halfcheetah_decoupled_ppo"),
            Cell("Stable-Baselines3 PPO, RL Zoo's settings", "sb3:result-halfcheetah"),
        ),
    ),
    "StatelessCartPole": Task(
        300_000,
        (
            Cell("SyncPPO, LSTM", "stateless_cartpole_ppo"),
            Cell("sb3-contrib RecurrentPPO, RL Zoo's settings", "sb3:result-stateless-cartpole"),
        ),
        goal=400.0,
    ),
    "MinAtar/Breakout-v1": Task(
        2_000_000,
        (
            Cell("SyncPPO", "breakout_ppo"),
            Cell("A3C", "breakout_a3c"),
            Cell("AsyncSamples, decoupled PPO", "breakout_decoupled_ppo"),
            Cell("Stable-Baselines3 PPO, the same CNN", "sb3:result-breakout"),
        ),
    ),
    "CartPole-v1": Task(
        250_000,
        (
            Cell("A3C", "cartpole_a3c"),
            Cell("A2C", "cartpole_a2c"),
            Cell("SyncPPO", "cartpole_ppo"),
            Cell("DDPPO", "cartpole_ddppo"),
            Cell("IMPALA", "cartpole_impala"),
            Cell("APPO", "cartpole_appo"),
            Cell("AsyncSamples, decoupled PPO", "cartpole_decoupled_ppo"),
        ),
        goal=450.0,
    ),
    "Acrobot-v1": Task(
        300_000,
        (
            Cell("A3C", "acrobot_a3c"),
            Cell("SyncPPO", "acrobot_ppo"),
            Cell("IMPALA", "acrobot_impala"),
            Cell("APPO", "acrobot_appo"),
        ),
        goal=-95.0,
    ),
    "Acrobot-v1, evaluated": Task(
        500_000,
        (
            Cell("DQN", "acrobot_dqn"),
            Cell("DQN with RL Zoo's settings", "acrobot_zoo_dqn"),
            Cell("PQN", "acrobot_pqn"),
            Cell("Stable-Baselines3 DQN, RL Zoo's settings", "sb3:result-dqn-acrobot"),
        ),
        goal=-95.0,
        episodes=EVALUATION_EPISODES,
    ),
    "CartPole-v1, evaluated": Task(
        500_000,
        (Cell("PQN", "cartpole_pqn"),),
        goal=475.0,
        episodes=EVALUATION_EPISODES,
    ),
    "CartPole-v1 with DQN, evaluated": Task(
        50_000,
        (
            Cell("DQN, double and dueling", "cartpole_double_dqn"),
            Cell("DQN without double Q-learning and dueling", "cartpole_dqn"),
            Cell("Stable-Baselines3 DQN, RL Zoo's settings", "sb3:result-dqn-cartpole"),
        ),
        goal=475.0,
        episodes=EVALUATION_EPISODES,
    ),
    "Pendulum-v1, evaluated": Task(
        20_000,
        (
            Cell("SAC", "pendulum_sac"),
            Cell("TD3", "pendulum_td3"),
            Cell("Stable-Baselines3 SAC, RL Zoo's settings", "sb3:result-sac-pendulum"),
            Cell("Stable-Baselines3 TD3, RL Zoo's settings", "sb3:result-td3-pendulum"),
        ),
        episodes=EVALUATION_EPISODES,
    ),
    "Pendulum-v1": Task(
        500_000, (Cell("SyncPPO", "pendulum_ppo"), Cell("DDPPO", "pendulum_ddppo")), goal=-200.0
    ),
    "Acrobot-v1 with Ape-X, evaluated": Task(
        100_000,
        (Cell("Ape-X", "acrobot_apex_dqn"),),
        goal=-95.0,
        episodes=EVALUATION_EPISODES,
    ),
    "HalfCheetah-v5, evaluated": Task(
        MUJOCO_SAC_STEPS,
        (
            Cell("SAC", "halfcheetah_sac"),
            Cell("SAC, tau of 0.005", "halfcheetah_sac_slow_targets"),
            Cell("SAC, tau of 0.005, two updates per step", "halfcheetah_sac_twice"),
            Cell("Stable-Baselines3 SAC, RL Zoo's settings", "sb3:result-sac-halfcheetah"),
            Cell("CrossQ, critics of width 256", "halfcheetah_crossq"),
            Cell("sb3-contrib CrossQ, critics of width 256", "sb3:result-crossq-halfcheetah"),
        ),
        episodes=EVALUATION_EPISODES,
    ),
    "Hopper-v5, evaluated": Task(
        MUJOCO_SAC_STEPS,
        (
            Cell("SAC", "hopper_sac"),
            Cell("Stable-Baselines3 SAC, RL Zoo's settings", "sb3:result-sac-hopper"),
        ),
        episodes=EVALUATION_EPISODES,
    ),
    "simple_spread_v3": Task(
        300_000,
        (
            Cell("SyncPPO, one shared policy", "simple_spread_ppo"),
            Cell("RLlib 2.60 PPO, one shared policy", "rllib:result-simple-spread"),
        ),
    ),
    "simple_spread_v3, evaluated": Task(
        50_000,
        (
            Cell("DQN, one shared policy", "simple_spread_dqn"),
            Cell("SAC, one shared policy, continuous actions", "simple_spread_sac"),
        ),
        episodes=EVALUATION_EPISODES,
    ),
    # The return is the one of the hunters against random prey.
    "simple_tag_v3": Task(
        300_000,
        (Cell("SyncPPO, two policies", "simple_tag_ppo"),),
        episodes=EVALUATION_EPISODES,
    ),
    # The return is the share of games that are won against random play.
    "connect_four_v3": Task(
        800_000,
        (Cell("SyncPPO, self-play", "connect_four_self_play"),),
        episodes=400,
        decimals=3,
    ),
    "knights_archers_zombies_v11": Task(
        400_000, (Cell("SyncPPO, two policies", "knights_archers_ppo"),), decimals=1
    ),
    "MinAtar/Breakout-v1, evaluated": Task(
        500_000,
        (
            Cell("DQN", "breakout_dqn"),
            Cell("Stable-Baselines3 DQN, the same CNN", "sb3:result-dqn-breakout"),
        ),
        episodes=EVALUATION_EPISODES,
    ),
}


def against_random(trainer: Any, games: int, seed: int) -> dict[str, Any]:
    """Connect four: the share of games that `main` wins against random play, and against each of
    its copies from earlier iterations."""
    from polopt.tuned_examples.self_play import score

    group = trainer.get_policy()
    main = group.policies["main"]
    past = {
        name: score(main, one, games // 4, seed)
        for name, one in group.policies.items()
        if name != "main"
    }
    return {"return": score(main, None, games, seed), "against_its_past": past}


def against_random_prey(trainer: Any, episodes: int, seed: int) -> dict[str, Any]:
    """simple_tag: the mean of the summed returns of the hunters against random prey, and of random
    hunters against the prey that was trained."""
    import numpy as np
    from mpe2 import simple_tag_v3

    from polopt.tuned_examples.self_play import play

    found = {}
    env, policies = simple_tag_v3.env(), trainer.get_policy().policies
    for key, trained in (("return", "hunters"), ("random_hunters", "prey"), ("random", "")):
        rng, sums = np.random.default_rng(seed), []
        players = {
            agent: policies[trained]
            if trained == ("hunters" if agent.startswith("adversary") else "prey")
            else None
            for agent in env.possible_agents
        }
        for _ in range(episodes):
            returns = play(env, players, rng)
            sums.append(sum(value for agent, value in returns.items() if agent != "agent_0"))
        found[key] = float(np.mean(sums))
    env.close()
    return found


#: Measures the return in another way than by evaluation.
SCORES = {"connect_four_self_play": against_random, "simple_tag_ppo": against_random_prey}


def train_example(name: str, seed: int, env_steps: int, episodes: int) -> dict[str, Any]:
    """Trains an example up to a budget, and evaluates the policy in `episodes` episodes.

    Returns:
        The result of `measuring.BudgetClock`. With `episodes` above 0, `return` is the mean return
        of the evaluation.
    """
    sys.path.insert(0, str(PEERS / "common"))
    import measuring

    import polopt

    example = UNTUNED.get(name) or yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    config = {**example["config"], "seed": seed}
    if episodes:
        config.pop("evaluation_interval", None)  # evaluates only at the budget
        config.pop("evaluation_duration", None)
    trainer = getattr(polopt, example["run"])(config)
    clock = measuring.BudgetClock(env_steps)
    fewest = 1 if episodes else measuring.EPISODES
    over = False
    while not over:
        result = trainer.train()
        runners = result["env_runners"]
        enough = runners["num_episodes_lifetime"] >= fewest
        mean = runners["episode_return_mean"] if enough else None
        over = clock.tick(result["num_env_steps_sampled_lifetime"], mean)
    found = clock.result()
    if episodes and name in SCORES:
        found |= SCORES[name](trainer, episodes, measuring.EVALUATION_SEED + seed)
    elif episodes:
        evaluated = trainer.evaluate(episodes, seed=measuring.EVALUATION_SEED + seed)
        found["return"] = evaluated.episode_return_mean
    trainer.stop()
    return found


def measure(cell: Cell, seed: int, task: Task, cache: Path) -> dict[str, Any]:
    """Runs one seed of a cell in a new process, and returns its result with a shorter curve.

    Raises:
        PeerError: the run failed.
    """
    peer, _, case = cell.source.partition(":")
    budget = ["--env-steps", str(task.env_steps), "--episodes", str(task.episodes)]
    if case:
        script = [str(make_environment(peer, cache)), str(PEERS / peer / "run.py"), case]
        found = run_process([*script, "--seed", str(seed), *budget], LIMIT_S)
    else:
        command = [sys.executable, __file__, "--train", cell.source, "--seeds", str(seed)]
        found = run_process([*command, *budget], LIMIT_S, ROOT / "src")
    every = max(1, len(found["curve"]) // POINTS)
    return {**found, "curve": found["curve"][::every]}


def steps_to(goal: float, run: dict[str, Any]) -> float:
    """Returns the environment steps at which the mean return first reached the goal, or infinity if
    it never did."""
    return next((steps for steps, mean in run["curve"] if mean >= goal), math.inf)


def table(name: str, task: Task, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns the section of a task in Markdown, as lines: a heading and a table."""
    goal = "" if task.goal is None else f" steps to {task.goal:.0f}, seed by seed |"
    lines = [
        f"## {name}, {task.env_steps:,} environment steps",
        "",
        f"| trainer | return: interquartile mean, 95 percent interval | seeds | wall time |{goal}",
        "|---|---|---|---|" + "---|" * bool(goal),
    ]
    for cell in task.cells:
        found = runs[cell.source]
        if not found:
            lines.append(f"| {cell.title} | not run | 0 | |" + " |" * bool(goal))
            continue
        returns = [run["return"] for run in found]
        spread = "(one seed)"
        if len(returns) > 1:
            low, high = interval(returns)
            spread = f"[{low:,.{task.decimals}f}, {high:,.{task.decimals}f}]"
        line = f"| {cell.title} | {interquartile_mean(returns):,.{task.decimals}f} {spread} "
        line += f"| {len(found)} | {median(run['seconds'] for run in found):,.0f} s |"
        if task.goal is not None:
            reached = sorted(steps_to(task.goal, run) for run in found)
            words = ["not reached" if s == math.inf else f"{s:,.0f}" for s in reached]
            line += f" {'; '.join(words)} |"
        lines.append(line)
    return [*lines, ""]


def has_curves(task: Task) -> bool:
    """Whether the learning curves of a task show the return of its table."""
    return not any(cell.source in SCORES for cell in task.cells)


def figure_of(name: str, task: Task, runs: dict[str, list[dict[str, Any]]]) -> Any:
    """Draws the learning curves of a task: a thin line for each seed, and a thick line for the
    interquartile mean. Returns None if no trainer has a run, or if the curves show another return
    than the table (`SCORES`)."""
    import numpy as np
    import plotly.graph_objects as go

    if not any(runs.values()) or not has_curves(task):
        return None
    figure = go.Figure()
    grid = np.linspace(0, task.env_steps, POINTS + 1)
    for cell, color, dash in zip(task.cells, COLORS, DASHES, strict=False):
        found = runs[cell.source]
        curves = []
        for run in found:
            # The curve shows training episodes, so it does not include the return of an evaluation.
            last = [] if task.episodes else [[run["env_steps"], run["return"]]]
            steps, means = np.array([*run["curve"], *last]).T
            shown = np.interp(grid, steps, means, left=np.nan)
            curves.append(shown)
            thin = {"color": color, "width": 0.7}
            figure.add_scatter(x=grid, y=shown, line=thin, opacity=0.5, showlegend=False)
        if curves:
            whole = [interquartile_mean(column) for column in np.array(curves).T]
            line = {"color": color, "width": 3, "dash": dash}
            figure.add_scatter(x=grid, y=whole, name=cell.title, line=line)
    figure.update_layout(
        template="plotly_white",
        width=900,
        height=420,
        # The legend has three entries per line.
        margin={"t": 50 + 20 * -(-len(task.cells) // 3), "b": 60, "l": 70, "r": 20},
        xaxis_title="environment steps",
        yaxis_title="mean return of the last 100 episodes",  # training episodes
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        title={"text": name, "y": 0.97},
    )
    return figure


def runs_of(name: str, store: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the stored runs of a task, by the source of the trainer."""
    return {
        cell.source: [
            store[key] for seed in SEEDS if (key := f"{name}/{cell.source}/{seed}") in store
        ]
        for cell in TASKS[name].cells
    }


def image_of(name: str) -> str:
    """Returns the name of the file with the learning curves of a task."""
    return "task-" + re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".png"


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the tables of the stored runs."""
    lines = []
    for name, task in TASKS.items():
        runs = runs_of(name, store)
        lines += table(name, task, runs)
        commits = sorted({run["commit"] for found in runs.values() for run in found})
        if commits:
            lines += [f"Commits: {', '.join(commits)}.", ""]
        if commits and has_curves(task):
            lines += [f"![Learning curves of {name}](images/{image_of(name)})", ""]
    facts = ", ".join(f"{name} {value}" for name, value in store.get("about", {}).items())
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    head, rest = text.split(begin)
    lines += [f"Last run: {facts or 'none'}.", ""]
    text = head + begin + "\n".join(lines) + end + rest.split(end)[1]
    marks = r"(<!-- validated: begin -->\n).*(\n<!-- validated: end -->)"
    return re.sub(marks, lambda m: m[1] + "\n".join(validated(store)) + m[2], text, flags=re.DOTALL)


def validated(store: dict[str, Any]) -> list[str]:
    """Returns the table of the tuned examples: how many stored seeds reached the goal."""
    rows = []
    for name, task in TASKS.items():
        for cell in task.cells:
            path, found = EXAMPLES / f"{cell.source}.yaml", runs_of(name, store)[cell.source]
            if not path.is_file() or not found:
                continue
            example = yaml.safe_load(path.read_text())
            goal = example["goal"]
            if task.episodes:  # training episodes explore, so only the evaluation counts
                steps = [run["env_steps"] for run in found if run["return"] >= goal]
                how = f"{task.episodes} evaluation episodes"
            else:
                steps = [reached for run in found if (reached := steps_to(goal, run)) < math.inf]
                how = "the last 100 training episodes"
            env = str(example["config"]["env"]).rpartition(":")[2]
            cells = (
                *(f"`{example['run']}`", f"`{path.stem}`", env, f"{goal:,}"),
                *(f"{task.env_steps:,}", f"{len(steps)} of {len(found)}"),
                *(f"{median(steps):,.0f}" if steps else "", how),
            )
            rows.append(f"| {' | '.join(cells)} |")
    order = {f"`{name}`": n for n, name in enumerate(PRESET_ORDER)}
    rows.sort(key=lambda row: (order[row.split(" ")[1]], row))
    head = (
        "| preset | tuned example | task | goal | budget | seeds | after steps | mean return of |"
    )
    return [head, "|---|---|---|---:|---:|---|---:|---|", *rows]


def published(store: dict[str, Any]) -> str:
    """Returns the results of tuned examples with all seeds, for `polopt reproduce`, as JSON with a
    line for each."""
    lines = []
    for name, task in TASKS.items():
        runs = runs_of(name, store)
        for cell in task.cells:
            example, found = EXAMPLES / f"{cell.source}.yaml", runs[cell.source]
            if example.is_file() and len(found) == len(SEEDS):
                one = {
                    "example": cell.source,
                    "preset": yaml.safe_load(example.read_text())["run"],
                    "task": name,
                    "env_steps": task.env_steps,
                    "episodes": task.episodes,
                    "seconds": round(median(run["seconds"] for run in found), 1),
                    "commits": sorted({run["commit"] for run in found}),
                    "returns": {
                        str(seed): run["return"] for seed, run in zip(SEEDS, found, strict=True)
                    },
                }
                lines.append(json.dumps(one))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def write_page(store: dict[str, Any]) -> None:
    """Writes the page, the file of `polopt reproduce` and then the figures from the stored runs.
    Figures need Chrome."""
    PAGE.write_text(page(store, PAGE.read_text()))
    PUBLISHED.write_text(published(store))
    for name, task in TASKS.items():
        figure = figure_of(name, task, runs_of(name, store))
        if figure is not None:
            figure.write_image(IMAGES / image_of(name), scale=2)


def main() -> None:
    """Measures the runs that are not stored yet, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--cells", nargs="*", help="sources of trainers (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder of the peers' environments"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--env-steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        budget = given.env_steps, given.episodes
        print(json.dumps(train_example(given.train, given.seeds[0], *budget)), flush=True)
        return
    store = read_runs(STORE)
    cells = [
        (name, cell)
        for name in given.only
        for cell in TASKS[name].cells
        if not given.cells or cell.source in given.cells
    ]
    facts = about()  # before the store changes the working tree
    for seed in [] if given.page else given.seeds:
        for name, cell in cells:
            key = f"{name}/{cell.source}/{seed}"
            if key in store:
                continue
            try:
                found = measure(cell, seed, TASKS[name], given.cache)
                store[key] = {**found, "commit": facts["commit"]}
            except PeerError as error:
                print(f"{key}: {error}", file=sys.stderr, flush=True)
                continue
            store["about"] = facts
            write_runs(STORE, store)
            shown = {part: store[key][part] for part in ("return", "seconds", "env_steps")}
            print(key, shown, flush=True)
    write_page(store)


if __name__ == "__main__":
    main()
