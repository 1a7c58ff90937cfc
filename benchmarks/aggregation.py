"""Measures what aggregators would save the driver, on gradients that workers make.

    python benchmarks/aggregation.py          # what is missing, in about three minutes
    python benchmarks/aggregation.py --transports auto --kilobytes 20      # only the main row
    python benchmarks/aggregation.py --page   # only writes the page

Each worker sleeps for 10 ms, as if its environment did, and returns a gradient. The driver adds up
all gradients. It gets them in one of three ways:

- `driver`: each gradient comes to the driver, as in AsyncGradients and SyncGradients.
- `aggregator`: each gradient stays with its worker. The driver sends the references of four
  gradients to an aggregator process, which returns their sum. The driver still gets an answer for
  each gradient, and sends a call for each.
- `below`: one worker gathers the gradients of four sleeping workers, and returns their sum. This is
  `num_workers_below=4`. The driver gets one answer for four gradients.

The driver's processor time for one gradient says how many workers it can serve: the knee is at the
number of workers whose gradients take all of its time. The script adds each case to
`benchmarks/results/aggregation.jsonl`, and skips cases that the file has, unless other programs ran
meanwhile. The page is `docs/several-nodes.md`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
from about import about
from quiet import is_good, wait_until_quiet, watching_others
from stored_runs import between, read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/aggregation.jsonl"
PAGE = ROOT / "docs/several-nodes.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
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


def key_of(way: str, transport: str, kilobytes: int, workers: int) -> str:
    return f"{way} {transport} {kilobytes} {workers}"


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the lines of the stored results."""
    return between(text, BEGIN, END, table(store))


def table(store: dict[str, Any]) -> list[str]:
    """Returns the lines of the page."""
    rows = [key.split() for key in store if key != "about"]
    points = sorted({(one[1], int(one[2]), int(one[3])) for one in rows})
    lines = [
        "| transport | size of a gradient | workers | each to the driver | four to an aggregator | "
        "`num_workers_below: 4` |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    busy = 0
    for transport, kilobytes, workers in points:
        cells = []
        for way in WAYS:
            one = store.get(key_of(way, transport, kilobytes, workers))
            cells.append(f"{one['per_s']:,.0f}/s, {one['driver_ms']:.2f} ms" if one else "")
            busy += one is not None and not is_good(one)
        size = f"{kilobytes} KB" if kilobytes < 1000 else f"{kilobytes / 1000:g} MB"
        name = "socket" if transport == "auto" else transport
        lines.append(f"| {name} | {size} | {workers} | " + " | ".join(cells) + " |")
    said = ", ".join(f"{one} {of}" for one, of in sorted(store.get("about", {}).items()))
    return [*lines, "", said + (f". Other programs ran during {busy} cases." if busy else ".")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[20, 1000, 10000])
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--transports", nargs="+", default=["auto", "ray"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--patience-s", type=float, default=60.0, help="wait for a quiet machine")
    parser.add_argument("--busy", action="store_true", help="also run if other programs run")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    store = read_runs(STORE)
    if not options.page:
        store["about"] = about()
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        for kind in options.transports:
            measure_transport(kind, store, options)
    PAGE.write_text(page(store, PAGE.read_text()))
    print("\n".join(table(store)))


def measure_transport(kind: str, store: dict[str, Any], options: Any) -> None:
    """Measures what is missing with one transport."""
    most = max(options.workers)
    trainer = polopt.PolicyOptimizerTrainer(
        env="CartPole-v1",
        policy="a2c",
        optimizer="async_gradients",
        num_workers=most + num_aggregators(most),
        num_cpus_per_worker=0.01,
        transport=kind,
    )
    processes = trainer.optimizer.workers
    for kilobytes, workers, way in itertools.product(options.kilobytes, options.workers, WAYS):
        key = key_of(way, kind, kilobytes, workers)
        if is_good(store.get(key)):
            continue
        if not options.busy:
            wait_until_quiet(options.patience_s)
        with watching_others() as others:
            found = measure(way, 250 * kilobytes, workers, options.seconds, processes)
        store[key] = {name: round(value, 4) for name, value in found.items()}
        store[key]["others"] = others.cores
        print(key, store[key], flush=True)
        write_runs(STORE, store)
    trainer.stop()


if __name__ == "__main__":
    main()
