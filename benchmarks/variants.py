"""Measures the cost of transports and of evaluation during training.

    python benchmarks/variants.py                       # about 15 minutes
    python benchmarks/variants.py --turns 1 --seconds 3 # about 5 minutes

The transports are sockets, Ray, and gloo's all-reduce. Evaluation runs between iterations, or in an
evaluation worker during training, or not at all. As in `compare.py`, the script measures
environment steps/s, and the processor time of the driver and all workers per 1,000 environment
steps. Each measurement is a new process. A turn measures a case and each of its variants once. A
row shows the median ratio of the turns, with the smallest and the largest ratio. Needs the MuJoCo
environments for HalfCheetah-v5: pip install -e '.[benchmark]'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from about import about
from environments import PEERS
from processes import STARTUP_LIMIT_S, run

ENVS = ("", "-halfcheetah")
#: From a case of `peers/polopt/run.py`, with sockets and without evaluation, to its variants.
CASES = {
    **{f"a3c{env}": ("-ray",) for env in ENVS},
    **{f"async-samples{env}": ("-ray",) for env in ENVS},
    **{f"ddppo{env}": ("-ray", "-gloo") for env in ENVS},
    "ppo-halfcheetah": ("-evaluated", "-evaluated-beside"),
}


def measure(case: str, seconds: float, seed: int) -> dict[str, Any]:
    """Returns the rate and processor time of one run."""
    command = [sys.executable, str(PEERS / "polopt" / "run.py"), case]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    source = Path(__file__).resolve().parents[1] / "src"
    result = run(command, 2 * seconds + STARTUP_LIMIT_S, source)
    print(f"{case}: {result['rate']:,.0f} steps/s", file=sys.stderr, flush=True)
    return result


def spread(values: list[float]) -> str:
    """Formats values as median (smallest to largest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measures and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    print(
        "| case | case, steps/s | variant | variant, steps/s "
        "| case / variant, steps/s | case / variant, CPU time |"
    )
    print("|---|---:|---|---:|---|---|")
    for case in args.only:
        variants = ("", *CASES[case])
        turns = [
            {variant: measure(case + variant, args.seconds, seed) for variant in variants}
            for seed in range(args.turns)
        ]
        for variant in CASES[case]:
            rates = [float(turn[""]["rate"]) / float(turn[variant]["rate"]) for turn in turns]
            key = "cpu_s_per_1000_steps"
            costs = [float(turn[""][key]) / float(turn[variant][key]) for turn in turns]
            own, other = (
                statistics.median(float(turn[side]["rate"]) for turn in turns)
                for side in ("", variant)
            )
            print(
                f"| {case} | {own:,.0f} | {variant.lstrip('-')} | {other:,.0f} | {spread(rates)} "
                f"| {spread(costs)} |",
                flush=True,
            )
    print(f"\n{args.turns} turns of {args.seconds:g} s. ", end="")
    print(", ".join(f"{key} {value}" for key, value in about().items()) + ".")
    print(f"\nCommand: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
