"""Compares two checkouts of polopt, A and B: environment steps/s and processor time.

    python benchmarks/compare.py PATH_OF_A PATH_OF_B                 # all rows. About 45 minutes
    python benchmarks/compare.py A B --only a3c ppo --pairs 3        # two rows. Minutes

    python benchmarks/compare.py A B --only a3c --turns --processes 12 --pairs 4 --seconds 1.5

Each measurement is a new process with PYTHONPATH=<checkout>/src, pinned to two cores. The checkouts
are measured in turns: A B A B. The ratio of a pair is the figure of B divided by the figure of A. A
row shows the median of the ratios with its 95 percent interval (percentile bootstrap over the
pairs).

With `--turns`, one process of A and one process of B measure in turns, and one waits while the
other measures. This helps on machines whose speed changes within seconds. However, the speed of a
process has a random part that stays the same during its life. Two processes of the same commit
differed by up to 12 percent. So `--processes` starts several pairs of processes. Each pair gives
one median. The row and its interval summarise these medians.

Processor time is the sum over the driver and all Ray workers with their children, per 1,000
environment steps. On a machine that runs other programs, it varies less than the rate.

Verdict of a row:
- "slower" if the interval of the rate's ratio is below 0.95.
- "slower (processor time)" if the interval of the rate's ratio is wider than 0.1, and the interval
  of the processor time's ratio is above 1.05.
- "as fast" otherwise.

Needs the MuJoCo environments for the rows of HalfCheetah-v5: pip install -e '.[benchmark]'.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from about import about
from environments import PEERS, PeerError
from processes import STARTUP_LIMIT_S, Turns, run
from stored_runs import write_runs

#: From the name of a row to its case of `peers/polopt/run.py`.
ROWS = {
    "a3c": "a3c",
    "a3c-untrained": "a3c-untrained",
    "ppo": "ppo",
    "ddppo": "ddppo",
    "async-samples": "async-samples",
    "impala": "impala",
    "worker": "sample",
    "collector-sync": "collect-sync",
    "collector-async": "collect-async",
    "a3c-halfcheetah": "a3c-halfcheetah",
    "ppo-halfcheetah": "ppo-halfcheetah",
    "ddppo-halfcheetah": "ddppo-halfcheetah",
}
RESAMPLES = 10_000
SLOWER = 0.95
WIDE = 0.10


class Interval(NamedTuple):
    """A median and its 95 percent interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Computes the interval by a percentile bootstrap with a fixed seed."""
        draw = random.Random(0)
        medians = sorted(
            statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
        )
        low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class Pair(NamedTuple):
    """Results of one measurement of A and of the next measurement of B."""

    a: dict[str, Any]
    b: dict[str, Any]


def measure_pair(case: str, checkouts: Sequence[Path], seconds: float, seed: int) -> Pair:
    """Measures each checkout once, with the same seed.

    Raises:
        PeerError: a measurement failed. The message names the checkout.
    """
    results = []
    for side, checkout in zip("AB", checkouts, strict=True):
        command = [sys.executable, str(PEERS / "polopt" / "run.py"), case]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        try:
            result = run(command, 2 * seconds + STARTUP_LIMIT_S, checkout / "src")
        except PeerError as error:
            raise PeerError(f"{side}: {error}") from None
        results.append(result)
        rate, cost = result["rate"], result["cpu_s_per_1000_steps"]
        print(f"{case} {side}: {rate:,.0f} steps/s, {cost:.4f} s", file=sys.stderr, flush=True)
    return Pair(*results)


def measure_turns(case: str, checkouts: Sequence[Path], seconds: float, pairs: int) -> list[Pair]:
    """Starts one process of each checkout and measures them in turns.

    Raises:
        PeerError: a process or measurement failed.
    """
    command = [sys.executable, str(PEERS / "polopt" / "run.py"), case, "--turns"]
    command += ["--seconds", str(seconds)]
    limit_s = 2 * seconds + STARTUP_LIMIT_S
    measured = []
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(Turns(command, limit_s, c / "src")) for c in checkouts)
        for side in (a, b):
            side.result()  # returns when this process has started
        for number in range(pairs):
            if number % 2:
                measured.append(Pair(a.measure(), b.measure()))
            else:
                second, first = b.measure(), a.measure()
                measured.append(Pair(first, second))
    return measured


def verdict(rate: Interval, cost: Interval) -> str:
    """Returns the verdict of a row, as the docstring of this module describes it."""
    if rate.high < SLOWER:
        return "slower"
    if rate.high - rate.low > WIDE and cost.low > 1.05:
        return "slower (processor time)"
    return "as fast"


def table_row(name: str, groups: Sequence[Sequence[Pair]]) -> str:
    """Returns one row in Markdown.

    Args:
        name: name of the row.
        groups: measurements, in one group for each pair of processes. The median of a group counts
            as one measurement.
    """
    rates, costs = (_compared(groups, key) for key in ("rate", "cpu_s_per_1000_steps"))
    cells = [
        name,
        *(f"{side:,.0f}" for side in rates[:2]),
        str(rates[2]),
        *(f"{1000.0 * side:,.1f}" for side in costs[:2]),
        str(costs[2]),
        verdict(rates[2], costs[2]),
    ]
    return "| " + " | ".join(cells) + " |"


def _compared(groups: Sequence[Sequence[Pair]], key: str) -> tuple[float, float, Interval]:
    """Returns the medians of A and of B, and the interval of the ratio B / A."""
    pairs = [(float(pair.a[key]), float(pair.b[key])) for group in groups for pair in group]
    ratios = [statistics.median(pair.b[key] / pair.a[key] for pair in group) for group in groups]
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    return a, b, Interval.of(ratios)


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout. It ends in `-dirty` if the checkout has changes."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", type=Path, help="checkout A (before)")
    parser.add_argument("b", type=Path, help="checkout B (after)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each checkout")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--turns", action="store_true", help="one process of each checkout")
    parser.add_argument("--processes", type=int, default=1, help="of each checkout, with --turns")
    parser.add_argument("--out", type=Path, default=Path("results/compare.jsonl"))
    args = parser.parse_args()
    for checkout in (args.a, args.b):
        if not (checkout / "src" / "polopt").is_dir():
            parser.error(f"{checkout} has no src/polopt")
    return args


def main() -> int:
    """Measures, prints a table in Markdown and writes JSON. Returns 1 if a measurement failed."""
    args = parse()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)  # every process that this process starts inherits the cores
    checkouts = (args.a, args.b)
    commits = [commit_of(checkout) for checkout in checkouts]
    facts = {**about(), "pinned to cores": cores}
    facts["commit"] = f"A {commits[0]}, commit B {commits[1]}"
    command = " ".join(["python", *sys.argv])
    lines = [
        "| row | A, steps/s | B, steps/s | B / A (95% interval) | A, CPU ms per 1,000 steps "
        "| B, CPU ms per 1,000 steps | B / A (95% interval) | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    kept: dict[str, Any] = {"about": {**facts, "command": command}}
    failed = False
    for name in args.only:
        groups: list[list[Pair]] = []
        note = ""
        try:
            if args.turns:
                for _ in range(args.processes):
                    groups.append(measure_turns(ROWS[name], checkouts, args.seconds, args.pairs))
                if args.processes == 1:
                    groups = [[pair] for pair in groups[0]]
            else:
                for seed in range(args.pairs):
                    groups.append([measure_pair(ROWS[name], checkouts, args.seconds, seed)])
        except PeerError as error:
            failed, note = True, str(error)
        lines.append(
            f"| {name} |||||||  not measured: {note} |" if note else table_row(name, groups)
        )
        kept[name] = {"groups": [[pair._asdict() for pair in group] for group in groups]}
        write_runs(args.out, kept)  # after each row, because a run takes long
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    each = f" of each of {args.processes} processes" if args.turns else ""
    print(f"\n{args.pairs} pairs of {args.seconds:g} s{each}. Medians. ", end="")
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + ".")
    print(f"\nCommand: `{command}`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
