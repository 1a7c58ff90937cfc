"""Measures the processor seconds of a process that loads a policy and acts once.

    python benchmarks/load_time.py [--repeats 7]

For comparison, other processes only import torch, or torch and Gymnasium. Each measurement is a new
process, and the three programs run in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from about import about

import polopt

LIMIT_S = 300.0
PROGRAMS = {
    "`import torch`": "import torch",
    "`import torch, gymnasium`": "import torch, gymnasium",
    "`polopt.load(...).predict(...)`": (
        "import sys, polopt; polopt.load(sys.argv[1]).predict([0.0, 0.1, 0.0, -0.1])"
    ),
}


def processor_s(program: str, checkpoint: str) -> float:
    """Returns the user and system processor seconds of the program."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program, checkpoint], check=True, timeout=LIMIT_S)
    after = os.times()
    used_s = after.children_user + after.children_system
    return used_s - before.children_user - before.children_system


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    runs: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        trainer = polopt.SyncPPO(env="CartPole-v1", num_workers=0)
        trainer.save(folder)
        trainer.stop()
        for _ in range(args.repeats):
            for name, program in PROGRAMS.items():
                runs[name].append(processor_s(program, folder))
    print("| program | processor seconds, median (range) |")
    print("|---|---:|")
    for name, used_s in runs.items():
        spread = f"{min(used_s):.2f} to {max(used_s):.2f}"
        print(f"| {name} | {statistics.median(used_s):.2f} ({spread}) |")
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
