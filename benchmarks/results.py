"""Returns on tasks that matter, at a stated budget, with peers at the same budget.

    python benchmarks/results.py                                   # all cells; resumable; hours
    python benchmarks/results.py --only HalfCheetah-v5 --seeds 0 1 # some of them
    python benchmarks/results.py --page                            # only writes page and figures

Each run is a process of its own with one thread: `tuned_examples/NAME.yaml` with another seed, or a
script of `benchmarks/peers`, in that peer's environment. Results are stored one by one in
`benchmarks/results/tasks.json`; a run that is there is not repeated. Delete it there to measure it
again. The page is `docs/tasks.md`, the figures are `docs/images/task-*.png`; a cell without runs
says "not run".

The return of a run is the mean undiscounted return of the last 100 training episodes at the budget,
in which actions are sampled. Figures: interquartile mean over seeds, and its 95 percent interval
(percentile bootstrap over seeds); wall time is the median over seeds, start-up not included.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from about import about
from environments import CACHE, PEERS, PeerError, make_environment
from intervals import interquartile_mean, interval
from processes import run as run_process

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/tasks.json"
PAGE = ROOT / "docs/tasks.md"
IMAGES = ROOT / "docs/images"
EXAMPLES = ROOT / "tuned_examples"
SEEDS = (0, 1, 2, 3, 4)
#: Points of a learning curve that are stored.
POINTS = 100
#: Longest run.
LIMIT_S = 4 * 3600.0
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")


class Cell(NamedTuple):
    """One trainer on one task.

    Attributes:
        title: in the table.
        source: name of a tuned example or of `UNTUNED`, or `PEER:CASE` of
            `benchmarks/peers/PEER/run.py`.
    """

    title: str
    source: str


class Task(NamedTuple):
    """One task.

    Attributes:
        env_steps: budget of each run.
        cells: the trainers.
        goal: mean return that counts as solved, for tasks where steps to it are of interest.
    """

    env_steps: int
    cells: tuple[Cell, ...]
    goal: float | None = None


def breakout(config: Any) -> Any:
    """As the function of `peers/common/tasks.py`."""
    from tasks import make_breakout

    return make_breakout()


#: Batches of 1,024 rows, two fragments, as with `num_workers: 0`.
DECOUPLED_PPO: dict[str, Any] = {
    "optimizer": "async_samples",
    "policy": "decoupled_ppo",
    "num_workers": 2,
    "rollout_fragment_length": 64,
    "train_batch_size": 1024,
    "max_rollout_lag": 2,
    "max_requests_in_flight_per_worker": 2,
}
#: Examples that have not been measured with five seeds, and are therefore no tuned examples.
UNTUNED: dict[str, dict[str, Any]] = {
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
    # As `halfcheetah_ppo`, with samples that are taken while the driver learns.
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
}


def train_example(name: str, seed: int, env_steps: int) -> dict[str, Any]:
    """Trains an example up to a budget; the result of `measuring.BudgetClock`."""
    sys.path.insert(0, str(PEERS / "common"))
    import measuring

    import polopt

    example = UNTUNED.get(name) or yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    trainer = getattr(polopt, example["run"])({**example["config"], "seed": seed})
    clock = measuring.BudgetClock(env_steps)
    over = False
    while not over:
        result = trainer.train()
        runners = result["env_runners"]
        enough = runners["num_episodes_lifetime"] >= measuring.EPISODES
        mean = runners["episode_return_mean"] if enough else None
        over = clock.tick(result["num_env_steps_sampled_lifetime"], mean)
    trainer.stop()
    return clock.result()


def measure(cell: Cell, seed: int, env_steps: int, cache: Path) -> dict[str, Any]:
    """One run in a process of its own.

    Raises:
        PeerError: it failed.
    """
    peer, _, case = cell.source.partition(":")
    if case:
        script = [str(make_environment(peer, cache)), str(PEERS / peer / "run.py"), case]
        command = [*script, "--seed", str(seed), "--env-steps", str(env_steps)]
        found = run_process(command, LIMIT_S)
    else:
        command = [sys.executable, __file__, "--train", cell.source, "--seeds", str(seed)]
        found = run_process([*command, "--env-steps", str(env_steps)], LIMIT_S, ROOT / "src")
    every = max(1, len(found["curve"]) // POINTS)
    return {**found, "curve": found["curve"][::every]}


def steps_to(goal: float, run: dict[str, Any]) -> float:
    """Environment steps at which the mean return reached the goal; infinite: it never did."""
    return next((steps for steps, mean in run["curve"] if mean >= goal), float("inf"))


def table(name: str, task: Task, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Lines of the table of a task."""
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
            spread = f"[{low:,.0f}, {high:,.0f}]"
        line = f"| {cell.title} | {interquartile_mean(returns):,.0f} {spread} "
        line += f"| {len(found)} | {median(run['seconds'] for run in found):,.0f} s |"
        if task.goal is not None:
            reached = sorted(steps_to(task.goal, run) for run in found)
            words = ["not reached" if s == float("inf") else f"{s:,.0f}" for s in reached]
            line += f" {'; '.join(words)} |"
        lines.append(line)
    return [*lines, ""]


def figure_of(name: str, task: Task, runs: dict[str, list[dict[str, Any]]]) -> Any:
    """Learning curves: each seed thin, the interquartile mean thick; None without runs."""
    import numpy as np
    import plotly.graph_objects as go

    if not any(runs.values()):
        return None
    figure = go.Figure()
    grid = np.linspace(0, task.env_steps, POINTS + 1)
    for cell, color, dash in zip(task.cells, COLORS, DASHES, strict=False):
        found = runs[cell.source]
        curves = []
        for run in found:
            last = [run["env_steps"], run["return"]]
            steps, means = np.array([*run["curve"], last]).T
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
        margin={"t": 70, "b": 60, "l": 70, "r": 20},
        xaxis_title="environment steps",
        yaxis_title="mean return of the last 100 episodes",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        title={"text": name, "y": 0.96},
    )
    return figure


def write_page(store: dict[str, Any]) -> None:
    """Writes the page, and then the figures, which need Chrome, from what is stored."""
    lines, figures = [], {}
    for name, task in TASKS.items():
        runs = {
            cell.source: [
                store[key] for seed in SEEDS if (key := f"{name}/{cell.source}/{seed}") in store
            ]
            for cell in task.cells
        }
        lines += table(name, task, runs)
        commits = sorted({run["commit"] for found in runs.values() for run in found})
        if commits:
            lines += [f"Commits: {', '.join(commits)}.", ""]
        figure = figure_of(name, task, runs)
        if figure is not None:
            image = "task-" + name.lower().replace("/", "-") + ".png"
            figures[image] = figure
            lines += [f"![Learning curves of {name}](images/{image})", ""]
    facts = ", ".join(f"{name} {value}" for name, value in store.get("about", {}).items())
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    head, rest = PAGE.read_text().split(begin)
    lines += [f"Last run: {facts or 'none'}.", ""]
    PAGE.write_text(head + begin + "\n".join(lines) + end + rest.split(end)[1])
    for image, figure in figures.items():
        figure.write_image(IMAGES / image, scale=2)


def main() -> None:
    """Runs what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--cells", nargs="*", help="sources of cells; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder for environments of peers"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--env-steps", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        print(json.dumps(train_example(given.train, given.seeds[0], given.env_steps)), flush=True)
        return
    STORE.parent.mkdir(exist_ok=True)
    store: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
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
                found = measure(cell, seed, TASKS[name].env_steps, given.cache)
                store[key] = {**found, "commit": facts["commit"]}
            except PeerError as error:
                print(f"{key}: {error}", file=sys.stderr, flush=True)
                continue
            store["about"] = facts
            partial = STORE.with_suffix(".partial")
            partial.write_text(json.dumps(store, indent=1, sort_keys=True))
            partial.replace(STORE)
            shown = {part: store[key][part] for part in ("return", "seconds", "env_steps")}
            print(key, shown, flush=True)
    write_page(store)


if __name__ == "__main__":
    main()
