"""Measures memory over time: of the driver, of each worker, and of the object store.

    python benchmarks/memory.py [--minutes 15] [--presets A3C SyncPPO DDPPO] [--workers 2 8]

Each preset with each number of workers is one run in its own process. This process reads the
resident sizes about once per second. The slope is a least-squares fit after a warm-up. Its standard
error is computed from means over blocks, because neighbouring seconds are correlated and an error
from single seconds would be far too small. A series is flat if its slope is below a limit or within
two standard errors of zero. Prints Markdown and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
from about import about

import polopt

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "common"))
from measuring import worker_pids

CASES: dict[str, dict[str, Any]] = {
    "A3C": {"rollout_fragment_length": 20},
    "A2C": {"rollout_fragment_length": 20},
    "SyncPPO": {"rollout_fragment_length": 128, "num_sgd_iter": 4, "sgd_minibatch_size": 256},
    "DDPPO": {"rollout_fragment_length": 128, "num_sgd_iter": 4, "sgd_minibatch_size": 128},
}
#: Share of the run that is discarded, because caches, heaps and episode statistics grow at first.
WARM_UP = 0.3
BLOCKS = 8
#: Time limit for start-up, the last iteration and the end of a run.
START_S = 300.0
PRESETS = ["A3C", "SyncPPO", "DDPPO"]
STORE = "object store"
MIB = 2.0**20
PAGE = os.sysconf("SC_PAGE_SIZE")


class Slope(NamedTuple):
    """The slope of a series.

    Attributes:
        per_hour: slope in MiB per hour.
        error: standard error of the slope.
        first: mean of the first block, MiB.
        last: mean of the last block, MiB.
    """

    per_hour: float
    error: float
    first: float
    last: float

    def verdict(self, limit_per_hour: float) -> str:
        """Returns `flat`, or says that the series grows."""
        if self.per_hour < limit_per_hour:
            return "flat"
        return "flat, within noise" if self.per_hour < 2.0 * self.error else "GROWS"


def slope(seconds: np.ndarray, mib: np.ndarray, blocks: int = BLOCKS) -> Slope:
    """Fits a line through the means of `blocks` equal parts, by least squares.

    If a block is longer than the correlation time, correlations between neighbouring seconds
    average out within the block. The standard error is computed from the residuals of the means.

    Args:
        seconds: `[S]`.
        mib: `[S]`.
        blocks: 3 or more.
    """
    x = np.array([part.mean() for part in np.array_split(seconds, blocks)]) / 3600.0
    y = np.array([part.mean() for part in np.array_split(mib, blocks)])
    centred = x - x.mean()
    per_hour = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - per_hour * centred
    variance = float(residuals @ residuals) / (blocks - 2)
    return Slope(per_hour, math.sqrt(variance / float(centred @ centred)), y[0], y[-1])


def resident_mib(pid: int) -> float:
    """Returns the resident size of a process, or NaN if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB
    except OSError:
        return math.nan


def store_mib() -> float:
    """Returns the used part of the object store, which Ray counts as a resource."""
    key = "object_store_memory"
    return (ray.cluster_resources()[key] - ray.available_resources().get(key, 0.0)) / MIB


def train(preset: str, workers: int, seconds: float) -> None:
    """Trains. Writes the process ids to standard output, and then the use of the object store, at
    most once per second between two iterations."""
    ray.init(num_cpus=workers + 1, include_dashboard=False, logging_level=logging.ERROR)
    config = {"env": "CartPole-v1", "num_workers": workers, "num_envs_per_worker": 8, "seed": 0}
    trainer = getattr(polopt, preset)(config={**config, **CASES[preset]})
    try:
        trainer.train()
        pids = {f"worker {number}": pid for number, pid in enumerate(worker_pids(), 1)}
        print(json.dumps({"driver": os.getpid(), **pids}), flush=True)
        started_s = time.perf_counter()
        for second in range(1, int(seconds) + 1):
            while time.perf_counter() - started_s < second:
                trainer.train()
            print(store_mib(), flush=True)
    finally:
        trainer.stop()
        ray.shutdown()


def sample(preset: str, workers: int, seconds: float) -> dict[str, list[float]]:
    """Runs a training process. Returns series in MiB with one value per second, and the times of
    the values as the series `seconds`.

    Raises:
        RuntimeError: the run ended early.
    """
    run = [sys.executable, __file__, "--train", preset, str(workers), str(seconds)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Ends a run that hangs. Then its output ends, too.
        watchdog = threading.Timer(seconds + START_S, process.kill)
        watchdog.start()
        try:
            pids = json.loads(process.stdout.readline() or "{}")
            series: dict[str, list[float]] = {name: [] for name in ("seconds", *pids, STORE)}
            started_s = time.perf_counter()
            for line in process.stdout:
                series["seconds"].append(time.perf_counter() - started_s)
                for name, pid in pids.items():
                    series[name].append(resident_mib(pid))
                series[STORE].append(float(line))
            status = process.wait(60.0)
        finally:
            watchdog.cancel()
            process.kill()
    if status or not pids:
        raise RuntimeError(f"{preset} with {workers} workers ended with status {status}")
    return series


def judge(series: dict[str, list[float]]) -> dict[str, Slope]:
    """Returns the slope of each series after the warm-up.

    Raises:
        RuntimeError: a process ended before the run did.
    """
    seconds = np.array(series["seconds"])
    settled = seconds >= WARM_UP * seconds[-1]
    slopes = {}
    for name, values in series.items():
        mib = np.array(values)
        if name != "seconds" and not np.isnan(mib).any():
            slopes[name] = slope(seconds[settled], mib[settled])
    ended = set(series) - {"seconds"} - set(slopes)
    if ended:
        raise RuntimeError(f"ended before the run did: {', '.join(sorted(ended))}")
    return slopes


def print_rows(preset: str, workers: int, slopes: dict[str, Slope], limit: float) -> bool:
    """Prints the rows of one run. Returns whether all its series are flat."""
    of_workers = [name for name in slopes if name.startswith("worker ")]
    worst = max(of_workers, key=lambda name: slopes[name].per_hour)
    verdicts = [found.verdict(limit) for found in slopes.values()]
    for name, what in (("driver", "driver"), (worst, f"fastest: {worst}"), (STORE, STORE)):
        found = slopes[name]
        print(f"| {preset} | {workers} | {what} | {found.first:.1f} | {found.last:.1f} ", end="")
        print(
            f"| {found.per_hour:+.1f} +- {found.error:.1f} | {found.verdict(limit)} |", flush=True
        )
    return "GROWS" not in verdicts


def main() -> None:
    """Measures, prints a table and writes JSON. The exit status is 1 if a series grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of each run")
    parser.add_argument("--presets", nargs="+", choices=list(CASES), default=PRESETS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--limit", type=float, default=10.0, help="MiB an hour that count as flat")
    parser.add_argument("--out", type=Path, default=Path("results/memory.json"))
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train[0], int(args.train[1]), float(args.train[2]))
        return
    print("| preset | workers | what | first, MiB | last, MiB | MiB an hour | verdict |")
    print("|---|---:|---|---:|---:|---:|---|")
    kept, all_flat = [], True
    for preset in args.presets:
        for workers in args.workers:
            series = sample(preset, workers, 60.0 * args.minutes)
            slopes = judge(series)
            all_flat &= print_rows(preset, workers, slopes, args.limit)
            of = {name: found._asdict() for name, found in slopes.items()}
            kept.append({"preset": preset, "workers": workers, "slopes": of, "series_mib": series})
    where = about()
    print(
        f"\nFirst and last: means of the first and last of {BLOCKS} blocks after {WARM_UP:.0%} of"
    )
    print(f"the run. Flat: below {args.limit:g} MiB an hour, or within 2 standard errors of 0.")
    print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": where, "runs": kept}, indent=1))
    sys.exit(0 if all_flat else 1)


if __name__ == "__main__":
    main()
