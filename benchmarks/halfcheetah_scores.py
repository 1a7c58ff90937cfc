"""Prints the scores of SyncPPO, DDPPO and decoupled PPO on HalfCheetah-v5 in `results/tasks.jsonl`
as CSV, for `polopt compare --runs`.

    python benchmarks/halfcheetah_scores.py > halfcheetah.csv
    polopt compare --runs halfcheetah.csv --equal-within 500
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from stored_runs import read_runs

VARIANTS = {
    "HalfCheetah-v5/halfcheetah_ppo": "SyncPPO",
    "HalfCheetah-v5/halfcheetah_ddppo": "DDPPO",
    "HalfCheetah-v5/halfcheetah_decoupled_ppo": "decoupled PPO",
}


def main() -> None:
    """Prints a row for each seed."""
    writer = csv.writer(sys.stdout)
    writer.writerow(("variant", "seed", "steps", "seconds", "score"))
    for name, run in read_runs(Path(__file__).parent / "results" / "tasks.jsonl").items():
        task, _, seed = name.rpartition("/")
        if task in VARIANTS:
            values = (run["env_steps"], run["seconds"], run["return"])
            writer.writerow((VARIANTS[task], seed, *values))


if __name__ == "__main__":
    main()
