"""Measures what aggregators would save the driver, on gradients that workers make.

    python benchmarks/aggregation.py [--kilobytes 20 1000 10000] [--workers 4 8 16]
                                     [--seconds 4] [--out aggregation.json]

Each worker sleeps for 10 ms, as if its environment did, and returns a gradient. The driver adds up
all gradients. It gets them in one of three ways:

- `driver`: each gradient comes to the driver, as in AsyncGradients and SyncGradients.
- `aggregator`: each gradient stays with its worker. The driver sends the references of four
  gradients to an aggregator process, which returns their sum. The driver still gets an answer for
  each gradient, and sends a call for each.
- `below`: one worker gathers the gradients of four sleeping workers, and returns their sum. This is
  `num_workers_below=4`. The driver gets one answer for four gradients.

The driver's processor time for one gradient says how many workers it can serve: the knee is at the
number of workers whose gradients take all of its time. The script prints Markdown. It adds each
case to a JSON file, and skips cases that the file already has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
from about import about

import polopt

SLEEP_S = 0.01
GROUP = 4
WAYS = ("driver", "aggregator", "below")


def make_gradient(worker: Any, size: int, number: int) -> np.ndarray:
    """Sleeps, and returns the sum of `number` gradients of `size` parameters. With several, other
    workers would sleep at the same time."""
    time.sleep(SLEEP_S)
    made = np.ones(size, np.float32)
    for _ in range(number - 1):
        made += np.ones(size, np.float32)
    return made


def add_up(aggregator: Any, *gradients: np.ndarray) -> np.ndarray:
    """Returns the sum of gradients. Ray passes them as arrays that cannot be written."""
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    return total


def measure(
    way: str, size: int, workers: int, seconds: float, processes: polopt.WorkerSet
) -> dict[str, float]:
    """Returns gradients per second, and the driver's processor time for one gradient. Any worker
    can be an aggregator, because it runs any function."""
    each = GROUP if way == "below" else 1
    calls = polopt.Calls(processes, "aggregation", per_worker=100)
    up = processes.up()
    makers, aggregators = (
        up[: max(1, workers // each)],
        up[workers : workers + num_aggregators(workers)],
    )
    total, counted = np.zeros(size, np.float32), 0
    made: list[polopt.Reply] = []  # the answers whose gradients no aggregator has yet

    def more(worker: polopt.WorkerHandle) -> None:
        calls.send(worker, make_gradient, size, each, by_reference=way == "aggregator")

    for worker in makers:
        more(worker)
    began_s = used_s = 0.0
    until_s = time.monotonic() + 1.0  # the first second is not measured
    while True:
        reply = calls.first()
        if way == "aggregator" and reply.tag is None:
            made.append(reply)
            if len(made) == GROUP:
                free = min(aggregators, key=calls.num_work_of)
                makers_of = [one.worker for one in made]
                calls.send(free, add_up, *[one.value for one in made], tag=makers_of)
                made = []
        else:
            total += reply.value
            counted += GROUP if way != "driver" else 1
            for worker in reply.tag or [reply.worker]:
                more(worker)
        if time.monotonic() >= until_s:
            if began_s:
                break
            began_s, used_s, counted = time.monotonic(), time.process_time(), 0
            until_s = began_s + seconds
    passed_s, used_s = time.monotonic() - began_s, time.process_time() - used_s
    calls.wait()
    calls.clear()
    return {"per_s": counted / passed_s, "driver_ms": 1000.0 * used_s / max(1, counted)}


def num_aggregators(workers: int) -> int:
    return max(1, workers // 8)


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [
        "| transport | kilobytes | workers | " + " | ".join(WAYS) + " |",
        "|---|---:|---:|" + "---:|" * len(WAYS),
    ]
    rows = dict.fromkeys(tuple(key.split("/")[1:]) for key in found)
    for kind, kilobytes, workers in rows:
        cells = []
        for way in WAYS:
            one = found.get(f"{way}/{kind}/{kilobytes}/{workers}")
            cells.append(f"{one['per_s']:,.0f}/s, {one['driver_ms']:.2f} ms" if one else "")
        lines.append(f"| {kind} | {kilobytes} | {workers} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(say: Callable[..., None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[20, 1000, 10000])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--transports", nargs="+", default=["auto", "ray"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("aggregation.json"))
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = known.setdefault("cases", {})
    known["about"] = about()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    most = max(options.workers)
    for kind in options.transports:
        trainer = polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="a2c",
            optimizer="async_gradients",
            num_workers=most + num_aggregators(most),
            num_cpus_per_worker=0.01,
            transport=kind,
        )
        for kilobytes in options.kilobytes:
            for workers in options.workers:
                for way in WAYS:
                    key = f"{way}/{kind}/{kilobytes}/{workers}"
                    if key not in cases:
                        size = 250 * kilobytes
                        cases[key] = measure(
                            way, size, workers, options.seconds, trainer.optimizer.workers
                        )
                        options.out.write_text(json.dumps(known, indent=1))
        trainer.stop()
    say(table(cases))


if __name__ == "__main__":
    main()
