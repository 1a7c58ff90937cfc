"""Shared parts of the `run.py` scripts: command line, clocks, and the line of JSON at the end.

Uses only the standard library and Python 3.7, because RLlib 0.8.5 requires Python 3.7.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

STARTED_S = time.perf_counter()
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
#: The number of cores of a case such as `loop-sac-one-core`. Other cases use the cores that they
#: have.
CORES = 1 if any(word.endswith("-one-core") for word in sys.argv) else 2
if CORES == 1:  # before a library starts threads
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

#: Mean return over `EPISODES` episodes at which a task counts as solved.
GOALS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "HalfCheetah-v5": 4000.0}
EPISODES = 100
#: The same for SAC, because a whole run has fewer than 100 episodes.
EPISODES_OF_SAC = 5
#: The seed of evaluation is the seed of training plus this number.
EVALUATION_SEED = 1000
WARM_UP_S = 2.0
#: Titles of Ray's own processes.
RAY_OWN = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")


class RateClock:
    """Measures environment steps per second after a warm-up of two seconds and two rounds. A round
    is one pass of the loop that calls `tick`.

    Create the clock when everything is built. The time before this counts as start-up.

    Args:
        seconds: minimum time to measure. A measurement ends with a whole round.
        turns: if True, prints each measurement and waits for a line of standard input. Then
            measures again after two further rounds, until standard input ends.
    """

    def __init__(self, seconds: float, turns: bool = False) -> None:
        self._seconds = seconds
        self._turns = turns
        self._made_s = time.perf_counter()
        self._rounds = 0
        self._steps = 0
        self._began: tuple[float, int, float] | None = None
        self._result: dict[str, Any] = {}

    def tick(self, steps: int) -> bool:
        """Returns whether the measurement is over. Call this method after each round with the
        environment steps since the start of the run. A call without new steps does not count as a
        round, because RLlib's asynchronous algorithms often return before their first samples."""
        if steps == self._steps:
            return False
        now_s, self._steps = time.perf_counter(), steps
        self._rounds += 1
        if self._began is None:
            if now_s - self._made_s >= WARM_UP_S and self._rounds >= 2:
                cpu_s = processor_seconds()
                self._began = (time.perf_counter(), steps, cpu_s)
            return False
        began_s, began_steps, began_cpu_s = self._began
        if now_s - began_s < self._seconds:
            return False
        took_s, done = now_s - began_s, steps - began_steps
        cpu_s = processor_seconds() - began_cpu_s
        self._result = {"rate": done / took_s, "steps": done, "seconds": took_s}
        self._result["cpu_s_per_1000_steps"] = 1000.0 * cpu_s / done
        return not (self._turns and self._next_turn())

    def _next_turn(self) -> bool:
        print(json.dumps(self._result), flush=True)
        self._began, self._rounds = None, 0
        return bool(sys.stdin.readline())

    def result(self) -> dict[str, Any]:
        """Returns the rate, steps, seconds and processor time of the measurement, and the seconds
        of start-up.

        Raises:
            RuntimeError: the run ended before the measurement did.
        """
        if not self._result:
            raise RuntimeError(
                f"the run ended after {self._rounds} rounds, before the measurement did"
            )
        return {**self._result, "startup_s": self._made_s - STARTED_S}


def processor_seconds() -> float:
    """Reads the processor time of this process and its Ray workers with their children from
    /proc."""
    ticks = 0
    for pid in [os.getpid(), *worker_pids()]:
        fields = _stat(pid)
        ticks += int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def worker_pids() -> list[int]:
    """Returns the process ids of the Ray workers below this process, and of their children.

    The title of a process with an actor is `ray::CLASS` or `ray::CLASS.method`. Ray's own
    processes (raylet, agents, idle workers) are not included.
    """
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat(int(name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    pending = [(os.getpid(), False)]  # pid, and whether it belongs to a worker
    while pending:
        parent, inside = pending.pop()
        for pid in children.get(parent, []):
            counts = inside or _is_worker(pid)
            pending.append((pid, counts))
            if counts:
                found.append(pid)
    return sorted(found)


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name of the program. The list is empty if the
    process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _is_worker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            title = file.read()
    except OSError:
        return False
    return title.startswith(b"ray::") and not title.startswith(RAY_OWN)


class GoalClock:
    """Measures the seconds until the mean return reaches the goal of a task (`GOALS`).

    Create the clock when everything is built.

    Args:
        seconds: time limit.
        env: the task.
    """

    def __init__(self, seconds: float, env: str = "CartPole-v1") -> None:
        self._seconds = seconds
        self._goal = GOALS[env]
        self._made_s = time.perf_counter()
        self._took_s = 0.0
        self._steps = 0
        self._reached = False

    def tick(self, steps: int, mean_return: float | None) -> bool:
        """Returns whether the run has reached the goal or the time limit. Call this method after
        each round, with the environment steps since the start of the run. `mean_return` is the
        mean of the last `EPISODES` or `EPISODES_OF_SAC` episodes, or None if fewer episodes have
        ended."""
        self._took_s = time.perf_counter() - self._made_s
        self._steps = steps
        self._reached = mean_return is not None and bool(mean_return >= self._goal)
        return self._reached or self._took_s >= self._seconds

    def result(self) -> dict[str, Any]:
        """Returns the seconds and steps to the goal or limit, and the seconds of start-up."""
        return {
            "seconds_to_goal": self._took_s,
            "steps_to_goal": self._steps,
            "reached": self._reached,
            "startup_s": self._made_s - STARTED_S,
        }


class BudgetClock:
    """Records the learning curve up to a number of environment steps.

    Create the clock when everything is built.

    Args:
        env_steps: the budget.
    """

    def __init__(self, env_steps: int) -> None:
        self._budget = env_steps
        self._made_s = time.perf_counter()
        self._took_s = 0.0
        self._curve: list[list[float]] = []
        self._steps = 0

    def tick(self, steps: int, mean_return: float | None) -> bool:
        """Returns whether the run has reached the budget. Call this method after each round, with
        the environment steps since the start of the run. `mean_return` is the mean of the last
        `EPISODES` episodes. If it is None, the curve gets no point."""
        self._took_s = time.perf_counter() - self._made_s
        self._steps = steps
        if mean_return is not None:
            self._curve.append([steps, float(mean_return)])
        return steps >= self._budget

    def result(self) -> dict[str, Any]:
        """Returns the last mean return, `[steps, mean return]` of each round, steps, and seconds.

        Raises:
            RuntimeError: the run ended before the budget, or `tick` got no mean return.
        """
        if self._steps < self._budget or not self._curve:
            raise RuntimeError(
                f"the run ended after {self._steps} of {self._budget} environment steps, with "
                f"{len(self._curve)} mean returns"
            )
        return {
            "return": self._curve[-1][1],
            "curve": self._curve,
            "env_steps": self._steps,
            "seconds": self._took_s,
        }


def main(
    doc: str | None,
    cases: dict[str, Callable[[argparse.Namespace], dict[str, Any]]],
    packages: Sequence[str],
) -> None:
    """Runs the case that the command line names, and prints its result as the last line.

    Args:
        doc: docstring of the script.
        cases: functions by name. Their argument is the parsed command line.
        packages: packages whose versions are part of the result.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("case", choices=sorted(cases))
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="time to measure, or limit for learning"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env-steps", type=int, default=0, help="budget of a `result-` case")
    parser.add_argument("--episodes", type=int, default=0, help="evaluation episodes at the budget")
    parser.add_argument("--turns", action="store_true", help="see `RateClock`")
    args = parser.parse_args()
    result = cases[args.case](args)
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    print(json.dumps({**result, "versions": versions}), flush=True)


def version(package: str) -> str:
    """Returns the installed version."""
    try:
        from importlib import metadata
    except ImportError:  # Python 3.7
        import pkg_resources

        return str(pkg_resources.get_distribution(package).version)
    return metadata.version(package)
