"""Measures products of matrices in NumPy, MKL and oneDNN, and what a second thread gains, in turns.

All products are in float32, except those in the column of bfloat16.

    python benchmarks/products.py          # a minute
    python benchmarks/products.py --page   # only writes the page

oneDNN is called as `policies/fast_cpu/linear_layer.py` calls it, through an operation of torch that
is not public. A second thread computes one of two pieces, which it gets as from `side_by_side.py`,
or a part of each product. Each figure is the median of `TURNS` turns. The raw results are in
`benchmarks/results/products.jsonl`, and the page is `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch
from stored_runs import between, facts_of, measure_or_page

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/products.jsonl"
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- products: begin -->", "<!-- products: end -->"
TURNS, TURN_S = 15, 0.02
#: Rows, inner dimension, columns, and whether the left operand is a transposed view or a layer with
#: bias and ReLU.
SHAPES: dict[str, tuple[int, int, int, str]] = {
    "256x256x256": (256, 256, 256, ""),
    "the same, transposed operands (gradient of weights)": (256, 256, 256, "transposed"),
    "1024x256x256": (1024, 256, 256, ""),
    "64x256x256": (64, 256, 256, ""),
    "256x17x256 with bias and ReLU": (256, 17, 256, "layer"),
    "64x64x64": (64, 64, 64, ""),
}
LINEAR = torch.ops.mkldnn._linear_pointwise.default
LIBRARIES = {
    "numpy": "NumPy",
    "mkl": "`torch.mm` (MKL)",
    "onednn": "oneDNN",
    "bfloat16": "oneDNN in bfloat16",
}


#: Two pieces: the number of products of 256x256x256 in each, and whether another program computes
#: on one of the cores.
PIECES = {
    "1": (1, False),
    "3": (3, False),
    "6": (6, False),
    "3, and another program on one core": (3, True),
}
THREADS = {
    "one": "one thread",
    "pieces": "two threads, each with one piece",
    "products": "two threads in each product",
}


def ways_of(rows: int, inner: int, columns: int, kind: str) -> dict[str, Callable[[], Any]]:
    """Returns the functions that compute a product, by library."""
    draw = np.random.default_rng(0).standard_normal
    left = draw((rows, inner), np.float32)
    if kind == "transposed":
        left = draw((inner, rows), np.float32).T
    right = draw((inner, columns), np.float32)
    if kind == "layer":
        weight, bias = right.T.copy(), draw(columns, np.float32)
        zeros = np.zeros_like(bias)

        def in_numpy() -> np.ndarray:
            x = left.dot(weight.T)
            x += bias
            return np.maximum(x, zeros, out=x)

        return {"numpy": in_numpy, "onednn": lambda: in_onednn(left, weight, bias, "relu")}
    both = torch.from_numpy(left), torch.from_numpy(right)
    rounded = both[0].bfloat16(), both[1].T.bfloat16()
    return {
        "numpy": lambda: left.dot(right),
        "mkl": lambda: torch.mm(*both),
        "onednn": lambda: in_onednn(left, right.T),
        "bfloat16": lambda: LINEAR(*rounded, None, "none", [], ""),
    }


def in_onednn(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, activation: str = "none"
) -> np.ndarray:
    """Computes `x @ weight.T + bias`, and then `none` or `relu`."""
    shift = None if bias is None else torch.from_numpy(bias)
    both = torch.from_numpy(x), torch.from_numpy(weight)
    found: np.ndarray = LINEAR(*both, shift, activation, [], "").numpy()
    return found


def measure() -> dict[str, Any]:
    """Returns the GFLOP/s of all shapes and libraries, one list of turns each."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, (rows, inner, columns, kind) in SHAPES.items():
        ways = ways_of(rows, inner, columns, kind)
        found[name] = {library: [] for library in ways}
        for _ in range(TURNS):
            for library, compute in ways.items():
                count, began_s = 0, time.perf_counter()
                while (passed_s := time.perf_counter() - began_s) < TURN_S:
                    compute()
                    count += 1
                work = 2e-9 * rows * inner * columns * count
                found[name][library].append(round(work / passed_s, 1))
    return found


@contextmanager
def another_program(runs: bool) -> Iterator[None]:
    """Another program computes on one of the cores, if `runs` is True."""
    if not runs:
        yield
        return
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); exec('while True: pass')"
    program = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.5)
        yield
    finally:
        program.kill()
        program.wait()


def second_thread() -> Callable[[Callable[[], Any]], threading.Lock]:
    """Starts a thread. Returns a function that gives it work, and whose lock is free at the end."""
    queue: SimpleQueue[tuple[Callable[[], Any], threading.Lock]] = SimpleQueue()

    def serve() -> None:
        torch.set_num_threads(1)
        while True:
            compute, runs = queue.get()
            compute()
            runs.release()

    def give(compute: Callable[[], Any]) -> threading.Lock:
        runs = threading.Lock()
        runs.acquire()
        queue.put((compute, runs))
        return runs

    threading.Thread(target=serve, daemon=True).start()
    return give


def measure_threads() -> dict[str, Any]:
    """Returns the microseconds of two pieces, one list of turns for each way to compute them."""
    draw = np.random.default_rng(0).standard_normal
    squares = [[draw((256, 256), np.float32) for _ in range(2)] for _ in range(2)]
    give = second_thread()
    found: dict[str, Any] = {}
    for name, (number, is_busy) in PIECES.items():

        def piece(which: int, number: int = number) -> None:
            for _ in range(number):
                in_onednn(*squares[which])

        found[name] = {way: [] for way in THREADS}
        with another_program(is_busy):
            for _ in range(TURNS):
                for way, turns in found[name].items():
                    torch.set_num_threads(2 if way == "products" else 1)
                    count, began_s = 0, time.perf_counter()
                    while (passed_s := time.perf_counter() - began_s) < 5 * TURN_S:
                        if way == "pieces":
                            runs = give(partial(piece, 1))
                            piece(0)
                            runs.acquire()
                        else:
                            piece(0)
                            piece(1)
                        count += 1
                    turns.append(round(1e6 * passed_s / count, 1))
    return {f"two pieces of {name}": turns for name, turns in found.items()}


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    lines = [
        f"| product in one thread, GFLOP/s | {' | '.join(LIBRARIES.values())} |",
        f"|---|{'---:|' * len(LIBRARIES)}",
    ]
    for name in SHAPES:
        turns = store.get(name, {})
        cells = [f"{median(turns[one]):.0f}" if one in turns else "" for one in LIBRARIES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| two pieces, each with this number of products, us | {' | '.join(THREADS.values())} |",
        "|---|---:|---:|---:|",
    ]
    for name in PIECES:
        turns = store.get(f"two pieces of {name}", {})
        cells = [f"{median(turns[way]):,.0f}" if way in turns else "" for way in THREADS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    facts = facts_of(store)
    lines += ["", f"Medians of {TURNS} turns: `python benchmarks/products.py`, {facts}."]
    return between(text, BEGIN, END, lines)


def measure_all(_: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of both tables."""
    return {**measure(), **measure_threads()}


def main() -> None:
    """Measures all products, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure_all)


if __name__ == "__main__":
    main()
