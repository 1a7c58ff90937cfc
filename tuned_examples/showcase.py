"""`make run`: three distribution strategies solve CartPole-v1 in one Ray Tune experiment.

The trials run one after the other, so that their steps per second can be compared.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

# Ray reads these variables when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
import yaml
from ray import tune
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import polopt

#: From the optimizer to its tuned example.
EXAMPLES = {
    "async_gradients": "cartpole_a3c",
    "sync_samples": "cartpole_ppo",
    "decentralized_allreduce": "cartpole_ddppo",
}
RETURN = "env_runners/episode_return_mean"
_COLUMNS = ("preset", "optimizer", "return", "steps", "seconds", "steps/s", "lag", "")


def load(name: str) -> dict[str, Any]:
    """Returns a tuned example as a dict: `run`, `config`, `stop`, `goal`."""
    text = resources.files("polopt.tuned_examples").joinpath(f"{name}.yaml").read_text()
    example: dict[str, Any] = yaml.safe_load(text)
    return example


class Comparison(tune.Callback):
    """Shows one row for each optimizer: a live table in a terminal, otherwise labelled lines."""

    def __init__(self, console: Console, runs: dict[str, str]) -> None:
        self._console = console
        self._rows = {
            run: [run, optimizer, *[""] * 5, "waiting"] for optimizer, run in runs.items()
        }
        self.first: dict[str, dict[str, Any]] = {}
        self._live = Live(self._view(), console=console, refresh_per_second=4)

    def __enter__(self) -> Comparison:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial starts."""
        self._set(trial, ["starting workers"], first=7)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Called by Tune with each result."""
        self.first.setdefault(trial.trainable_name, result)
        mean = result["env_runners"]["episode_return_mean"]
        sampled, seconds = result["num_env_steps_sampled_lifetime"], result["time_total_s"]
        cells = [
            "-" if math.isnan(mean) else f"{mean:.0f}",
            f"{sampled:,}",
            f"{seconds:.1f}",
            f"{result['num_env_steps_sampled_per_second']:,.0f}",
            f"{result['optimizer']['policy_lag']['mean']:.2f}",
        ]
        self._set(trial, [*cells, "training"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial has reached its goal or its limit."""
        self._set(trial, [_verdict(trial)], first=7)

    def _set(self, trial: Any, cells: list[str], first: int = 2) -> None:
        row = self._rows[trial.trainable_name]
        row[first : first + len(cells)] = cells
        if self._live.is_started:
            self._live.update(self._view())
        else:
            self._console.print(_line(row), highlight=False, soft_wrap=True)

    def _view(self) -> Table:
        return _table(self._rows.values())


def _line(row: list[str]) -> str:
    named = zip(_COLUMNS[2:7], row[2:7], strict=True)
    labels = [f"{label} {cell}" for label, cell in named if cell]
    return "  ".join([row[0], *labels, row[7]])


def _table(rows: Any) -> Table:
    table = Table(*_COLUMNS, box=None, collapse_padding=True, pad_edge=False)  # 80 columns
    for column in table.columns[2:7]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def summary(trials: list[Any], first: dict[str, dict[str, Any]]) -> Table:
    """Returns the final table. Seconds are the time of the whole trial. Steps per second do not
    include the first iteration, in which workers start."""
    rows = []
    for trial in trials:
        name, last = trial.trainable_name, trial.last_result
        mean, lag = last["env_runners"]["episode_return_mean"], last["optimizer"]["policy_lag"]
        steps, seconds = (
            last[key] - first[name][key]
            for key in ("num_env_steps_sampled_lifetime", "time_total_s")
        )
        rows.append(
            [
                name,
                last["optimizer"]["name"],
                f"{mean:.0f}",
                f"{last['num_env_steps_sampled_lifetime']:,}",
                f"{last['time_total_s']:.1f}",
                f"{steps / seconds:,.0f}" if seconds else "-",
                f"{lag['mean']:.2f}",
                _verdict(trial),
            ]
        )
    return _table(rows)


def _verdict(trial: Any) -> str:
    goal = trial.stopping_criterion[RETURN]
    mean = trial.last_result["env_runners"]["episode_return_mean"]
    return "solved" if mean >= goal else f"under {goal:g}"


def main(goal: float | None = None) -> None:
    """Trains, shows the results, and prints the next commands.

    Args:
        goal: return at which a trial stops. None means the goal of each tuned example.
    """
    started_s = time.perf_counter()
    console = Console()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("ray").setLevel(logging.ERROR)
    polopt.register()
    examples = {optimizer: load(name) for optimizer, name in EXAMPLES.items()}
    runs = {optimizer: example["run"] for optimizer, example in examples.items()}
    console.print("CartPole-v1: three ways to distribute the training of one policy.")
    cpus = max(os.cpu_count() or 1, 4)  # for the driver, two workers and one further CPU
    ray.init(
        address="local",  # even if a cluster is running
        num_cpus=cpus,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    experiments: Any = _experiments(
        examples, goal
    )  # Tune accepts a list, but its annotation does not
    with Comparison(console, runs) as view:
        analysis = tune.run(experiments, callbacks=[view], max_concurrent_trials=1, verbose=0)
    ray.shutdown()
    console.print(
        Group(
            Text(f"\nDone in {time.perf_counter() - started_s:.0f} s.", style="bold"),
            summary(analysis.trials, view.first),
            Text("steps: of the environments; lag: updates since the weights that sampled.\n"),
        )
    )
    _name_results(console, Path(str(analysis.trials[0].path)).parent)


def _name_results(console: Console, results: Path) -> None:
    lines = {
        "results": str(results),
        "report": _report(results),
        "dashboard": f".venv/bin/polopt dashboard {results}",
        "next": ".venv/bin/polopt list, or .venv/bin/polopt train cartpole_ppo lr=0.001",
    }
    for name, line in lines.items():
        console.print(f"{name:<10}{line}", highlight=False, soft_wrap=True)


def _experiments(examples: dict[str, Any], goal: float | None) -> list[tune.Experiment]:
    return [
        tune.Experiment(
            # Tune writes all results below the first name, so each run has its own directory.
            name=time.strftime("showcase_%Y-%m-%d_%H-%M-%S"),
            run=example["run"],
            config={**example["config"], "seed": 0},
            stop={**example["stop"], **({} if goal is None else {RETURN: goal})},
        )
        for example in examples.values()
    ]


def _report(results: Path) -> str:
    """Writes the HTML report of all trials. Returns its path, or why it could not be written."""
    path = results / "report.html"
    polopt_command = [sys.executable, "-m", "polopt.command_line.cli"]
    command = [*polopt_command, "report", str(results), "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return str(path) if done.returncode == 0 else done.stderr.strip()


if __name__ == "__main__":
    main()
