"""Measures the time from `polopt train` to its first result and to its end, and processor time.

    python benchmarks/startup.py [CHECKOUT ...] [--repeats 5]

Each measurement is a new process with PYTHONPATH=<checkout>/src that trains one iteration of a
tuned example. Several checkouts are measured in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from about import about

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
POLL_S = 0.02


def measure(checkout: Path, example: str) -> tuple[float, float, float]:
    """Runs the command. Returns the seconds to the first line of a result file, the seconds to the
    end, and processor seconds.

    The processor seconds include the command and all descendants whose parents waited for their
    end. Some of Ray's own processes are not included.

    Raises:
        RuntimeError: the command failed or did not write a result.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        code = "import sys; from polopt.command_line.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "train", example, "stop.training_iteration=1"]
        environ = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
        before, started_s = os.times(), time.perf_counter()
        process = subprocess.Popen(
            [*command, "--results-dir", folder], stdout=log, stderr=log, cwd=folder, env=environ
        )
        first_s = None
        while process.poll() is None and time.perf_counter() - started_s < LIMIT_S:
            if first_s is None and any(
                path.stat().st_size for path in Path(folder).rglob("result.json")
            ):
                first_s = time.perf_counter() - started_s
            time.sleep(POLL_S)
        process.kill()
        status = process.wait()
        end_s, after = time.perf_counter() - started_s, os.times()
        if status or first_s is None:
            log.seek(0)
            raise RuntimeError(f"{checkout}: status {status}:\n{log.read()[-2000:]}")
        used_s = after.children_user + after.children_system
        return first_s, end_s, used_s - before.children_user - before.children_system


def cell(values: list[float]) -> str:
    """Formats the median and range for a table."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--example", default="cartpole_a3c", help="a tuned example")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    runs: list[list[tuple[float, float, float]]] = [[] for _ in args.checkouts]
    for _ in range(args.repeats):
        for checkout, measured in zip(args.checkouts, runs, strict=True):
            measured.append(measure(checkout, args.example))
    print("| checkout | first result, s | end of the command, s | processor seconds |")
    print("|---|---:|---:|---:|")
    for checkout, measured in zip(args.checkouts, runs, strict=True):
        columns = [cell(list(values)) for values in zip(*measured, strict=True)]
        print(f"| {checkout} | {' | '.join(columns)} |")
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
