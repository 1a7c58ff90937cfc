"""Measures training while 20 random workers per minute are killed, and before and after the kills.

    python benchmarks/kill_rate.py [--optimizers async_gradients ...] [--transports ray socket]

A step of CartPole-v1 takes `--step-ms`, like a step of a simulator, so few cores suffice for three
workers. Each case runs in its own process. A case has a warm-up, `--seconds` without kills,
`--minutes` with kills, and `--seconds` without kills after all workers are up again. With
`async_replay`, the script also kills replay shards. It kills only processes that are up. If starts
take longer than the time between kills, the kills take longer than `--minutes`. After each step,
the script checks that the counters have grown by the numbers that the step reported. Prints
Markdown. The exit status is 1 if a counter was wrong, or if the script made fewer kills than
planned because no worker was up for two minutes.

The figures of the driver are its open file descriptors and its resident memory, before the first
kill and after the last phase. The rate during the kills includes the start of replacements, which
costs seconds of processor time (Python, Ray, torch) on a machine with few cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
from about import about
from processes import STARTUP_LIMIT_S, run

POLICIES: dict[str, dict[str, Any]] = {
    "async_gradients": {"policy": "a2c"},
    "sync_gradients": {"policy": "a2c"},
    "sync_samples": {"policy": "a2c"},
    "async_samples": {"policy": "ppo", "num_sgd_iter": 1, "sgd_minibatch_size": 0},
    "async_replay": {"policy": "dqn", "learning_starts": 500, "prioritized_replay": True},
    "decentralized_allreduce": {"policy": "ppo", "num_sgd_iter": 2, "sgd_minibatch_size": 10},
}
NUM_WORKERS = 3
WARM_UP_S = 10.0
ALL_UP_LIMIT_S = 120.0


class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 in which each step takes at least the seconds `step_s` of the config."""

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._step_s = config["step_s"]

    def step(self, action: Any) -> Any:
        """Sleeps and then makes a step."""
        time.sleep(self._step_s)
        return super().step(action)


class Killer(threading.Thread):
    """Kills random processes of several groups at random intervals. Kills only processes that are
    up.

    Attributes:
        num_kills: number of signals that were sent so far.
    """

    def __init__(self, groups: list[Any], kills: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self._groups = groups
        self._rng = random.Random(0)
        self._pauses_s = [self._rng.uniform(0.5, 1.5) * seconds / kills for _ in range(kills)]
        self._killed: set[int] = set()

    @property
    def num_kills(self) -> int:
        return len(self._killed)

    def run(self) -> None:
        """Sends the signals. Returns earlier if no worker is up for `ALL_UP_LIMIT_S`."""
        for pause_s in self._pauses_s:
            time.sleep(pause_s)
            deadline_s = time.monotonic() + ALL_UP_LIMIT_S
            while not (pids := self._pids_up()) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            if not pids:
                return
            os.kill(pid := self._rng.choice(pids), signal.SIGKILL)
            self._killed.add(pid)

    def _pids_up(self) -> list[int]:
        pids = set()
        for group in self._groups:
            for worker in list(group.remote):
                if worker.up:
                    pids.add(worker.channel.started.pid)
        return sorted(pids - self._killed - {0})


class Run:
    """A trainer with its counters, and the checks of these counters."""

    def __init__(self, optimizer: str, transport: str, step_s: float) -> None:
        import polopt

        self.trainer = polopt.PolicyOptimizerTrainer(
            {
                "env": lambda context: Paced(context),
                "env_config": {"step_s": step_s},
                "optimizer": optimizer,
                "transport": transport,
                "num_workers": NUM_WORKERS,
                "num_envs_per_worker": 1,
                "rollout_fragment_length": 20,
                "seed": 0,
                **POLICIES[optimizer],
            }
        )
        self.optimizer = self.trainer.optimizer
        shards = getattr(self.optimizer, "shards", None)
        self.groups = [self.trainer.workers] + ([] if shards is None else [shards])
        self.reported = self.wrong = 0

    def step(self) -> None:
        """Makes one step of the optimizer, and counts the counters that are wrong."""
        metrics = self.optimizer.metrics
        updates = metrics.num_updates
        result = self.optimizer.step()
        self.reported += result.env_steps_sampled
        self.wrong += metrics.num_env_steps_sampled != self.reported
        self.wrong += metrics.num_updates != updates + result.updates

    def rate(self, seconds: float) -> float:
        """Trains for this time and returns the environment steps/s."""
        sampled, began_s = self.reported, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            self.step()
        return (self.reported - sampled) / (time.perf_counter() - began_s)

    def rate_beside(self, killer: Killer) -> tuple[float, float]:
        """Trains until the last kill. Returns the environment steps/s and the seconds."""
        sampled, began_s = self.reported, time.perf_counter()
        killer.start()
        while killer.is_alive():
            self.step()
        elapsed_s = time.perf_counter() - began_s
        return (self.reported - sampled) / elapsed_s, elapsed_s

    def until_all_up(self) -> None:
        """Makes steps until all workers have answered.

        Raises:
            TimeoutError: workers have not answered after `ALL_UP_LIMIT_S`.
        """
        deadline_s = time.monotonic() + ALL_UP_LIMIT_S
        # The driver notices the last death in the next step or later.
        self.rate(5.0)
        while not all(worker.up for group in self.groups for worker in group.remote):
            self.step()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all are up: {[group.stats() for group in self.groups]}")


def driver() -> tuple[int, float]:
    """Returns the open file descriptors and the resident memory in MB of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(optimizer: str, transport: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one case."""
    import ray

    ray.init(
        num_cpus=NUM_WORKERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    case = Run(optimizer, transport, 1e-3 * args.step_ms)
    case.until_all_up()
    case.rate(WARM_UP_S)
    before = case.rate(args.seconds)
    fds, rss_mb = driver()
    kills = round(args.per_minute * args.minutes)
    killer = Killer(case.groups, kills, 60.0 * args.minutes)
    during, killing_s = case.rate_beside(killer)
    case.until_all_up()
    after = case.rate(args.seconds)
    fds_after, rss_mb_after = driver()
    faults = case.trainer.workers.stats()
    stats = case.optimizer.stats()
    case.trainer.stop()
    ray.shutdown()
    return {
        "transport": ", ".join(filter(None, [stats["transport"], stats.get("allreduce_backend")])),
        "rates": [before, during, after],
        "kills": killer.num_kills,
        "planned": kills,
        "killing_s": killing_s,
        "restarts": sum(group.faults.num_restarts for group in case.groups),
        "counted": {key: value for key, value in faults.items() if key.startswith("num_")},
        "wrong": case.wrong,
        "fds": [fds, fds_after],
        "rss_mb": [rss_mb, rss_mb_after],
    }


def row(optimizer: str, found: dict[str, Any]) -> str:
    """Returns one row of the table."""
    before, during, after = found["rates"]
    kills = "{} of {}" if found["kills"] < found["planned"] else "{}"
    cells = [
        optimizer,
        found["transport"],
        f"{before:,.0f}",
        f"{during:,.0f} ({during / before:.0%})",
        f"{after:,.0f} ({after / before:.0%})",
        f"{kills.format(found['kills'], found['planned'])}, {found['restarts']}",
        f"{found['killing_s']:.0f}",
        "exact" if not found["wrong"] else f"WRONG {found['wrong']} times",
        "{} to {}".format(*found["fds"]),
        "{:.0f} to {:.0f}".format(*found["rss_mb"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument(
        "--transports", nargs="+", choices=["ray", "socket"], default=["ray", "socket"]
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds before and after the kills"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes with kills")
    parser.add_argument("--per-minute", type=float, default=20.0, help="kills per minute")
    parser.add_argument(
        "--step-ms", type=float, default=1.0, help="milliseconds of an environment step"
    )
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*args.case, args)), flush=True)
        return
    print(
        "| optimizer | transport | steps/s before | during | after | kills, restarts | s ", end=""
    )
    print("| counters | descriptors | driver, MB |")
    print("|---|---|---:|---:|---:|---:|---:|---|---:|---:|", flush=True)
    limit_s = STARTUP_LIMIT_S + 2 * args.seconds + 240.0 * args.minutes + 2 * ALL_UP_LIMIT_S
    keys = ("seconds", "minutes", "per_minute", "step_ms")
    sizes = [f"--{key.replace('_', '-')}={getattr(args, key)}" for key in keys]
    failed = False
    for optimizer in args.optimizers:
        for transport in args.transports:
            command = [sys.executable, str(Path(__file__).resolve()), "--case"]
            source = Path(__file__).resolve().parents[1] / "src"
            found = run([*command, optimizer, transport, *sizes], limit_s, source)
            print(row(optimizer, found), flush=True)
            print(json.dumps(found), file=sys.stderr, flush=True)
            failed |= found["wrong"] > 0 or found["kills"] < found["planned"]
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    sys.exit(failed)


if __name__ == "__main__":
    main()
