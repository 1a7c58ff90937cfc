"""Measures environments with several agents.

    pip install -e '.[agents]' 'ray[rllib]'
    python benchmarks/many_agents.py            # 5 minutes
    python benchmarks/many_agents.py --page     # only writes the tables from the stored runs

The cases `peer` and `vector` run if their packages are installed. BenchMARL needs an older TorchRL,
so they have an environment of their own (2 minutes):

    pip install benchmarl==1.5.2 && pip install --no-deps pufferlib-core==3.0.23
    python benchmarks/many_agents.py --only peer vector

- `sampling`: a worker with K copies of an environment with A agents, beside a worker with K * A
  copies of an environment with one agent. Both share a PPO policy of 64x64 tanh units, and sample
  fragments of 128 steps. Each step runs an empty loop for each agent, so that a row costs the same
  in both environments. They return constant arrays.
- `training`: PPO with one shared policy, beside RLlib's PPO on its new API stack. Both train in
  this process, without workers: 4 copies, 512 environment steps per batch, 4 epochs of minibatches
  of 256 rows, separate networks of 64x64 tanh units for policy and value.
  polopt makes `simple_spread` without PettingZoo's wrappers that only check how it is used. In the
  case `with checks`, a function makes it with them, as for RLlib.
- `environment`: steps of `simple_spread` alone, without and with these wrappers. No library that
  uses the environment can be faster.
- `policies`: PPO with two policies, beside one policy that has a name.
- `peer`: the PPO of `training`, beside BenchMARL's IPPO with the same numbers. Its task
  SIMPLE_SPREAD does not find MPE2, so it gets the environment from a function. BenchMARL counts
  minibatches in steps of all agents, so 85 of them are 255 rows.
- `vector`: steps of 8 copies without a policy, beside PufferLib's serial vector.

All measurements are in one process with one thread, and take turns. A rate is agent steps per
second of processor time, because other programs change wall times more. Each turn is stored in
`benchmarks/results/many_agents.jsonl`, and the tables are written to `docs/many-agents.md`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import THREADS

os.environ.update(dict.fromkeys(THREADS, "1"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# isort: split
import gymnasium
import numpy as np
from about import about
from gymnasium import spaces
from stored_runs import between, read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/many_agents.jsonl"
PAGE = ROOT / "docs/many-agents.md"
STEPS, EPISODE, COPIES = 128, 100, 4
OBSERVATION = spaces.Box(-1.0, 1.0, (18,), np.float32)
ACTION = spaces.Discrete(5)
#: Agents of an environment, copies, and passes of the loop.
SAMPLING = [(agents, 24 // agents, loops) for loops in (0, 500, 2000) for agents in (3, 8)]
SPREAD = "mpe2:simple_spread_v3"


class One(gymnasium.Env[Any, Any]):
    """An environment with one agent."""

    observation_space, action_space = OBSERVATION, ACTION

    def __init__(self, loops: int) -> None:
        self.loops, self.constant = loops, np.zeros(18, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.constant, {}

    def step(self, action: Any) -> Any:
        for _ in range(self.loops):
            pass
        self.steps += 1
        return self.constant, 1.0, False, self.steps == EPISODE, {}


class Many:
    """An environment with A agents, in the form of PettingZoo's ParallelEnv."""

    render_mode = None

    def __init__(self, agents: int, loops: int) -> None:
        self.metadata: dict[str, Any] = {}
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.loops, self.constant = loops * agents, np.zeros(18, np.float32)

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = self.possible_agents, 0
        return dict.fromkeys(self.agents, self.constant), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        for _ in range(self.loops):
            pass
        self.steps += 1
        over, agents = self.steps == EPISODE, self.agents
        if over:
            self.agents = []
        return (
            dict.fromkeys(agents, self.constant),
            dict.fromkeys(agents, 1.0),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            {agent: {} for agent in agents},
        )

    def close(self) -> None:
        pass


def make_toy(context: Any) -> Many:
    """Three agents."""
    return Many(3, 0)


def make_worker(make: Callable[[], Any], copies: int) -> Any:
    """Makes a worker in this process."""
    return polopt.GradientWorkerSet.create_factory(
        make,
        ("ppo", {"model": {"fcnet_hiddens": [64, 64]}}),
        num_workers=0,
        num_envs_per_worker=copies,
        vectorization_mode="sync",
        rollout_fragment_length=STEPS,
        seed=0,
    )().local


def sampler(worker: Any) -> Callable[[], int]:
    """Returns a function that samples four fragments and returns their agent steps."""
    return lambda: sum(worker.sample().agent_steps for _ in range(4))


def polopt_ppo(env: Any, **options: Any) -> Callable[[], int]:
    """Returns a function that trains on one batch and returns its agent steps."""
    trainer = polopt.SyncPPO(
        env=env,
        num_workers=0,
        num_envs_per_worker=COPIES,
        rollout_fragment_length=STEPS,
        train_batch_size=COPIES * STEPS,
        num_sgd_iter=4,
        sgd_minibatch_size=256,
        model={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False},
        lr=3e-4,
        min_sample_timesteps_per_iteration=0,
        min_time_s_per_iteration=0,
        seed=0,
        **options,
    )
    return counter(trainer)


def rllib_ppo(make: Callable[[Any], Any]) -> Callable[[], int]:
    """The same for RLlib's PPO."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    register_env("peer", lambda context: ParallelPettingZooEnv(make(context)))
    network = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    config = (
        PPOConfig()
        .environment("peer", disable_env_checking=True)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=COPIES)
        .env_runners(rollout_fragment_length=STEPS)
        .learners(num_learners=0)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        .rl_module(model_config=network)
        .training(train_batch_size_per_learner=COPIES * STEPS, minibatch_size=256, num_epochs=4)
        .training(lr=3e-4, use_kl_loss=False, grad_clip=0.5)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return counter(config.build_algo())


def counter(trainer: Any) -> Callable[[], int]:
    """Returns a function that trains once and returns the agent steps that were sampled."""
    total = 0

    def train() -> int:
        nonlocal total
        counts = trainer.train()["env_runners"]["num_agent_steps_sampled_lifetime"]
        before = total
        total = int(sum(counts.values()) if isinstance(counts, dict) else counts)
        return total - before

    return train


def make_spread(context: Any) -> Any:
    """MPE2's simple_spread."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def benchmarl_ippo() -> Callable[[], int]:
    """The same as `polopt_ppo` for BenchMARL's IPPO. It trains in a thread that waits between two
    calls."""
    import torch
    from benchmarl.algorithms import IppoConfig
    from benchmarl.environments.pettingzoo.common import PettingZooClass
    from benchmarl.experiment import Callback, Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig
    from torchrl.envs import PettingZooWrapper

    def make_spread_for_torchrl(*args: Any, seed: int, device: Any, **kwargs: Any) -> Any:
        options = {"categorical_actions": True, "use_mask": False}
        return lambda: PettingZooWrapper(make_spread(None), seed=seed, device=device, **options)

    # The task is pickled, so it cannot have a class of its own.
    PettingZooClass.get_env_fun, PettingZooClass.has_state = (
        make_spread_for_torchrl,
        lambda _: False,
    )
    begin, end = threading.Semaphore(0), threading.Semaphore(0)

    class Wait(Callback):  # type: ignore[misc, no-any-unimported]
        def on_train_end(self, *args: Any) -> None:
            end.release()
            begin.acquire(timeout=900)

    config = ExperimentConfig.get_from_yaml()
    options = {
        "on_policy_collected_frames_per_batch": COPIES * STEPS,
        "on_policy_n_envs_per_worker": COPIES,
        "on_policy_n_minibatch_iters": 4,
        "on_policy_minibatch_size": 85,
        "lr": 3e-4,
        "clip_grad_val": 0.5,
        "prefer_continuous_actions": False,
        "evaluation": False,
        "loggers": [],
        "create_json": False,
        "save_folder": tempfile.mkdtemp(),
    }
    for name, value in options.items():
        setattr(config, name, value)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    network = MlpConfig(num_cells=[64, 64], activation_class=tanh, layer_class=linear)
    experiment = Experiment(
        task=PettingZooClass("SIMPLE_SPREAD", {"max_cycles": 25}),
        algorithm_config=IppoConfig.get_from_yaml(),
        model_config=network,
        critic_model_config=network,
        seed=0,
        config=config,
    )
    experiment.callbacks = [Wait()]  # the argument would be pickled
    thread = threading.Thread(target=experiment.run, daemon=True)

    def train() -> int:
        if thread.ident is None:
            thread.start()
        else:
            begin.release()
        if not end.acquire(timeout=900):
            raise TimeoutError("BenchMARL did not train in 900 s")
        return COPIES * STEPS * 3

    return train


def polopt_vector(env: Any, copies: int) -> Callable[[], int]:
    """Returns a function that steps copies 128 times and returns their agent steps."""
    slots = make_worker(env, copies).sampler.env
    actions = np.zeros(slots.num_envs, dtype=np.int64)

    def steps() -> int:
        for _ in range(STEPS):
            slots.step(actions)
        return STEPS * slots.num_envs

    return steps


def puffer_vector(make: Callable[[], Any], copies: int, length: int) -> Callable[[], int]:
    """The same for PufferLib. One of `length + 1` steps only resets."""
    from pufferlib import emulation, vector

    def wrapped(**options: Any) -> Any:
        return emulation.PettingZooPufferEnv(env_creator=make, **options)

    envs = vector.make(wrapped, backend=vector.Serial, num_envs=copies)
    envs.reset(seed=0)
    actions = np.zeros(envs.num_agents, dtype=np.int64)

    def steps() -> int:
        for _ in range(STEPS):
            envs.step(actions)
        return round(STEPS * envs.num_agents * length / (length + 1))

    return steps


def bare_steps(env: Any) -> Callable[[], int]:
    """Returns a function that steps one ParallelEnv, and returns its agent steps."""
    env.reset(seed=0)

    def steps() -> int:
        count = 0
        for _ in range(STEPS):
            if not env.agents:
                env.reset()
            count += len(env.agents)
            env.step(dict.fromkeys(env.agents, 0))
        return count

    return steps


def made_by_id(name: str) -> Any:
    """The environment that polopt makes for an id."""
    return make_worker(name, 1).sampler.env.vector.envs[0].env.env


TWO = {"policies": ["a", "b"], "policy_mapping_fn": {"agent_0": "a", "*": "b"}}


def cases() -> dict[str, Callable[[], tuple[Callable[[], int], Callable[[], int]]]]:
    """The pairs of each case: what is measured, and what it is compared with."""
    found: dict[str, Any] = {}
    for agents, copies, loops in SAMPLING:
        name = f"sampling, {copies} copies of {agents} agents, {loops} passes"
        found[name] = lambda a=agents, k=copies, n=loops: (
            sampler(make_worker(lambda: Many(a, n), k)),
            sampler(make_worker(lambda: One(n), a * k)),
        )
    found["training, simple_spread"] = lambda: (polopt_ppo(SPREAD), rllib_ppo(make_spread))
    found["training, simple_spread with checks"] = lambda: (
        polopt_ppo(make_spread),
        rllib_ppo(make_spread),
    )
    found["training, toy"] = lambda: (polopt_ppo(make_toy), rllib_ppo(make_toy))
    named = {"policies": ["a"]}
    found["policies, simple_spread"] = lambda: (
        polopt_ppo(SPREAD, **TWO),
        polopt_ppo(SPREAD, **named),
    )
    found["policies, toy"] = lambda: (polopt_ppo(make_toy, **TWO), polopt_ppo(make_toy, **named))
    found["environment, simple_spread"] = lambda: (
        bare_steps(made_by_id(SPREAD)),
        bare_steps(make_spread(None)),
    )
    if importlib.util.find_spec("benchmarl"):
        found["peer, simple_spread"] = lambda: (polopt_ppo(make_spread), benchmarl_ippo())
    if importlib.util.find_spec("pufferlib"):
        found["vector, simple_spread"] = lambda: (
            polopt_vector(lambda: make_spread(None), 8),
            puffer_vector(lambda: make_spread(None), 8, 25),
        )
        found["vector, toy"] = lambda: (
            polopt_vector(lambda: Many(3, 0), 8),
            puffer_vector(lambda: Many(3, 0), 8, EPISODE),
        )
    return found


def rate(run: Callable[[], int], seconds: float) -> dict[str, float]:
    """Repeats a function for at least `seconds` of processor time."""
    steps, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
    while (cpu_s := time.process_time() - began_cpu_s) < seconds:
        steps += run()
    wall_s = time.perf_counter() - began_s
    return {"agent_steps": steps, "cpu_s": cpu_s, "wall_s": wall_s}


def measure(name: str, turns: int, seconds: float) -> dict[str, Any]:
    """Measures a pair in turns."""
    pair = cases()[name]()
    for run in pair:  # warms up
        run()
        run()
    measured = []
    for turn in range(turns):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {place: rate(pair[place], seconds) for place in order}
        measured.append([found[0], found[1]])
    return {"turns": measured, "commit": about()["commit"], "load": os.getloadavg()[0]}


def table(runs: dict[str, Any]) -> str:
    """Returns the tables in Markdown."""
    lines = [
        "| what | agent steps/s | beside | agent steps/s | ratio (quartiles) |",
        "|---|---:|---|---:|---:|",
    ]
    beside = {
        "sampling": "one agent",
        "training": "RLlib 2.60",
        "policies": "one policy",
        "environment": "with checks",
        "peer": "BenchMARL",
        "vector": "PufferLib",
    }
    order = list(beside)
    for name in sorted(
        runs.keys() - {"about"}, key=lambda one: (order.index(one.partition(",")[0]), one)
    ):
        rates = [
            [one["agent_steps"] / one["cpu_s"] for one in turn] for turn in runs[name]["turns"]
        ]
        ours, others = (statistics.median(column) for column in zip(*rates, strict=True))
        low, middle, high = statistics.quantiles([a / b for a, b in rates], n=4)
        lines.append(
            f"| {name} | {ours:,.0f} | {beside[name.partition(',')[0]]} | {others:,.0f} | "
            f"{middle:.2f} ({low:.2f} to {high:.2f}) |"
        )
    commits = sorted({run["commit"] for run in runs.values()})
    others = [f"{key} {value}" for key, value in runs["about"].items() if key != "commit"]
    return "\n".join([*lines, "", f"commit {' and '.join(commits)}, {', '.join(others)}."])


def page(runs: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the tables of the stored results."""
    begin, end = "<!-- many_agents: begin -->", "<!-- many_agents: end -->"
    return between(text, begin, end, table(runs).splitlines())


def main() -> None:
    """Measures, stores, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names of cases")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="processor time of a turn")
    parser.add_argument("--page", action="store_true", help="only write the tables")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    runs = read_runs(STORE)
    for name in () if args.page else cases():
        if not args.only or name.startswith(tuple(args.only)):
            runs[name] = measure(name, args.turns, args.seconds)
            if not name.startswith(("peer", "vector")):  # they may have another version of torch
                runs["about"] = about()
            runs.setdefault("about", about())
            write_runs(STORE, runs)
            print(name, file=sys.stderr, flush=True)
    PAGE.write_text(page(runs, PAGE.read_text()))
    print(table(runs))


if __name__ == "__main__":
    main()
