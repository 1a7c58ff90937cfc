"""What this machine can do at most, and how far each optimizer is from it.

    .venv/bin/python benchmarks/limits.py [--repeats 7] [--seconds 4]

First the cost of each thing that training is made of, on one core, CartPole-v1, MLP 64x64; then the
rate at which an optimizer would train if there were nothing but those, as formulas with the numbers
in them; then the rate at which it trains. Costs take turns, and medians go into the formulas, so
that a change in the machine's speed meets all alike. Prints Markdown, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np
import ray
import torch
import torch.distributed as dist
from about import about
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from training_speed import measure

import polopt
from polopt.rollouts.collective import AllReducer, GroupSpec, start_store
from polopt.rollouts.direct_calls import answer, connect
from polopt.rollouts.switchboard import Switchboard

WORKERS, ENVS = 2, 8
#: Parameters of two MLPs of 64 x 64 for CartPole-v1, and one to spare for each statistic summed.
FLOATS = 9_155
BLOCK_S = 0.15


def cartpoles(count: int) -> SyncVectorEnv:
    """As polopt makes them: no checker, reset in the same step, observations not copied."""
    make = lambda: gymnasium.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
    return SyncVectorEnv([make] * count, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def stepping(env: Any) -> Callable[[], None]:
    """One step of all its environments, with actions drawn beforehand."""
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(2, size=(1000, env.num_envs))
    numbers = iter(range(10**9))

    def step() -> None:
        env.step(actions[next(numbers) % 1000])

    return step


def writing_down(policy: polopt.Policy) -> Callable[[], None]:
    """One step's action from its parameters, and six rows of a fragment of 8."""
    obs, params = np.zeros((ENVS, 4), np.float32), np.zeros((ENVS, 2), np.float32)
    noise = policy.dist.draw_noise(np.random.default_rng(0), ENVS)
    rows = [np.empty((ENVS, *shape), dtype) for shape, dtype in _COLUMNS]
    ended = np.zeros(ENVS, bool)

    def write() -> None:
        actions = policy.dist.sample(params, noise)
        for row, value in zip(rows, (obs, params, actions, 1.0, ended, ended), strict=True):
            row[...] = value

    return write


_COLUMNS: list[tuple[tuple[int, ...], Any]] = [
    ((4,), np.float32),
    ((2,), np.float32),
    ((), np.int64),
    ((), np.float32),
    ((), bool),
    ((), bool),
]


def local(preset: type[polopt.PolicyOptimizerTrainer], steps: int) -> tuple[polopt.Policy, Any]:
    """A policy, and a postprocessed fragment `[steps, 8]` sampled with it in this process."""
    trainer = preset(
        config={
            "env": "CartPole-v1",
            "num_workers": 0,
            "num_envs_per_worker": ENVS,
            "rollout_fragment_length": steps,
            "seed": 0,
        }
    )
    batch = trainer.workers.local.sample()
    trainer.stop()
    return trainer.get_policy(), batch


def learning(policy: polopt.Policy, batch: Any, rows: int) -> Callable[[], None]:
    """Forward, backward, clipping and fused Adam of one minibatch."""
    minibatch = {name: column[:rows] for name, column in policy.training_rows(batch).items()}

    def learn() -> None:
        policy.backward(minibatch)
        policy.apply_flat()

    return learn


@ray.remote
class Other:
    """The other end of calls and sums."""

    def echo(self, array: np.ndarray) -> np.ndarray:
        """Gives back what came."""
        return array

    def serve(self, address: tuple[str, int], token: bytes) -> str:
        """Answers direct calls."""
        answer(self, connect(address, token))
        return ""

    def join(self, spec: GroupSpec, rank: int) -> None:
        """Becomes a rank of two."""
        torch.set_num_threads(1)
        self.reducer = AllReducer(spec, rank)

    def sums(self, count: int, by_gloo: bool) -> float:
        """Seconds for each of so many sums."""
        tensor = torch.zeros(FLOATS)
        add: Callable[[torch.Tensor], Any] = dist.all_reduce if by_gloo else self.reducer.sum_
        started_s = time.perf_counter()
        for _ in range(count):
            add(tensor)
        return (time.perf_counter() - started_s) / count


def timed(function: Callable[[], object], calls: int = 1) -> float:
    """Seconds for one of the `calls` that `function` makes, over at least `BLOCK_S`."""
    done, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < BLOCK_S:
        function()
        done += calls
    return (time.perf_counter() - started_s) / done


def cases() -> dict[str, Callable[[], float]]:
    """Each cost by its name: what measures it once, in seconds."""
    (a3c, rollout), (ppo, batch) = local(polopt.A2C, 20), local(polopt.SyncPPO, 64)
    obs, array = np.zeros((ENVS, 4), np.float32), np.zeros(FLOATS, np.float32)
    actors = [Other.remote(), Other.remote()]
    store = start_store("127.0.0.1")
    spec = GroupSpec("127.0.0.1", store.port, 1, 2, "gloo", 60.0, 60.0)
    ray.get([actor.join.remote(spec, rank) for rank, actor in enumerate(actors)], timeout=120)
    board, served = Switchboard("127.0.0.1", 60.0), Other.remote()
    line = board.line(None, served)

    def call() -> None:
        ray.get(actors[0].echo.remote(array), timeout=60)

    def many_calls() -> None:
        ray.get([actors[0].echo.remote(array) for _ in range(32)], timeout=60)

    def direct_call() -> None:
        asked = line.ask("echo", (array,))
        if not board.wait([asked], 60.0):
            raise TimeoutError("no answer to a direct call")
        asked.result(60.0)

    direct_call()  # the actor has to start, and to connect

    def sums(by_gloo: bool) -> float:
        return max(ray.get([actor.sums.remote(200, by_gloo) for actor in actors], timeout=60))

    functions: dict[str, Callable[[], None]] = {
        "env": stepping(cartpoles(ENVS)),
        "env64": stepping(gymnasium.make_vec("CartPole-v1", 64, "vector_entry_point")),
        "act": lambda: (a3c.action_params(obs), None)[1],
        "act_torch": lambda: (a3c.torch_action_params(obs), None)[1],
        "write": writing_down(a3c),
        "gradient": lambda: (a3c.compute_gradients(rollout), None)[1],
        "apply": lambda: (a3c.apply_flat(), None)[1],
        "learn128": learning(ppo, batch, 128),
        "learn256": learning(ppo, batch, 256),
        "call": call,
        "direct": direct_call,
    }
    measured = {name: (lambda f=f: timed(f)) for name, f in functions.items()}
    return measured | {
        "pipelined": lambda: timed(many_calls, 32),
        "sum": lambda: sums(by_gloo=False),
        "allreduce": lambda: sums(by_gloo=True),
    }


NAMES = {
    "env": f"one step of {ENVS} CartPoles in a sync vector",
    "env64": "one step of CartPoleVectorEnv with 64",
    "act": "acting at batch 8, NumPy",
    "act_torch": "acting at batch 8, torch",
    "write": "action of parameters and noise, and one step written down, batch 8",
    "gradient": "gradient of 160 rows (A3C)",
    "apply": "clipping and fused Adam",
    "learn128": "forward, backward, clipping, fused Adam of 128 rows (PPO)",
    "learn256": "the same of 256 rows",
    "call": f"Ray round trip with an array of {FLOATS:,} floats, there and back",
    "pipelined": "the same, 32 calls at once, each",
    "direct": "the same by a direct call, one at a time",
    "sum": f"sum of {FLOATS:,} floats over 2 processes",
    "allreduce": "the same by gloo's all-reduce",
}


def ceilings(cost: dict[str, float], cores: int) -> dict[str, tuple[float, str]]:
    """Environment steps per second that the costs (seconds) allow, and how that comes out."""
    us = {name: f"{seconds * 1e6:.0f}" for name, seconds in cost.items()}
    step = cost["env"] + cost["act"] + cost["write"]
    step_said = f"({us['env']} + {us['act']} + {us['write']})"
    driver = cost["direct"] + cost["apply"]
    round_s = 20 * step + cost["gradient"]
    share = min(WORKERS, cores)  # of workers that can run at once
    rows = WORKERS * ENVS * 128
    turns = -(-WORKERS // share)  # sampling takes so many times that of one worker
    sync_s = turns * 128 * step + 32 * cost["learn256"] + cost["call"]
    ddppo_s = turns * (128 * step + 32 * cost["learn128"]) + 32 * cost["sum"] + cost["call"]
    return {
        # A core that works for the driver does not work for a worker meanwhile.
        "A3C": (
            share * 160 / (round_s + driver * share / cores),
            f"{share} workers at once x 160 steps / (20 x {step_said} us + {us['gradient']} us + "
            f"{share}/{cores} x ({us['direct']} + {us['apply']}) us of the driver)",
        ),
        "SyncPPO": (
            rows / sync_s,
            f"{rows:,} steps / ({turns} x 128 x {step_said} us + 4 epochs x 8 minibatches x "
            f"{us['learn256']} us + {us['call']} us)",
        ),
        "DDPPO": (
            rows / ddppo_s,
            f"{rows:,} steps / ({turns} x (128 x {step_said} us + 4 x 8 x {us['learn128']} us) + "
            f"4 x 8 x {us['sum']} us + {us['call']} us)",
        ),
    }


def print_costs(costs: dict[str, list[float]]) -> None:
    """Median and range of each, and steps per second where it steps."""
    print("| what | us, median (range) | a second |\n|---|---:|---:|")
    for name, values in costs.items():
        median = statistics.median(values)
        spread = f"{min(values) * 1e6:,.1f} to {max(values) * 1e6:,.1f}"
        envs = {"env": ENVS, "env64": 64}.get(name)
        rate = f"{envs / median:,.0f} steps" if envs else f"{1 / median:,.0f}"
        print(f"| {NAMES[name]} | {median * 1e6:,.1f} ({spread}) | {rate} |")


def main() -> None:
    """Measures, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="of each cost")
    parser.add_argument("--seconds", type=float, default=4.0, help="of training; 0: none")
    parser.add_argument("--out", type=Path, default=Path("results/limits.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    costs: dict[str, list[float]] = {name: [] for name in NAMES}
    measured = cases()
    for _ in range(args.repeats):
        for name, values in costs.items():
            values.append(measured[name]())
    del measured  # and with it the actors
    median = {name: statistics.median(values) for name, values in costs.items()}
    limits = ceilings(median, cores)
    config = {"env": "CartPole-v1", "num_workers": WORKERS, "num_envs_per_worker": ENVS, "seed": 0}
    rates = {name: measure(name, config, args.seconds) for name in limits if args.seconds > 0}
    ray.shutdown()

    print_costs(costs)
    print(f"\n| optimizer, {WORKERS} workers x {ENVS} | ceiling, steps/s | trains at | share |")
    print("|---|---:|---:|---:|")
    for name, (ceiling, _) in limits.items():
        reached = f"{rates[name]:,.0f} | {rates[name] / ceiling:.0%}" if rates else "- | -"
        print(f"| {name} | {ceiling:,.0f} | {reached} |")
    print()
    for name, (ceiling, formula) in limits.items():
        print(f"- {name}: {formula} = {ceiling:,.0f} steps/s")
    where = about()
    print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"about": where, "costs_s": costs, "ceilings": limits, "rates": rates}
    args.out.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
