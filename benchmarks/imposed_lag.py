"""Measures the return of policies that learn from each batch L batches after it was sampled.

    python benchmarks/imposed_lag.py                          # all missing runs. Takes hours
    python benchmarks/imposed_lag.py --only ppo --lags 0 16   # some runs
    python benchmarks/imposed_lag.py --page                   # only writes page and figure

A queue of L batches lies between sampling and learning. So every sample after the first L batches
has a lag of exactly L batches, whatever the speed of the machine. The experiment runs in one
process and is reproducible for a given seed. The script stores each result in
`benchmarks/results/imposed_lag.jsonl`, and does not repeat runs that this file contains. The page
is `docs/imposed-lag.md`, and the figure is `docs/images/imposed-lag.png`.

The experiment follows Hilton et al., 2022 ("Batch size-invariance for policy optimization"), who
train with artificially old data. The return of a run is the mean return of its last 100 episodes.
The page shows the interquartile mean over seeds with a 95 percent interval (percentile bootstrap
over seeds).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pydantic
from about import about
from intervals import interquartile_mean, interval
from stored_runs import facts_of, read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/imposed_lag.jsonl"
PAGE = ROOT / "docs/imposed-lag.md"
FIGURE = ROOT / "docs/images/imposed-lag.png"
LAGS = (0, 1, 4, 16, 64)
SEEDS = (0, 1, 2, 3, 4)
#: Environment steps of a run, by task.
TASKS = {"CartPole-v1": 150_000, "Acrobot-v1": 200_000}
#: Settings of all policies.
COMMON: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 64,
    "min_sample_timesteps_per_iteration": 4096,
    "lambda": 0.95,
    "torch_optimizer": "adam",
    "entropy_coeff": 0.01,
    "grad_clip": 0.5,
    "sgd_minibatch_size": 128,
}
_PPO = {"lr": 3e-4, "clip_param": 0.2, "num_sgd_iter": 4}
#: Settings of each policy: the best settings on CartPole-v1 with L = 0 and L = 4 and two seeds. The
#: compared settings are lr of 3e-4 and 1e-3, standardised advantages or not, 1 and 4 epochs, and
#: minibatches of 128 and 512 rows.
POLICIES: dict[str, dict[str, Any]] = {
    "ppo": {**_PPO, "standardize_advantages": True},
    "decoupled_ppo": {**_PPO, "standardize_advantages": True},
    "appo": _PPO,
    # One epoch, because its loss is not clipped: several epochs could change the policy too far.
    "impala": {"lr": 1e-3, "num_sgd_iter": 1},
}


def sample(worker: polopt.RolloutWorker, weights: polopt.Weights | None) -> polopt.SampleBatch:
    """Runs in a worker. Sets the weights and samples a fragment with them."""
    worker.set_weights(weights)
    return worker.next_batch()


class ImposedLagConfig(polopt.OptimizerConfig):
    """Options of `ImposedLag`.

    Attributes:
        imposed_lag: number of batches in the queue between sampling and learning.
    """

    imposed_lag: int = pydantic.Field(default=0, ge=0)


class ImposedLag(polopt.PolicyOptimizer):
    """Learns from each batch `imposed_lag` batches after it was sampled."""

    name = "imposed_lag"
    config_class = ImposedLagConfig
    config: ImposedLagConfig
    phases: ClassVar[tuple[str, ...]] = ("sample", "learn")
    runs_in_process = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queue: deque[polopt.SampleBatch] = deque()

    def step(self) -> polopt.StepResult:
        before = self.metrics.counts()
        with self.timers["sample"]:
            self.calls.fill(sample, self.workers.up())
            self._queue.append(self.calls.first().value)
        if len(self._queue) > self.config.imposed_lag:
            with self.timers["learn"]:
                self.learn(self._queue.popleft())
        return self.metrics.counts_since(before)


def run(task: str, policy: str, lag: int, seed: int, env_steps: int) -> dict[str, float]:
    """Trains once. Returns the mean return of the last 100 episodes, its maximum over the run, the
    environment steps, the largest lag in batches, and the seconds."""
    started_s = time.perf_counter()
    trainer = polopt.PolicyOptimizerTrainer(
        {
            **COMMON,
            **POLICIES[policy],
            "env": task,
            "policy": policy,
            "optimizer": {"name": "imposed_lag", "imposed_lag": lag},
            "seed": seed,
        }
    )
    best, mean, sampled, largest = -float("inf"), float("nan"), 0, 0
    while sampled < env_steps:
        result = trainer.train()
        mean = result["env_runners"]["episode_return_mean"]
        sampled = result["num_env_steps_sampled_lifetime"]
        largest = max(largest, result["optimizer"]["policy_lag_rollouts"]["max"])
        best = max(best, mean)
    trainer.stop()
    return {
        "return": mean,
        "best": best,
        "env_steps": sampled,
        "lag": largest,
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def key(task: str, policy: str, lag: int, seed: int) -> str:
    """Returns the key of a run in the stored results."""
    return f"{task}/{policy}/{lag}/{seed}"


def returns_of(store: dict[str, Any], task: str, policy: str) -> list[tuple[int, list[float]]]:
    """Returns the returns of the stored runs, for each lag that has runs."""
    found = []
    for lag in LAGS:
        runs = [store.get(key(task, policy, lag, seed)) for seed in SEEDS]
        found.append((lag, [one["return"] for one in runs if one is not None]))
    return found


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the tables of the stored runs. Cells without runs say "not
    run"."""
    lines = []
    for task in TASKS:
        lines += [
            f"**{task}**, {TASKS[task]:,} environment steps:",
            "",
            "| policy | " + " | ".join(f"L = {lag}" for lag in LAGS) + " |",
            "|---|" + "---|" * len(LAGS),
        ]
        for policy in POLICIES:
            cells = []
            for _, values in returns_of(store, task, policy):
                if not values:
                    cells.append("not run")
                    continue
                mean, (low, high) = interquartile_mean(values), interval(values)
                few = "" if len(values) == len(SEEDS) else f", {len(values)} seeds"
                cells.append(f"{mean:.0f} [{low:.0f}, {high:.0f}]{few}")
            lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
        lines.append("")
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    head, rest = text.split(begin)
    runs_s = sum(one["seconds"] for name, one in store.items() if name != "about")
    facts = facts_of(store)
    lines += [f"{facts}; {runs_s / 60:.0f} minutes with other work on the machine.", ""]
    return head + begin + "\n".join(lines) + end + rest.split(end)[1]


def write_figure(store: dict[str, Any]) -> None:
    """Draws the returns of the stored runs over the lag."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(TASKS), subplot_titles=list(TASKS))
    colors = {"ppo": "#d55e00", "decoupled_ppo": "#0072b2", "appo": "#009e73", "impala": "#cc79a7"}
    dashes = {"ppo": "solid", "decoupled_ppo": "dash", "appo": "dot", "impala": "dashdot"}
    for column, task in enumerate(TASKS, start=1):
        for number, policy in enumerate(POLICIES):
            xs, ys, lows, highs = [], [], [], []
            for place, (_, values) in enumerate(returns_of(store, task, policy)):
                if not values:
                    continue
                mean, (low, high) = interquartile_mean(values), interval(values)
                xs.append(place + 0.08 * (number - 1.5))  # so intervals do not overlap
                ys.append(mean)
                lows.append(mean - low)
                highs.append(high - mean)
            figure.add_trace(
                go.Scatter(
                    x=xs,
                    y=ys,
                    name=policy,
                    legendgroup=policy,
                    showlegend=column == 1,
                    line={"color": colors[policy], "dash": dashes[policy]},
                    error_y={"type": "data", "array": highs, "arrayminus": lows},
                ),
                row=1,
                col=column,
            )
        figure.update_xaxes(
            title_text="imposed lag, batches",
            tickvals=list(range(len(LAGS))),
            ticktext=[str(lag) for lag in LAGS],
            row=1,
            col=column,
        )
    figure.update_yaxes(title_text="return, interquartile mean of 5 seeds", row=1, col=1)
    figure.update_layout(
        template="plotly_white", width=1000, height=420, margin={"t": 40, "b": 60, "l": 70, "r": 20}
    )
    figure.write_image(FIGURE, scale=2)


def main() -> None:
    """Makes the missing runs, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--lags", nargs="*", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--page", action="store_true", help="only write page and figure")
    given = parser.parse_args()
    polopt.register_optimizer("imposed_lag", ImposedLag)
    store = read_runs(STORE)
    for seed in [] if given.page else given.seeds:
        for task in given.tasks:
            for lag in given.lags:
                for policy in given.only:
                    name = key(task, policy, lag, seed)
                    if name in store:
                        continue
                    store[name] = run(task, policy, lag, seed, TASKS[task])
                    store["about"] = about()
                    write_runs(STORE, store)
                    print(name, store[name], flush=True)
    PAGE.write_text(page(store, PAGE.read_text()))
    write_figure(store)


if __name__ == "__main__":
    main()
