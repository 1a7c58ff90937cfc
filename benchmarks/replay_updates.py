"""Compares updates per processor second of DQN and SAC in polopt and Stable-Baselines3.

    python benchmarks/replay_updates.py            # 3 minutes
    python benchmarks/replay_updates.py --page     # only writes the page
    python benchmarks/replay_updates.py --cuda     # only prints

An update draws a batch from the replay buffer and makes one step of each torch optimizer. It also
updates the target networks, except in Stable-Baselines3's DQN, which updates its target network
while it samples. Both libraries have the same environment, network and batch size. They learn in
turns (A B A B), in this process and on one thread. The table has medians over the turns. The script
measures processor time, because other programs on the machine affect it little. With `--cuda`, both
libraries learn on a GPU, and the script measures updates per second of wall time, without a goal.
The exit status is 1 if polopt misses a goal. The raw results are in
`benchmarks/results/replay_updates.jsonl`, and the page is `docs/replay.md`. Needs
`stable-baselines3`, and `mujoco` for SAC.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from about import about
from stored_runs import between, facts_of, read_runs, write_runs

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/replay_updates.jsonl"
PAGE = ROOT / "docs/replay.md"
BEGIN, END = "<!-- replay updates: begin -->", "<!-- replay updates: end -->"
ROWS = 4000  # size of the buffer
Update = Callable[[], Any]


class Case(NamedTuple):
    """The settings of one comparison. `goal` is the smallest allowed ratio of polopt's rate to the
    rate of Stable-Baselines3."""

    algorithm: str
    env: str
    batch: int
    widths: list[int]
    goal: float


CASES = {
    "dqn-64": Case("DQN", "CartPole-v1", 32, [64, 64], 4.0),
    "dqn-256": Case("DQN", "CartPole-v1", 128, [256, 256], 1.5),
    "sac-256": Case("SAC", "HalfCheetah-v5", 256, [256, 256], 1.4),
}


def polopt_update(case: Case, cuda: bool) -> Update:
    """Fills a buffer of polopt, and returns a function that makes one update.

    Dueling networks and double Q-learning are off, because Stable-Baselines3's DQN has neither.
    """
    import polopt

    options: dict[str, Any] = {}
    if case.algorithm == "DQN":
        options = {"dueling": False, "double_q": False}
    trainer = getattr(polopt, case.algorithm)(
        env=case.env,
        num_workers=0,
        buffer_size=ROWS,
        learning_starts=ROWS,
        train_batch_size=case.batch,
        model={"fcnet_hiddens": case.widths},
        seed=0,
        num_gpus=int(cuda),
        **options,
    )
    optimizer = trainer.optimizer
    while optimizer.metrics.num_env_steps_sampled < ROWS - 100:
        optimizer.step()
    return lambda: optimizer.learn_transitions(optimizer.buffer.sample(case.batch))


def sb3_update(case: Case, cuda: bool) -> Update:
    """Fills a buffer of Stable-Baselines3, and returns a function that makes 50 updates."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    model = getattr(stable_baselines3, case.algorithm)(
        "MlpPolicy",
        case.env,
        buffer_size=ROWS,
        learning_starts=ROWS,
        batch_size=case.batch,
        policy_kwargs={"net_arch": case.widths},
        seed=0,
        device="cuda" if cuda else "cpu",
    )
    model.learn(ROWS - 100)
    model.set_logger(Logger(None, []))
    return lambda: model.train(gradient_steps=50, batch_size=case.batch)


def rate(
    update: Update, seconds: float, updates: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Returns the updates per second.

    Args:
        update: the function to measure.
        seconds: minimum time of the measurement.
        updates: number of updates that one call of `update` makes.
        clock: the clock that measures the time, in seconds.
    """
    began_s, made = clock(), 0
    while (elapsed_s := clock() - began_s) < seconds:
        update()
        made += updates
    return made / elapsed_s


def table(store: dict[str, Any], kind: str) -> list[str]:
    """Returns the lines of the table.

    Args:
        store: the updates per second of both libraries, one list of turns each, by case.
        kind: the unit of time.
    """
    lines = [f"| updates per {kind} | polopt | Stable-Baselines3 | ratio | goal |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, case in CASES.items():
        if name in store:
            own, other = (median(store[name][who]) for who in ("polopt", "sb3"))
            shape = f"{case.algorithm}, {'x'.join(map(str, case.widths))}, batch {case.batch}"
            rates = f"{own:,.0f} | {other:,.0f} | {own / other:.2f}"
            lines.append(f"| {shape} | {rates} | {case.goal:g} |")
    return lines


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    lines = table(store, "processor second")
    return between(
        text, BEGIN, END, [*lines, "", f"`benchmarks/replay_updates.py`, {facts_of(store)}."]
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the updates per second of both libraries, one list of turns each, by case."""
    clock = time.perf_counter if args.cuda else time.process_time
    found = {}
    for name, case in CASES.items():
        ours, theirs = polopt_update(case, args.cuda), sb3_update(case, args.cuda)
        rate(ours, 0.2, 1), rate(theirs, 0.2, 50)
        turns: dict[str, list[float]] = {"polopt": [], "sb3": []}
        for _ in range(args.turns):
            turns["polopt"].append(round(rate(ours, args.seconds, 1, clock), 1))
            turns["sb3"].append(round(rate(theirs, args.seconds, 50, clock), 1))
        found[name] = turns
    return found


def main() -> None:
    """Measures the cases, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cuda:
        print("\n".join(table(measure(args), "second")))
        return
    if not args.page:
        write_runs(STORE, {**measure(args), "about": about()})
    store = read_runs(STORE)
    PAGE.write_text(page(store, PAGE.read_text()))
    print("\n".join(table(store, "processor second")))
    met = [
        median(store[name]["polopt"]) >= case.goal * median(store[name]["sb3"])
        for name, case in CASES.items()
    ]
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
