"""Compares the first choice of `polopt plan` with the best of a measured grid.

    python benchmarks/planned_first.py                    # all tasks that are missing
    python benchmarks/planned_first.py --tasks CartPole Pendulum
    python benchmarks/planned_first.py --page             # only writes the page

For each task, `polopt plan` ranks presets for two minutes. Then the script measures a grid of
presets, workers and environments for each worker, and measures the best three of the grid and the
first choice once more, for longer. The first choice is good if its rate is within 10 percent of the
best rate of the second measurement.

A task takes about three and a half minutes, and all eight take less than 30. All rows go to
`benchmarks/results/planned_first.jsonl` at once, each with the commit that was measured. The script
may be stopped at any time, and does not repeat what the file contains. What failed, and what was
measured while other programs ran, is measured again by the next run. A task whose packages are not
installed is left out. The page is `docs/plan.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
import yaml
from about import about
from predicted_rates import measured
from quiet import QUIET_CORES, is_good, wait_until_quiet, watching_others
from stored_runs import between, read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/planned_first.jsonl"
PAGE = ROOT / "docs/plan.md"
BEGIN, END = "<!-- grid -->", "<!-- end of grid -->"
SLEEPING = "predicted_rates:Sleeping-v0"
#: The tasks: name, `env` with further options, and a package that must be installed.
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "CartPole": ("CartPole-v1", {}, "gymnasium"),
    "sleeps, heavy": (SLEEPING, {"sleep": "heavy"}, "gymnasium"),
    "Pendulum": ("Pendulum-v1", {}, "gymnasium"),
    "HalfCheetah": ("HalfCheetah-v5", {}, "mujoco"),
    "three agents": ("mpe2:simple_spread_v3", {}, "mpe2"),
    "Acrobot": ("Acrobot-v1", {}, "gymnasium"),
    "sleeps, constant": (SLEEPING, {"sleep": "constant"}, "gymnasium"),
    "MountainCarContinuous": ("MountainCarContinuous-v0", {}, "gymnasium"),
}
#: The grid. Environments that sleep need more workers than there are cores.
PRESETS, ENVS = ("SyncPPO", "IMPALA", "A3C", "A2C"), (4, 16)
WORKERS, SLEEPING_WORKERS = (1, 2, 4), (4, 8, 16)
#: The number of points of the grid that are measured again, and for how many times as long.
BEST, LONGER = 3, 3
#: The first choice is good if its rate is at least this share of the best rate.
GOOD = 0.9


class Way(NamedTuple):
    """One way to train.

    Attributes:
        preset: name of the preset.
        options: its options, without the environment.
    """

    preset: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join((self.preset, *(f"{key}={value}" for key, value in self.options.items())))


def grid(env: str) -> list[Way]:
    """Returns the points of the grid of an environment. Neighbours share processes."""
    counts = SLEEPING_WORKERS if env == SLEEPING else WORKERS
    return [
        Way(preset, {"num_envs_per_worker": envs, "num_workers": workers})
        for workers, preset, envs in itertools.product(counts, PRESETS, ENVS)
    ]


def read_way(line: str) -> Way:
    """Returns the way of a command line that `polopt plan` has printed."""
    program, train, preset, *options = shlex.split(line)
    if (program, train) != ("polopt", "train"):
        raise ValueError(f"`polopt plan` printed no command line, but {line!r}")
    pairs = [option.partition("=") for option in options]
    of_task = ("env", "env_config")
    given = {k: yaml.safe_load(v) for k, _, v in pairs if k.partition(".")[0] not in of_task}
    return Way(preset, given)


def plan(env: str, env_config: dict[str, Any], *options: str, minutes: float) -> dict[str, Any]:
    """Runs `polopt plan` with further options, and returns its first choice as a row."""
    words = [env, *(f"env_config.{key}={value}" for key, value in env_config.items())]
    began_s = time.monotonic()
    paths = os.pathsep.join(filter(None, sys.path))
    address = ray.get_runtime_context().gcs_address  # a second Ray would take time to start
    done = subprocess.run(
        [sys.executable, "-m", "polopt", "plan", *words, *options, "--minutes", str(minutes)],
        cwd=ROOT / "benchmarks",  # where `predicted_rates` is
        env={**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=600.0 + 120.0 * minutes,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"polopt plan {shlex.join(words)}: {done.stderr[-1000:]}")
    lines = done.stdout.strip().splitlines()
    first = next(line.split() for line in lines if line.split()[:1] == ["1"])
    of_plan = (line for line in reversed(lines) if line.startswith("polopt train "))
    way = read_way(next(of_plan, lines[-1]))  # Ray may print after it
    return {
        "preset": way.preset,
        "options": way.options,
        "predicted": float(first[3].replace(",", "")),
        "seconds": round(time.monotonic() - began_s),
    }


def measure_way(
    env: str, env_config: dict[str, Any], way: Way, seconds: float, trainers: dict[int, Any]
) -> dict[str, Any]:
    """Measures the rate of one way. The processes of a trainer serve all ways with its number of
    workers."""
    count = way.options["num_workers"]
    config = {
        "env": env,
        "env_config": env_config,
        "preset": way.preset,
        **way.options,
        "num_cpus_per_worker": 0.1,
        "min_sample_timesteps_per_iteration": 0,
        "min_time_s_per_iteration": min(0.3, seconds / 3),
    }
    try:
        if count in trainers:
            trainers[count].reset_config(config)
        else:
            trainers[count] = polopt.PolicyOptimizerTrainer(config)
        return measured(trainers[count], seconds, warm_up=1)
    except Exception:
        with contextlib.suppress(Exception):  # the error of the measurement says more
            trainers.pop(count).stop()
        raise


def run_task(
    task: str,
    store: dict[str, Any],
    ways: list[Way],
    make_plan: Callable[[], dict[str, Any]],
    measure: Callable[[Way, float], dict[str, Any]],
    seconds: float,
    save: Callable[[], None],
) -> None:
    """Plans one task, and measures what is missing of it.

    Args:
        task: its name.
        store: all rows.
        ways: the grid.
        make_plan: makes the row of the plan.
        measure: measures a way for a number of seconds.
        seconds: duration of the measurement of a point of the grid. The second measurement takes
            `LONGER` times as long.
        save: writes the rows.
    """

    begun_s, done, total = time.monotonic(), 0, 1 + len(ways) + 1 + min(BEST, len(ways))

    def keep(name: str, make: Callable[[], dict[str, Any]]) -> None:
        nonlocal done
        done += 1
        if is_complete(store.get(name)):
            return
        try:
            store[name] = make()
        except Exception as error:  # one row that fails must not end the others
            store[name] = {"failed": f"{type(error).__name__}: {error}"[-1000:]}
        minutes = (time.monotonic() - begun_s) / 60.0
        print(f"{done} of {total}, {minutes:.1f} min: {name} {store[name]}", flush=True)
        save()

    keep(f"plan {task}", make_plan)
    for way in ways:
        keep(f"grid {task}: {way}", lambda way=way: measure(way, seconds))  # type: ignore[misc]
    rates = {way: store[f"grid {task}: {way}"].get("rate", 0.0) for way in map(str, ways)}
    again = sorted(ways, key=lambda way: -rates[str(way)])[:BEST]
    chosen = store[f"plan {task}"]
    if "preset" in chosen:
        again.insert(0, Way(chosen["preset"], chosen["options"]))
    for way in again:
        keep(f"again {task}: {way}", lambda way=way: measure(way, LONGER * seconds))  # type: ignore[misc]


def is_complete(row: dict[str, Any] | None) -> bool:
    """Whether a row need not be measured again."""
    return row is not None and "failed" not in row and is_good(row)


def verdict(task: str, store: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the first choice of a task beside the best of its grid. None if the task is not
    complete."""

    def rates(kind: str) -> dict[str, float]:
        begin = f"{kind} {task}: "
        rows = {n.removeprefix(begin): r for n, r in store.items() if n.startswith(begin)}
        return {way: row["rate"] for way, row in rows.items() if "rate" in row}

    chosen, of_grid, again = store.get(f"plan {task}", {}), rates("grid"), rates("again")
    if "preset" not in chosen:
        return None
    first = str(Way(chosen["preset"], chosen["options"]))
    wanted = {first, *sorted(of_grid, key=lambda way: -of_grid[way])[:BEST]}
    if not of_grid or not wanted <= set(again):
        return None
    best = max(wanted, key=lambda way: again[way])
    return {
        "first": first,
        "predicted": chosen["predicted"],
        "rate": again[first],
        "best": best,
        "best_rate": again[best],
        "good": again[first] >= GOOD * again[best],
    }


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the lines of the stored results."""
    return between(text, BEGIN, END, table(store))


def table(store: dict[str, Any]) -> list[str]:
    """Returns the lines of the page."""
    found = {task: verdict(task, store) for task in TASKS}
    lines = []
    for task, one in found.items():
        if one is not None:
            lines.append(
                f"| {task} | `{one['first']}` | {one['predicted']:,.0f} | {one['rate']:,.0f} | "
                f"`{one['best']}` | {one['best_rate']:,.0f} | "
                f"{one['rate'] / one['best_rate']:.0%} |"
            )
    if not lines:
        return ["No task was measured yet."]
    good = sum(one is not None and one["good"] for one in found.values())
    return [
        f"{len(lines)} of {len(TASKS)} tasks were measured. In {good} of them, the rate of the "
        "first choice is within 10% of the best one of the grid.",
        "",
        "| task | first choice of `polopt plan` | predicted steps/s | measured | best of the grid "
        "and the first choice | measured | first of best |",
        "|---|---|---:|---:|---|---:|---:|",
        *lines,
        "",
        ", ".join(f"{one} {of}" for one, of in sorted(store.get("about", {}).items())) + ".",
    ]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="some of the tasks")
    parser.add_argument("--minutes", type=float, default=2.0, help="of `polopt plan`")
    parser.add_argument("--measure-s", type=float, default=1.2)
    parser.add_argument("--patience-s", type=float, default=60.0, help="wait for a quiet machine")
    parser.add_argument("--busy", action="store_true", help="also run if other programs run")
    parser.add_argument("--tiny", action="store_true", help="one point of the grid, a short plan")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    store = read_runs(options.store)
    minutes = 0.1 if options.tiny else options.minutes
    small = ("--most-workers", "2") if options.tiny else ()  # few workers start for the calibration
    seconds = 0.2 if options.tiny else options.measure_s
    if not options.page:
        ray.init(num_cpus=64, log_to_driver=False, logging_level=logging.ERROR)
        store["about"] = about()
        trainers: dict[int, Any] = {}
        last_others = math.inf  # the cores that other programs used in the last measurement

        def quietly(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            nonlocal last_others
            if not options.busy and last_others > QUIET_CORES:
                wait_until_quiet(options.patience_s)
            with watching_others() as others:
                row = make()
            last_others = others.cores or 0.0
            commit = store["about"]["commit"]
            return {**row, "others": others.cores, "commit": commit, "at": round(time.time())}

        for number, task in enumerate(options.tasks, start=1):
            env, env_config, package = TASKS[task]
            if importlib.util.find_spec(package) is None:
                print(f"{task} is left out, because {package} is not installed", flush=True)
                continue
            print(f"task {number} of {len(options.tasks)}: {task}", flush=True)
            run_task(
                task,
                store,
                grid(env)[:1] if options.tiny else grid(env),
                lambda env=env, given=env_config: quietly(  # type: ignore[misc]
                    lambda: plan(env, given, *small, minutes=minutes)
                ),
                lambda way, seconds, env=env, given=env_config: quietly(  # type: ignore[misc]
                    lambda: measure_way(env, given, way, seconds, trainers)
                ),
                seconds,
                lambda: write_runs(options.store, store),
            )
        for trainer in trainers.values():
            trainer.stop()
        write_runs(options.store, store)
    if options.store == STORE:
        PAGE.write_text(page(store, PAGE.read_text()))
    print("\n".join(table(store)))


if __name__ == "__main__":
    main()
