"""Predicts rates of training, writes them down, and then measures them.

    python benchmarks/predicted_rates.py                       # all that is missing
    python benchmarks/predicted_rates.py --only A3C constant   # some cases
    python benchmarks/predicted_rates.py --page                # only writes the page

The script runs in two halves. The first half predicts every case, and stores all predictions in
`benchmarks/results/predicted_rates.jsonl`. The second half measures the same cases with real
workers. A case that the file contains is not repeated, so the script may be stopped at any time. A
prediction that is missing is only made as long as no run of its case was measured.

Environments sleep, so that two cores are enough for 16 workers: for a constant time, for an
exponential time, or for a heavy-tailed (lognormal) time, all with the same mean. The page is
`docs/plan.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from about import about
from stored_runs import read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/predicted_rates.jsonl"
PAGE = ROOT / "docs/plan.md"
PLUGINS = ROOT / "docs/write-an-optimizer.md"
WORKERS = (4, 8, 16)
#: Mean duration of a step of a sleeping environment, and the most that one step sleeps.
MEAN_S, MOST_S = 0.002, 0.2
#: Shape of the lognormal sleep. The standard deviation is 1.8 times the mean.
SIGMA = 1.2
SLEEPS = ("constant", "exponential", "heavy")
#: Options of all cases.
COMMON: dict[str, Any] = {"num_envs_per_worker": 1, "rollout_fragment_length": 10}
_REPLAY = {"buffer_size": 20_000, "learning_starts": 500}
#: The strategies: experiment and options.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "async_gradients": ("A3C", {}),
    "sync_gradients": (
        "PolicyOptimizerTrainer",
        {"optimizer": "sync_gradients", "policy": "a2c", "grads_per_step": 32},
    ),
    "sync_samples": ("A2C", {}),
    "async_samples": ("IMPALA", {"train_batch_size": 40}),
    "decentralized_allreduce": ("DDPPO", {"num_sgd_iter": 2}),
    "sync_replay": ("DQN", {**_REPLAY, "training_intensity": 1.0}),
    "async_replay": (
        "ApexDQN",
        {**_REPLAY, "training_intensity": 1.0, "num_replay_shards": 1, "train_batch_size": 64},
    ),
    "local_sgd": ("PolicyOptimizerTrainer", {"optimizer": "local_sgd", "policy": "a2c"}),
    "elastic_averaging": (
        "PolicyOptimizerTrainer",
        {"optimizer": "elastic_averaging", "policy": "a2c"},
    ),
}
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


class Sleeping(gymnasium.Env[np.ndarray, int]):
    """Sleeps in each step. The time has the mean `MEAN_S`.

    Args:
        sleep: the distribution of the time, one of `SLEEPS`.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sleep: str = "constant") -> None:
        self.sleep = sleep
        self.steps = 0
        self.generator = np.random.default_rng(int.from_bytes(os.urandom(8), "big"))

    def duration_s(self) -> float:
        """Draws the time of one step."""
        if self.sleep == "constant":
            return MEAN_S
        if self.sleep == "exponential":
            return float(self.generator.exponential(MEAN_S))
        return min(MOST_S, float(self.generator.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.duration_s())
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps == 500, False, {}


def make_sleeping(config: Any) -> Sleeping:
    """Returns an environment for the options `env_config`."""
    return Sleeping(config["sleep"])


def register_plugins() -> None:
    """Runs the code of the two plugins that the documentation prints."""
    for block in re.findall(r"```python\n(.*?)```", PLUGINS.read_text(), re.DOTALL):
        for name in ("local_sgd", "elastic_averaging"):
            if f'register_optimizer("{name}"' in block:
                exec(compile(block, PLUGINS.name, "exec"), {"__name__": f"page_with_{name}"})


def options_of(strategy: str, sleep: str) -> dict[str, Any]:
    """Returns the options of a case, without the number of workers."""
    own = STRATEGIES[strategy][1]
    return {"env": make_sleeping, "env_config": {"sleep": sleep}, **COMMON, **own}


def cases(only: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the strategies and distributions that are named, by the name of a strategy, of its
    preset, or of a distribution. Without the name of a strategy, yields all of them, and so on."""
    sleeps = [word for word in only if word in SLEEPS] or SLEEPS
    names = [word for word in only if word not in SLEEPS]
    for strategy, (preset, _) in STRATEGIES.items():
        if not names or strategy in names or preset in names:
            yield from ((strategy, sleep) for sleep in sleeps)


def key(kind: str, strategy: str, sleep: str, workers: int) -> str:
    """Returns the name of a stored entry."""
    return f"{kind} {strategy} {sleep} {workers}"


def predict_all(
    store: dict[str, Any], chosen: list[tuple[str, str]], workers: list[int], seconds: float
) -> None:
    """Makes the predictions that are missing, and stores each of them."""
    earlier: dict[bool, Any] = {}
    for strategy, sleep in chosen:
        wanted = [
            count
            for count in workers
            if key("predicted", strategy, sleep, count) not in store
            and key("measured", strategy, sleep, count) not in store
        ]
        if not wanted:
            continue
        # Only the calibration of this strategy measures an all-reduce.
        reduces = strategy == "decentralized_allreduce"
        forecast = polopt.predict(
            STRATEGIES[strategy][0],
            {**options_of(strategy, sleep), "num_workers": 2},
            workers=[1, *wanted],
            seconds=seconds,
            repeats=3,
            budget_s=0.5,
            earlier=earlier.get(reduces),
        )
        earlier.setdefault(reduces, forecast)
        one = forecast.predictions[0].env_steps_per_s
        for prediction in forecast.predictions[1:]:
            name = key("predicted", strategy, sleep, prediction.workers)
            store[name] = {
                "rate": round(prediction.env_steps_per_s, 1),
                "low": round(prediction.low, 1),
                "high": round(prediction.high, 1),
                "one_worker": round(one, 1),
                "lag": round(prediction.policy_lag, 2),
                "bottleneck": prediction.bottleneck,
                "at": round(time.time()),
            }
            print(name, store[name]["rate"], flush=True)
        write_runs(STORE, store)


def measure_all(
    store: dict[str, Any], chosen: list[tuple[str, str]], workers: list[int], seconds: float
) -> None:
    """Measures what is missing. The processes of one number of workers serve all cases."""
    for count in workers:
        trainer: Any = None
        for strategy, sleep in chosen:
            name = key("measured", strategy, sleep, count)
            if name in store or key("predicted", strategy, sleep, count) not in store:
                continue
            config = {
                **options_of(strategy, sleep),
                "num_workers": count,
                "num_cpus_per_worker": 0.1,
                "min_sample_timesteps_per_iteration": 0,
                "min_time_s_per_iteration": 0.5,
                "preset": STRATEGIES[strategy][0],
            }
            if config["preset"] == "PolicyOptimizerTrainer":
                del config["preset"]
            try:
                if trainer is None:
                    trainer = polopt.PolicyOptimizerTrainer(config)
                else:
                    trainer.reset_config(config)
                store[name] = measured(trainer, seconds)
            except Exception as error:  # one case that fails must not end the others
                print(name, "failed:", error, flush=True)
                if trainer is not None:
                    with contextlib.suppress(Exception):
                        trainer.stop()
                trainer = None
                continue
            print(name, store[name]["rate"], flush=True)
            write_runs(STORE, store)
        if trainer is not None:
            trainer.stop()


def measured(trainer: Any, seconds: float) -> dict[str, Any]:
    """Measures the rate of a trainer, once it has learned for a second."""

    def train() -> tuple[float, int, float]:
        result = trainer.train()
        block = result["optimizer"]
        lag = block["policy_lag"]["mean"]
        steps = result["num_env_steps_sampled_lifetime"]
        return time.monotonic(), steps, lag if block["num_updates"] else -1.0

    until_s = time.monotonic() + 60.0
    while train()[2] < 0.0:  # until the first update
        if time.monotonic() > until_s:
            raise RuntimeError("no update within a minute")
    train()
    train()
    began_s, before, _ = train()
    lags, parts = [], []
    last_s, last = began_s, before
    while last_s - began_s < seconds:
        now_s, steps, lag = train()
        lags.append(lag)
        parts.append((steps - last) / (now_s - last_s))
        last_s, last = now_s, steps
    error = statistics.stdev(parts) / len(parts) ** 0.5 if len(parts) > 1 else 0.0
    return {
        "rate": round((last - before) / (last_s - began_s), 1),
        "error": round(error, 1),
        "lag": round(statistics.fmean(lags), 2),
        "at": round(time.time()),
    }


def table(store: dict[str, Any]) -> list[str]:
    """Returns the lines of the page: every prediction beside its measurement, and the summary."""
    rows, errors, naive = [], [], []
    for strategy in STRATEGIES:
        for sleep in SLEEPS:
            for count in WORKERS:
                said = store.get(key("predicted", strategy, sleep, count))
                found = store.get(key("measured", strategy, sleep, count))
                if said is None or found is None:
                    continue
                error = said["rate"] / found["rate"] - 1.0
                errors.append(abs(error))
                naive.append(abs(said["one_worker"] * count / found["rate"] - 1.0))
                rows.append(
                    f"| `{strategy}` | {sleep} | {count} | {said['rate']:,.0f} "
                    f"[{said['low']:,.0f}, {said['high']:,.0f}] | {found['rate']:,.0f} | "
                    f"{error:+.0%} | {said['lag']:.1f} | {found['lag']:.1f} | "
                    f"{said['bottleneck']} |"
                )
    if not rows:
        return ["No run was measured yet."]
    total = len(STRATEGIES) * len(SLEEPS) * len(WORKERS)
    within = sum(error <= 0.15 for error in errors)
    about_run = store.get("about", {})
    return [
        f"{len(rows)} of {total} cases. Median error {statistics.median(errors):.1%}, worst "
        f"{max(errors):.0%}, {within} within 15%. One worker's predicted rate times the number of "
        f"workers has a median error of {statistics.median(naive):.1%}, and {max(naive):.0%} at "
        "worst.",
        "",
        "| strategy | sleep | workers | predicted steps/s | measured | error | predicted lag | "
        "measured lag | predicted bottleneck |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
        *rows,
        "",
        ", ".join(f"{name} {value}" for name, value in sorted(about_run.items())) + ".",
    ]


def write_page(store: dict[str, Any]) -> None:
    """Writes the tables into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *table(store), END + after]))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="strategies, presets and distributions"
    )
    parser.add_argument("--workers", type=int, nargs="*", default=list(WORKERS))
    parser.add_argument("--calibration-s", type=float, default=4.0)
    parser.add_argument("--measure-s", type=float, default=3.5)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--no-measuring", action="store_true", help="only predict")
    args = parser.parse_args()
    store = read_runs(STORE)
    if not args.page:
        register_plugins()
        ray.init(num_cpus=64, log_to_driver=False, logging_level=logging.ERROR)
        store["about"] = about()
        chosen = list(cases(args.only))
        predict_all(store, chosen, args.workers, args.calibration_s)
        if not args.no_measuring:
            measure_all(store, chosen, args.workers, args.measure_s)
        write_runs(STORE, store)
    write_page(store)


if __name__ == "__main__":
    main()
